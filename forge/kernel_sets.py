"""`kernels.toml`: which FlashInfer modules a set holds, and the vLLM call that needs each. That file's only reader."""

from __future__ import annotations

import hashlib
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sparkforge.errors import PinError, UsageError

PATH = Path(__file__).with_name("kernels.toml")
EVERYTHING = "all"  # the set that holds all the others


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Call(_Strict):
    """A line of unpatched vLLM that leads to a module: `text` stands in it."""

    file: str
    line: int
    text: str
    why: str


class Module(_Strict):
    """One FlashInfer module: its name, the generator that writes it, and the audit rule that it must keep."""

    name: str
    sets: tuple[str, ...]
    call: str
    generator: str = Field(pattern=r"^flashinfer[\w.]*:\w+$")
    audit: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Table(_Strict):
    """The whole file."""

    schema_: Literal[1] = Field(alias="schema")
    flashinfer: str
    environment: dict[str, str]
    server: dict[str, str]
    sets: dict[str, str]
    calls: dict[str, Call]
    not_called: dict[str, str]
    module: tuple[Module, ...]

    @model_validator(mode="after")
    def _fits_together(self) -> Table:
        names = [one.name for one in self.module]
        strays = [one.name for one in self.module if one.call not in self.calls or set(one.sets) - self.sets.keys()]
        if strays or len(names) != len(set(names)) or EVERYTHING not in self.sets:
            raise ValueError(f"a call, a set or a name is unknown or stands twice: {strays or names}")
        return self

    def chosen(self, name: str) -> tuple[Module, ...]:
        """Return the modules of a set. Raises UsageError for a set that there is not."""
        if name not in self.sets:
            raise UsageError(
                f"there is no set {name}", f"known are {', '.join(self.sets)}", "./inv build.kernels --help"
            )
        return tuple(one for one in self.module if name in (*one.sets, EVERYTHING))

    def digest(self, modules: tuple[Module, ...]) -> str:
        """Return the sha256 of all that decides what is built for `modules`."""
        wanted = [self.flashinfer, self.environment, [requested(one) for one in modules]]
        return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()


def requested(module: Module) -> dict[str, Any]:
    """Return what `flashinfer_specs` must be told of a module."""
    return module.model_dump(include={"name", "generator", "arguments"})


@cache
def load(path: Path = PATH) -> Table:
    """Read and check the table. Raises PinError naming what is wrong with it."""
    try:
        return Table.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PinError(f"cannot read {path.name}", str(error), f"git checkout {path}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise PinError(f"{path.name} is refused", wrong, f"correct {path}") from None
