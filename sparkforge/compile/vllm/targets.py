"""`targets.toml`: the CMake targets of a vLLM release that are built for SM121."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.files import read_toml
from sparkforge.core.tables import Record

PATH = Path(__file__).with_name("targets.toml")


class Arch(Record):
    """The architectures that vLLM's CMake derives from a TORCH_CUDA_ARCH_LIST, for units without and with a suffix."""

    base: str
    family: str


class CmakeTarget(Record):
    """One CMake target: whether SM121 uses it, why or why not, and the line of the sdist that defines it.

    `needs` names repositories whose headers its units include; `module` is its rule in the audit.
    """

    use: bool
    where: str
    why: str
    output: str = ""
    needs: tuple[str, ...] = ()
    module: str = ""


class RepositoryOption(Record):
    """A repository for CMake: the variable that names its folder, and the stub files if it is left out."""

    variable: str
    files: tuple[str, ...]


class TargetTable(Record):
    """The whole table, for one vLLM version."""

    schema_: int = Field(alias="schema", ge=1, le=1)
    version: str
    arch: dict[str, Arch]
    targets: dict[str, CmakeTarget]
    repositories: dict[str, RepositoryOption]

    @property
    def used(self) -> list[str]:
        """The targets that SM121 uses, cheapest first."""
        return [name for name, target in self.targets.items() if target.use]

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Return `names` in the table's order, or all that SM121 uses. Raises UsageError for any other name."""
        for name in names:
            if name not in self.targets:
                failure = f"vLLM has no target {name}"
                raise UsageError(failure, f"choose from {', '.join(self.used)}", "--help   # name one of them")
            if not (target := self.targets[name]).use:
                failure = f"{name} is not built for SM121"
                raise UsageError(failure, f"{target.why} ({target.where})", "--help   # leave it out")
        return [name for name in self.used if not names or name in names]

    def mapped(self, arch: str) -> Arch:
        """Return CMake's architectures for `arch`. Raises UsageError for an architecture that was not tried."""
        if arch not in self.arch:
            known = ", ".join(self.arch)
            raise UsageError(f"no rule for --arch {arch}", f"choose from {known}", "--arch 12.1a")
        return self.arch[arch]


@cache
def load(version: str) -> TargetTable:
    """Return the table for a vLLM release. Raises InputError for another one, pydantic's errors for our mistakes."""
    document = read_toml(PATH)
    releases, targets, left_out = (document.pop(key) for key in ("versions", "targets", "left_out"))
    if version not in releases:
        failure = f"vLLM {version} cannot be compiled here"
        fix = "--from wheel   # or extend that table (docs/concepts/vllm-extensions.md)"
        raise InputError(failure, f"{PATH.name} has the targets of {', '.join(releases)}", fix, code="input.pins")
    number, every = releases.index(version), dict[str, Any]()
    for name, target in (*targets.items(), *left_out.items()):
        where = target["where"]
        every[name] = {**target, "use": name in targets, "where": where if isinstance(where, str) else where[number]}
    return TargetTable.model_validate({**document, "version": version, "targets": every})
