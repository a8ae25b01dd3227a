"""Which of vLLM's CMake targets are built for SM121, as data: `vllm_targets.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from sparkforge.errors import UsageError

PATH = Path(__file__).with_name("vllm_targets.toml")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arch(_Strict):
    """What vLLM's CMake makes of a TORCH_CUDA_ARCH_LIST: for most units, and for those that ask for a suffix."""

    base: str
    family: str


class Target(_Strict):
    """One CMake target: whether SM121 uses it, why or why not, and the line of the sdist that defines it.

    `needs` names repositories whose headers its units include, `module` what the audit asks for.
    """

    use: bool
    where: str
    why: str
    output: str = ""
    needs: tuple[str, ...] = ()
    module: str = ""


class Repository(_Strict):
    """A repository of CMake's: the variable that names its folder, and files that stand in where it is left out."""

    variable: str
    files: tuple[str, ...]


class Table(_Strict):
    """The whole table, for one vLLM version."""

    schema_: int = Field(alias="schema", ge=1, le=1)
    version: str
    arch: dict[str, Arch]
    targets: dict[str, Target]
    repositories: dict[str, Repository]

    @property
    def used(self) -> list[str]:
        """The targets that SM121 uses, the cheapest first."""
        return [name for name, target in self.targets.items() if target.use]

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Return `names` in the table's order, or all that SM121 uses. Raises UsageError for one that it does not."""
        for name in names:
            if name not in self.targets:
                raise UsageError(f"vLLM has no target {name}", f"there are {', '.join(self.used)}", "name one of them")
            if not (target := self.targets[name]).use:
                raise UsageError(
                    f"{name} is not built for SM121", f"{target.why} ({target.where})", "./inv build.vllm without it"
                )
        return [name for name in self.used if not names or name in names]

    def mapped(self, arch: str) -> Arch:
        """Return what CMake makes of `arch`. Raises UsageError for one that nobody has tried."""
        if arch not in self.arch:
            known = ", ".join(self.arch)
            raise UsageError(f"no rule for --arch {arch}", f"tried were {known}", "./inv build.vllm --arch 12.1a")
        return self.arch[arch]


@cache
def load(path: Path = PATH) -> Table:
    """Return the table. It is part of the program: a mistake in it raises what pydantic raises."""
    return Table.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
