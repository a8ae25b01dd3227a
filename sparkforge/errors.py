"""Every way in which Sparkforge refuses, one class and one exit code each.

A message has three parts: what failed, why, and the next command to run. `docs/errors.md` is generated from this
module and a test keeps the two equal.
"""

from __future__ import annotations

import sys
from typing import ClassVar


class SparkforgeError(Exception):
    """Something failed that a user can act on; never shown as a traceback."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what, why, fix)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        return f"{self.what} · {self.why} · {self.fix}"


class UsageError(SparkforgeError):
    """An argument has no meaning here."""

    exit_code = 2


class PinError(SparkforgeError):
    """`pins.toml` or a lock is malformed: no hash, an unknown key, a duplicate, a missing entry."""

    exit_code = 10


class FetchError(SparkforgeError):
    """A pinned file could not be brought: no network, not on the index, a broken transfer."""

    exit_code = 11


class HashMismatchError(SparkforgeError):
    """A file is not the one that was pinned; nothing of it was kept."""

    exit_code = 12


class PatchFormatError(SparkforgeError):
    """A patch or its series is malformed or would write outside its tree."""

    exit_code = 13


class PatchConflictError(SparkforgeError):
    """A patch does not apply with fuzz 0; the tree is as it was."""

    exit_code = 14


class TreeModifiedError(SparkforgeError):
    """A tree was edited by hand since the patch queue last touched it."""

    exit_code = 15


class RuntimeSetupError(SparkforgeError):
    """A Python environment could not be made from its lock."""

    exit_code = 16


class ArchiveError(SparkforgeError):
    """An archive or bundle is malformed or would write outside its folder; nothing of it was kept."""

    exit_code = 17


class ProvenanceError(SparkforgeError):
    """A file's origin is not recorded, or its records do not fit together."""

    exit_code = 18


class ModelError(SparkforgeError):
    """A model directory is missing, incomplete, or not a gpt-oss checkpoint."""

    exit_code = 20


class PortTakenError(SparkforgeError):
    """Another program listens on the port."""

    exit_code = 21


class AlreadyRunningError(SparkforgeError):
    """A server of this checkout runs already."""

    exit_code = 22


class NotRunningError(SparkforgeError):
    """No server of this checkout runs."""

    exit_code = 23


class StartFailedError(SparkforgeError):
    """The server ended, or gave no token in time; nothing is left running."""

    exit_code = 24


class DiskFullError(SparkforgeError):
    """A file system has too little room for the next step."""

    exit_code = 25


class ServerReplyError(SparkforgeError):
    """The server answered with an error or with something that is no answer."""

    exit_code = 26


class DeviceError(SparkforgeError):
    """The device asked for is not there, or its path is not built yet."""

    exit_code = 27


class StorageError(SparkforgeError):
    """A file or folder cannot be read or written: no permission, read-only, in the way, or gone."""

    exit_code = 28


class ValidationFailedError(SparkforgeError):
    """At least one check failed: no green report, no server."""

    exit_code = 30


class FactsError(SparkforgeError):
    """A recorded fact sheet cannot be read."""

    exit_code = 31


class ValidationIncompleteError(SparkforgeError):
    """A required check was skipped; nothing failed, but nothing is green either."""

    exit_code = 32


class BusyError(SparkforgeError):
    """Another Sparkforge command is changing the same files."""

    exit_code = 40


class CommandError(SparkforgeError):
    """A program that we ran failed; its last lines are in the message."""

    exit_code = 41


class TestsFailedError(SparkforgeError):
    """At least one test failed; pytest's own report says which."""

    exit_code = 42
    __test__ = False  # pytest collects names that begin with Test


class ToolchainError(SparkforgeError):
    """A compiler or another build tool is missing, too old, or does not fit the others."""

    exit_code = 50


class CompilerKilledError(SparkforgeError):
    """The kernel killed a compiler twice, the second time with no other beside it: too little memory."""

    exit_code = 51


class MemoryShortError(SparkforgeError):
    """A step needs more memory than this machine can give now; it was not started."""

    exit_code = 53


class CacheError(SparkforgeError):
    """A path of a kernel cache must not be removed: it lies outside the cache, or a live process uses it."""

    exit_code = 52


class AuditError(SparkforgeError):
    """A binary breaks a rule of the audit: wrong target, software or traps in place of FP4, a damaged file."""

    exit_code = 54


class GateFailedError(SparkforgeError):
    """The served model is less accurate than its threshold, or gave figures that are none: nothing was timed."""

    exit_code = 70


class GateUndecidedError(SparkforgeError):
    """The accuracy gate cannot judge: no thresholds for this model and text, or a server without prompt logprobs."""

    exit_code = 71


class LoadFailedError(SparkforgeError):
    """A load run did not finish, or its figures contradict each other; its result says failed."""

    exit_code = 72


class BatchFailedError(SparkforgeError):
    """At least one configuration of a batch failed; the others were measured."""

    exit_code = 73


class ResultError(SparkforgeError):
    """A result file cannot be read, or is none of ours."""

    exit_code = 74


class SubmitError(SparkforgeError):
    """A result was not posted; it is kept, and the same command tries again."""

    exit_code = 75


class RegressionError(SparkforgeError):
    """A result is worse than the accepted one by more than noise."""

    exit_code = 76


class BaselineError(SparkforgeError):
    """`bench/baselines.toml` is malformed: an unknown key, a figure without source or date, a text that changed."""

    exit_code = 77


class BakeoffError(SparkforgeError):
    """No server of a bakeoff passed the gate and the load, so there is nothing to rank."""

    exit_code = 78


class ProblemsFoundError(SparkforgeError):
    """`./inv doctor` found at least one problem; all of them are on stdout, the first one is in the message."""

    exit_code = 80


class SignatureError(SparkforgeError):
    """`serve/signatures.toml` is malformed: an unknown key, a group that nothing fills, a cause that is not there."""

    exit_code = 81


class ImageTreeError(SparkforgeError):
    """What is to become an image is not what its locks, patches and tables say."""

    exit_code = 60


class NotReproducibleError(SparkforgeError):
    """Two builds of the same commit gave different images."""

    exit_code = 61


class EngineMissingError(SparkforgeError):
    """No Docker engine, or no `docker` command, is installed here."""

    exit_code = 62


class EngineDownError(SparkforgeError):
    """The Docker engine does not run, or does not answer."""

    exit_code = 63


class EnginePermissionError(SparkforgeError):
    """This user may not talk to the Docker engine."""

    exit_code = 64


class EngineToolError(SparkforgeError):
    """The `docker` command lacks buildx or Compose, or has one that is too old."""

    exit_code = 65


class GpuRuntimeError(SparkforgeError):
    """The Docker engine cannot give a container the GPU: no NVIDIA runtime and no CDI device."""

    exit_code = 66


class ImageMissingError(SparkforgeError):
    """An image is not on this machine and cannot be pulled."""

    exit_code = 67


class ImageMismatchError(SparkforgeError):
    """An image is for another platform, or was not made from this checkout."""

    exit_code = 68


class EngineError(SparkforgeError):
    """The Docker engine, buildx or Compose failed in another way; its own words are in the message."""

    exit_code = 69


class KernelEnvironmentError(SparkforgeError):
    """The Python environment that kernels are to be built for lacks FlashInfer, torch or the patches."""

    exit_code = 55


class KernelsIncompleteError(SparkforgeError):
    """A kernel module was built, and a server would compile it again all the same."""

    exit_code = 56


class BuildInputsError(SparkforgeError):
    """Something that vLLM's extensions are compiled from or with is missing: a repository, or torch with CUDA."""

    exit_code = 57


class BuildIncompleteError(SparkforgeError):
    """A build ended without what it was to make, or what it made does not fit where it is to go."""

    exit_code = 58


class PlanInputError(SparkforgeError):
    """A config.json cannot be planned for: not readable, of another architecture, or with sizes that make no sense."""

    exit_code = 85


class ModelTooLargeError(SparkforgeError):
    """A model, with the context and concurrency that were asked for, does not fit the device's memory."""

    exit_code = 86


class PlanTableError(SparkforgeError):
    """A table that plans are made from is malformed: a device, a threshold, a stored configuration, a cited figure."""

    exit_code = 87


if __name__ == "__main__":
    from sparkforge import error_page

    sys.stdout.write(error_page.page())
