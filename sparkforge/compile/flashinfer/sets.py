"""`kernels-VERSION.toml`: which of a FlashInfer's modules a set holds, and the vLLM call that needs each."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from sparkforge.core.documents import DocumentError, read_toml
from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.tables import Record

FOLDER = Path(__file__).parent  # of a table for each FlashInfer that a stack has
EVERYTHING = "all"  # the set that holds all the others


class Call(Record):
    """A line of unpatched vLLM that leads to a module; the line contains `text`."""

    file: str
    line: int
    text: str
    why: str


class KernelModule(Record):
    """One FlashInfer module: its name, the generator that writes it, and the audit rule that it must keep.

    `patch` names the patch of our queue that adds the module; FlashInfer's releases do not have it.
    """

    name: str
    sets: tuple[str, ...]
    call: str
    generator: str = Field(pattern=r"^flashinfer[\w.]*:\w+$")
    audit: str
    patch: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)


class KernelTable(Record):
    """The whole file."""

    schema_: Literal[1] = Field(alias="schema")
    flashinfer: str
    environment: dict[str, str]
    server: dict[str, str]
    sets: dict[str, str]
    calls: dict[str, Call]
    not_called: dict[str, str]
    module: tuple[KernelModule, ...]

    @model_validator(mode="after")
    def _fits_together(self) -> KernelTable:
        names = [module.name for module in self.module]
        strays = [
            module.name
            for module in self.module
            if module.call not in self.calls or set(module.sets) - self.sets.keys()
        ]
        if strays or len(names) != len(set(names)) or EVERYTHING not in self.sets:
            raise ValueError(f"a call or a set is unknown, or a name is there twice: {strays or names}")
        return self

    def chosen(self, name: str) -> tuple[KernelModule, ...]:
        """Return the modules of a set. Raises UsageError for an unknown set."""
        if name not in self.sets:
            raise UsageError(
                f"there is no set {name}", f"known are {', '.join(self.sets)}", "./inv build.kernels --help"
            )
        return tuple(module for module in self.module if name in (*module.sets, EVERYTHING))

    def digest(self, modules: tuple[KernelModule, ...]) -> str:
        """Return the sha256 of all that decides what is built for `modules`."""
        inputs = [self.flashinfer, self.environment, [request(module) for module in modules]]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def request(module: KernelModule) -> dict[str, Any]:
    """Return the question to `specs.py` about a module."""
    return module.model_dump(include={"name", "generator", "arguments"})


@cache
def load(version: str, folder: Path = FOLDER) -> KernelTable:
    """Read and check the table of a FlashInfer. Raises InputError naming every mistake."""
    path = folder / f"kernels-{version}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem.removeprefix("kernels-") for file in folder.glob("kernels-*.toml")))
        raise InputError(
            f"no kernels are known for FlashInfer {version}",
            f"there is no {path.name}; there are tables for {known or 'none'}",
            "build another stack, or write that table (docs/concepts/kernels.md)",
            code="input.pins",
        )
    try:
        table = KernelTable.model_validate(read_toml(path))
    except (OSError, DocumentError) as error:
        raise InputError(f"cannot read {path.name}", str(error), f"git checkout {path}", code="input.pins") from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise InputError(f"{path.name} is refused", problems, f"correct {path}", code="input.pins") from None
    if table.flashinfer != version:
        raise InputError(
            f"{path.name} is refused", f"it is for FlashInfer {table.flashinfer}", f"correct {path}", code="input.pins"
        )
    return table
