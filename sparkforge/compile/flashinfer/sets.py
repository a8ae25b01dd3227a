"""`kernels.toml`: the FlashInfer modules of each kernel set, and the vLLM call that needs each module."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.files import read_toml
from sparkforge.core.tables import Record

TABLE = Path(__file__).with_name("kernels.toml")
EVERYTHING = "all"  # the set that includes all others


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
    """The whole of kernels.toml, for one release of FlashInfer."""

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
        strays = [row.name for row in self.module if row.call not in self.calls or set(row.sets) - self.sets.keys()]
        if strays or len(names) != len(set(names)) or EVERYTHING not in self.sets:
            raise ValueError(f"a call or a set is unknown, or a name is repeated: {strays or names}")
        return self

    def chosen(self, name: str) -> tuple[KernelModule, ...]:
        """Return the modules of a set. Raises UsageError for an unknown set."""
        if name not in self.sets:
            failure = f"there is no set {name}"
            raise UsageError(failure, f"the sets are {', '.join(self.sets)}", "./inv build.kernels --help")
        return tuple(module for module in self.module if name in (*module.sets, EVERYTHING))

    def digest(self, modules: tuple[KernelModule, ...]) -> str:
        """Return the sha256 of a build's inputs: the release, the environment, and the requests for `modules`."""
        inputs = [self.flashinfer, self.environment, [request(module) for module in modules]]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def request(module: KernelModule) -> dict[str, Any]:
    """Return the request that makes `specs.py` write a module's build files."""
    return module.model_dump(include={"name", "generator", "arguments"})


@cache
def load(version: str, path: Path = TABLE) -> KernelTable:
    """Return the table for a release of FlashInfer.

    Each call has one line, of the vLLM that is served with that release. Each module has its call's generator and
    arguments. Raises InputError for a release that is not in the table. A mistake in the table, which is part of the
    program, raises KeyError or pydantic's errors.
    """
    document = read_toml(path)
    if version not in document["flashinfer"]:
        why = f"{path.name} has the kernels of {', '.join(document['flashinfer'])}"
        fix = "--help   # build another stack, or extend the table (docs/concepts/kernels.md)"
        raise InputError(f"no kernels are known for FlashInfer {version}", why, fix, code="input.pins")
    index = document["flashinfer"].index(version)
    shared = {name: (call.pop("generator"), call.pop("arguments", {})) for name, call in document["calls"].items()}
    for call in document["calls"].values():
        call["line"] = call.pop("lines")[index]
    for module in document["module"]:
        module["generator"], arguments = shared[module["call"]]
        merged = {**arguments, **module.get("arguments", {})}
        module["arguments"] = {key: module["name"] if value == "{name}" else value for key, value in merged.items()}
    return KernelTable.model_validate({**document, "flashinfer": version})


def releases() -> list[str]:
    """Return the releases of FlashInfer in the table."""
    return list(read_toml(TABLE)["flashinfer"])
