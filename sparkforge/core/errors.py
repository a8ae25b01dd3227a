"""The errors: one class and one exit code for each family, one stable code string for each case.

A message has three parts: what failed, why, and the next command to run. A program that calls `./inv` reads the exit
code for the family; `code` tells the cases of a family apart. `docs/reference/errors.md` is made from this module.
"""

from __future__ import annotations

from typing import ClassVar


class SparkforgeError(Exception):
    """Something failed that a user can act on; never shown as a traceback."""

    exit_code: ClassVar[int] = 1
    family: ClassVar[str] = ""

    def __init__(self, what: str, why: str, fix: str, *, code: str = "") -> None:
        """Keep the three parts of the message; `code` is a key of CODES, by default the family's own name."""
        super().__init__(what, why, fix)
        self.what, self.why, self.fix = what, why, fix
        self.code = code or self.family

    def __str__(self) -> str:
        return f"{self.what} · {self.why} · {self.fix}"


class UsageError(SparkforgeError):
    """An argument or option is invalid."""

    exit_code, family = 2, "usage"


class InputError(SparkforgeError):
    """A file that a command reads is missing, malformed, or not what it must be."""

    exit_code, family = 10, "input"


class NetworkError(SparkforgeError):
    """Something could not be fetched or posted."""

    exit_code, family = 11, "network"


class IntegrityError(SparkforgeError):
    """Something is not what its hash or its manifest says; nothing of it was kept."""

    exit_code, family = 12, "integrity"


class PatchError(SparkforgeError):
    """A patch queue cannot be read or applied; the tree is as it was."""

    exit_code, family = 14, "patch"


class ServerError(SparkforgeError):
    """A server cannot start, does not run, or does not answer correctly."""

    exit_code, family = 24, "server"


class StorageError(SparkforgeError):
    """A file or folder cannot be read or written, is in use by another command, or has too little space."""

    exit_code, family = 28, "storage"


class RefusalError(SparkforgeError):
    """The validator, the doctor or the plan found a reason to refuse."""

    exit_code, family = 30, "validation"


class ProcessError(SparkforgeError):
    """A program that we ran failed; its last lines are in the message."""

    exit_code, family = 41, "process"


class CompileError(SparkforgeError):
    """Kernels or extensions cannot be compiled, or what was compiled is incomplete."""

    exit_code, family = 50, "compile"


class AuditError(SparkforgeError):
    """A binary breaks a rule of the audit: wrong target, software or traps in place of FP4, a damaged file."""

    exit_code, family = 54, "audit"


class EngineError(SparkforgeError):
    """The Docker engine is missing, does not answer, or failed; its own message is included."""

    exit_code, family = 62, "engine"


class BenchmarkError(SparkforgeError):
    """A measurement did not pass its gate or did not finish."""

    exit_code, family = 70, "benchmark"


# What each code means, in the order of the families. Codes are stable: scripts may rely on them.
CODES = {
    "usage": "An argument or option is invalid.",
    "input": "A file that a command reads is missing or malformed.",
    "input.pins": "`pins.toml` or a lock is malformed: no hash, an unknown key, a duplicate, a missing entry.",
    "input.model": "A model directory is missing, incomplete, or of no known family.",
    "input.config": "A config.json cannot be planned for: unreadable, another architecture, or senseless sizes.",
    "input.table": "A table that plans are made from is malformed.",
    "input.facts": "A recorded fact sheet cannot be read.",
    "input.signatures": "The doctor's table of signatures is malformed.",
    "input.baselines": "The benchmark's baselines are malformed: an unknown key, a figure without source or date.",
    "input.result": "A result file cannot be read, or is not one of ours.",
    "input.trace": "A profiler's trace cannot be read, or is damaged, too large or empty.",
    "input.text": "The text that the accuracy gate scores is missing, or is not the text that the limits are for.",
    "network.fetch": "A pinned file could not be fetched: no network, not on the index, or a broken transfer.",
    "network.node": "A node of a cluster cannot be reached by ssh without a question.",
    "network.submit": "A result was not posted; it is kept, and the same command tries again.",
    "integrity.hash": "A file is not the one that was pinned; nothing of it was kept.",
    "integrity.archive": "An archive or bundle is malformed or would write outside its folder; nothing of it was kept.",
    "integrity.image-tree": "What is to become an image is not what its locks, patches and tables say.",
    "integrity.installed": "An installed package is not the wheel that it was made from: its RECORD or a file differs.",
    "integrity.image": "An image or kernel pack is for another platform, or not made from this checkout.",
    "integrity.signature": "An image, pack or bundle lacks a signature that trust.toml demands, or an image is older.",
    "patch.format": "A patch or its series is malformed or would write outside its tree.",
    "patch.lock": "A patched wheel, or the queue that makes it, is not what locks/patched.toml says.",
    "patch.conflict": "A patch does not apply with fuzz 0; the tree is as it was.",
    "patch.modified": "A tree was edited by hand since the patch queue last touched it.",
    "server.port": "Another program listens on the port.",
    "server.running": "A server of this checkout runs already.",
    "server.not-running": "No server of this checkout runs.",
    "server.start": "The server ended, or gave no token in time; nothing is left running.",
    "server.cluster": "A node of a cluster ended or does not answer, so the others end too; it is named.",
    "server.rollback": "There is nothing to go back to, something of it is missing, or its start failed.",
    "server.service": "The systemd service cannot be installed, is not installed, or has stopped trying.",
    "server.reply": "The server answered with an error or with an invalid response.",
    "server.memory": "The memory guard ended the server before the machine, or its container, had no memory left.",
    "server.restarts": "The server ended too often in a short time; restart it by hand.",
    "storage.access": "A file or folder cannot be read or written: no permission, read-only, in the way, or gone.",
    "storage.full": "A file system has too little room for the next step.",
    "storage.busy": "Another Sparkforge command is changing the same files, or a program uses the model.",
    "storage.cache": "A path cannot be removed from a kernel cache: it lies outside the cache, or a process uses it.",
    "validation.failed": "At least one required check failed, so no server was started.",
    "validation.incomplete": "A required check was skipped, so validation did not pass; no check failed.",
    "validation.problems": "`./inv doctor` found at least one problem; all of them are on stdout.",
    "validation.cluster": "The nodes of a cluster cannot serve together; nothing was started.",
    "validation.too-large": "A model, with the context and concurrency asked for, does not fit the device's memory.",
    "process.failed": "A program that we ran failed; its last lines are in the message.",
    "process.setup": "A Python environment could not be made from its lock.",
    "process.checks": "A linter, the type checker or an import contract found something; its own output says what.",
    "process.tests": "At least one test failed; pytest's own report says which.",
    "compile.toolchain": "A compiler or another build tool is missing, too old, or does not fit the others.",
    "compile.killed": "The kernel killed a compiler twice, the second time when it ran alone: too little memory.",
    "compile.memory": "A step needs more memory than this machine can give now; it was not started.",
    "compile.environment": "The Python environment that kernels are built for lacks FlashInfer, torch or the patches.",
    "compile.kernels": "A kernel module was built, but a server would compile it again.",
    "compile.inputs": "A repository, or torch with CUDA, that vLLM's extensions are compiled from or with is missing.",
    "compile.incomplete": "A build ended without all of its outputs, or its output does not fit the target.",
    "audit": "A binary breaks a rule of the audit.",
    "engine.missing": "No Docker engine, or no `docker` command, is installed here.",
    "engine.down": "The Docker engine does not run, or does not answer.",
    "engine.permission": "This user may not talk to the Docker engine.",
    "engine.tool": "The `docker` command lacks buildx or Compose, or has one that is too old.",
    "engine.gpu": "The Docker engine cannot give a container the GPU: no NVIDIA runtime and no CDI device.",
    "engine.base": "The base image that a stack's image is built on cannot be pulled.",
    "engine.image": "An image is not on this machine and cannot be pulled.",
    "engine.registry": "An image registry cannot be reached, refuses the login, or speaks plain HTTP.",
    "engine.failed": "The Docker engine, buildx or Compose failed in another way; its own message is included.",
    "benchmark.gate": "The served model is less accurate than its threshold, or a figure is not a number; no load ran.",
    "benchmark.undecided": "The accuracy gate has no thresholds for this model and text, or no prompt logprobs.",
    "benchmark.load": "A load run did not finish, or its figures contradict each other; its result says failed.",
    "benchmark.batch": "At least one configuration of a batch failed; the others were measured.",
    "benchmark.board": "The board does not accept a result: another model, text, limits or shape; it was not posted.",
    "benchmark.guard": "The memory guard did not end every server of a trial by name.",
    "benchmark.bakeoff": "No server of a bakeoff passed the gate and the load, so there is nothing to rank.",
}
