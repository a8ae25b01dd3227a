"""The errors: one class and one exit code for each family, one stable code string for each case.

A message has three parts: what failed, why, and the next command to run. The command is complete, or only a change to
the called command, from which `completed` makes a complete one: `--option VALUE`, `without --option`, `NAME=VALUE`,
`unset NAME`, or `again` for no change. A remark follows `   # `. A program that calls `./inv` reads the exit code for
the family; `code` tells the cases of a family apart. `lab/errors.toml` explains each code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

CHANGE = re.compile(
    r"(?:(?P<again>again)|(?P<without>without )?(?P<option>--[a-z][a-z-]*)(?:[ =](?P<value>'[^']*'|[^\s;#'-]\S*))?"
    r"|unset (?P<unset>\w+)|(?P<set>[A-Z][A-Z_\d]*=(?:\"[^\"]*\"|'[^']*'|[^\s;'\"]*)))(?P<remark>   # .*)?",
    re.DOTALL,
)


class SparkforgeError(Exception):
    """Something failed that a user can act on; never shown as a traceback."""

    exit_code: ClassVar[int] = 1
    family: ClassVar[str] = ""

    def __init__(self, what: str, why: str, fix: str, *, code: str = "") -> None:
        super().__init__(what, why, fix)
        self.what, self.why, self.fix = what, why, fix
        self.code = code or self.family

    def __str__(self) -> str:
        return f"{self.what} · {self.why} · {self.fix}"


class UsageError(SparkforgeError):
    """An argument or option is invalid."""

    exit_code, family = 2, "usage"


class InputError(SparkforgeError):
    """A file that a command reads is missing, malformed, or of the wrong kind."""

    exit_code, family = 10, "input"


class NetworkError(SparkforgeError):
    """Something could not be fetched or posted."""

    exit_code, family = 11, "network"


class IntegrityError(SparkforgeError):
    """Data does not match its hash or its manifest; nothing of it was kept."""

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
    """Kernels or extensions cannot be compiled, or the compiled files are incomplete."""

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


def on(command: str, path: Path | str, remark: str = "") -> str:
    """Return a command on a path, which is quoted for a shell."""
    return f"{command} {shlex.quote(str(path))}" + (f"   # {remark}" if remark else "")


def with_remark(fix: str, remark: str) -> str:
    """Return an advised command with a further remark."""
    return f"{fix}; {remark}" if "   # " in fix else f"{fix}   # {remark}"


def completed(fix: str, command: str, change: Callable[[str, str | None], str] | None = None) -> str:
    """Return an error's `fix` as a complete command; a complete one is returned unchanged.

    `command` is the called command. `change(option, value)` returns it with another option: `value` is empty for a flag
    without a value, None for an option to leave out. By default the option is appended to the command.
    """
    advice = CHANGE.fullmatch(fix)
    if advice is None:
        return fix
    if option := advice["option"]:
        value = None if advice["without"] else (advice["value"] or "").strip("'")
        written = advice[0].removesuffix(advice["remark"] or "")
        command = change(option, value) if change else command if value is None else f"{command} {written}"
    elif variable := advice["unset"]:
        command = f"env -u {variable} {command}"
    elif advice["set"]:
        command = f"{advice['set']} {command}"
    return command + (advice["remark"] or "")
