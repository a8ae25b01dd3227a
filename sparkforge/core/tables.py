"""Frozen records that refuse unknown keys, and typed readers of TOML and JSON with the place of each error."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparkforge.core.errors import InputError, on
from sparkforge.core.files import DocumentError, existing_part, parse_json, read_toml
from sparkforge.core.paths import ROOT


class Record(BaseModel):
    """A frozen record that refuses unknown keys, infinities and NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


TOLD, MEASURED, BOUND, TABLE = "told", "measured here", "our own bound", "devices.toml"


class Figure(Record):
    """A figure, its source, and its date."""

    value: float = Field(ge=0)
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}(-\d{2}){0,2}$")

    @property
    def origin(self) -> str:
        """The kind of source: the user, this machine, our own bound, or the table, which names the source."""
        return next((word for word in (TOLD, MEASURED, BOUND) if self.source.startswith(word)), TABLE)


Table = TypeVar("Table", bound=BaseModel)


def load(path: Path, shape: type[Table]) -> Table:
    """Read a table of `shape`. Raises InputError."""
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    edit = on("less", shown, "correct it, then the same command again")
    try:
        return shape.model_validate(read_toml(path))
    except OSError as error:
        fix = on("ls -ld", existing_part(path))
        raise InputError(f"cannot read {path}", error.strerror or str(error), fix, code="input.table") from error
    except ValidationError as error:
        raise InputError(f"{path.name} is malformed", first_fault(error), edit, code="input.table") from error
    except ValueError as error:  # not TOML, or not text
        raise InputError(f"{path.name} is not TOML", " ".join(str(error).split()), edit, code="input.table") from error


def parse_record(data: Any, origin: str, shape: type[Table]) -> Table:
    """Return JSON (text or parsed) as a record of `shape`; `origin` names the JSON in errors. Raises DocumentError."""
    value = parse_json(data, origin) if isinstance(data, (bytes, str)) else data
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        raise DocumentError(origin, first_fault(error)[:280]) from error


def parse_object(data: bytes | str, origin: str, shape: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON object in `data`, after a check of the keys in `shape`. Raises DocumentError.

    `shape` has only the keys that we read of a foreign document; `origin` names the document in errors.
    """
    value = parse_json(data, origin)
    if not isinstance(value, dict):
        raise DocumentError(origin, f"it is not a JSON object: {str(value)[:40]}")
    parse_record(value, origin, shape)
    return value


def first_fault(error: ValueError) -> str:
    """Return the first fault that a record's check found, with its place; for another error, its text."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    why = first["msg"].removeprefix("Value error, ")
    if first["type"] == "string_pattern_mismatch":
        why = f"{first['input'][:40]!r} does not match the pattern {first['ctx']['pattern']}"
    return f"{'.'.join(map(str, first['loc'])) or 'the whole file'}: {why}"
