"""Known problems: `sparkforge/doctor/signatures.toml`, a table of signs, what they mean, and the next command.

[[signature]]
id = "kebab-case"
severity = "error"          # error: does not serve, or answers wrongly; warning: serves worse; note: worth knowing
signs = ["text"]            # a line of a log shows the problem if it holds one of these (bytes are compared: fast)
regex = '''…(?P<name>…)'''  # optional: what such a line must match as well; what, why and fix may use its groups
until = "text"              # optional: from the first line that holds this on, it is no problem (an orderly end)
block = true                # the lines after it hold `why:` and `next:`, which become groups (our own errors)
facts = {"container.oom_killed" = true, "container.restarts" = {at_least = 2}}   # or: all of these hold
what = "what failed"
why = "the cause"
fix = "the next command"
follows = ["id", …]         # its causes, which are listed before it; ["*"]: every other error
examples = ["a line"]       # each must show this signature (tests)
[[signature.seen]]
where = "URL of an upstream issue, or a page of ours"
date = 2026-11-21           # when that was written
"""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from sparkforge.core import tables
from sparkforge.core.console import echo
from sparkforge.core.errors import InputError
from sparkforge.core.tables import Record

TABLE = Path(__file__).with_name("signatures.toml")
EVERY = "*"
# Ids of problems that come from no signature (sparkforge/doctor/doctor.py).
AUDIT, ENGINE, LAST = "audit", "docker-engine", "last-up"


class Severity(StrEnum):
    """How bad a problem is, worst first."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


class Seen(Record):
    """Where a problem is described: a URL or a page of ours, and the date of that description."""

    where: str
    date: dt.date


class FactCondition(Record):
    """What a fact must be: of the same type as and equal to `equal`, or a number within the bounds."""

    equal: bool | int | float | str | None = Field(default=None, alias="is")
    at_least: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _refuse_empty(self) -> Self:
        if self.equal is self.at_least is self.below is None:
            raise ValueError("a fact has neither a value nor a bound")
        return self

    def holds(self, value: Any) -> bool:
        """Tell whether a fact's value is so; an unknown one (None), or one of another type, is not."""
        if self.equal is not None:
            return type(value) is type(self.equal) and bool(value == self.equal)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.at_least is None or value >= self.at_least) and (self.below is None or value < self.below)


class Signature(Record):
    """One known problem. `signs` are bytes of a line; `pattern` is what the line must match as well."""

    id: str
    severity: Severity
    signs: tuple[bytes, ...] = ()
    pattern: re.Pattern[str] | None = Field(default=None, alias="regex")
    until: bytes = b""
    block: bool = False
    facts: dict[str, FactCondition] = Field(default_factory=dict)
    what: str
    why: str
    fix: str
    follows: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    seen: tuple[Seen, ...] = ()

    @field_validator("facts", mode="before")
    @classmethod
    def _plain_values_are_equalities(cls, facts: dict[str, Any]) -> dict[str, Any]:
        return {name: value if isinstance(value, dict) else {"is": value} for name, value in facts.items()}

    @model_validator(mode="after")
    def _refuse_unusable(self) -> Self:
        """Raise ValueError for what would fail, or match every line, only when somebody needs the answer."""
        if not self.signs and not self.facts:
            raise ValueError(f"{self.id} has neither signs nor facts")
        if b"" in self.signs:
            raise ValueError(f"{self.id} has an empty sign, which every line holds")
        groups = {*(self.pattern.groupindex if self.pattern else ()), *(("why", "next") if self.block else ())}
        for text in (self.what, self.why, self.fix):
            if unknown := sorted(set(re.findall(r"\{(\w*)\}", text)) - groups):
                raise ValueError(f"{self.id}: no group fills {{{unknown[0]}}}")
        return self

    def match(self, line: str) -> dict[str, str] | None:
        """Return the named groups of a line that holds a sign; None if the line is not about this."""
        if self.pattern is None:
            return {}
        match = self.pattern.search(line)
        return None if match is None else {name: value or "" for name, value in match.groupdict().items()}

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Tell whether the facts show this."""
        return bool(self.facts) and all(condition.holds(facts.get(name)) for name, condition in self.facts.items())


class SignatureTable(Record):
    """The whole file."""

    signature: tuple[Signature, ...]

    @model_validator(mode="after")
    def _refuse_unknown_causes(self) -> Self:
        names = [signature.id for signature in self.signature]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{duplicates[0]} is there twice")
        for signature in self.signature:
            if unknown := sorted(set(signature.follows) - {*names, EVERY, AUDIT, ENGINE, LAST}):
                raise ValueError(f"{signature.id} follows {unknown[0]!r}, which is no signature")
        return self


def load(path: Path = TABLE) -> tuple[Signature, ...]:
    """Read every signature. Raises InputError for a file that cannot be read or is malformed."""
    try:
        return tables.load(path, SignatureTable).signature
    except InputError as error:
        raise InputError(
            error.what, error.why, f"git diff sparkforge/doctor/{path.name}", code="input.signatures"
        ) from error


def markdown() -> str:
    """Return the table of docs/reference/problems.md, which a test compares with the page."""
    rows = ["| id | what it says | read on |", "| --- | --- | --- |"]
    for signature in load():
        mark = "" if signature.severity is Severity.ERROR else f" *({signature.severity})*"
        links = ", ".join(_link(seen) for seen in signature.seen)
        headline = re.sub(r"\{\w+\}(?:\{\w+\})*", "…", signature.what)
        rows.append(f"| `{signature.id}`{mark} | {headline} | {links} |")
    return "\n".join(rows)


def _link(seen: Seen) -> str:
    if thread := re.fullmatch(r"https://github\.com/[\w.-]+/([\w.-]+)/\w+/(\d+)", seen.where):
        return f"[{thread[1]} {thread[2]}]({seen.where}) ({seen.date})"
    return f"[{seen.where.rpartition('/')[2]}]({os.path.relpath(seen.where, 'docs/reference')})"


if __name__ == "__main__":
    echo(markdown())
