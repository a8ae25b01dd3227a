"""Known problems: `sparkforge/doctor/signatures.toml`, a table of rules over an event (sparkforge/core/events.py)."""

import datetime as dt
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from sparkforge.core import tables
from sparkforge.core.events import CONSEQUENCE, NOISE, Event, Line
from sparkforge.core.tables import Record

TABLE = Path(__file__).with_name("signatures.toml")
EVERY = "*"
# Ids of problems that come from no signature (sparkforge/doctor/doctor.py).
AUDIT, ENGINE, LAST, UNKNOWN = "audit", "docker-engine", "last-up", "unknown"
DIFFERENT = 5  # hits of one signature with different groups that are kept, such as two unknown variables
BUILTIN_GROUPS = {"log"}  # groups that the doctor fills


class Severity(StrEnum):
    """The severity of a problem, worst first."""

    FATAL = "fatal"
    SLOW = "slow"
    HARMLESS = "harmless"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


class Kind(StrEnum):
    """The subject of a problem, in the order of docs/reference/problems.md."""

    CUDA = "CUDA"
    GPU = "GPU"
    DRIVER = "driver"
    HOST = "host"
    MEMORY = "memory"
    BUILD = "build"
    ENVIRONMENT = "environment"
    ARGUMENTS = "arguments"
    MODEL = "model and hub"
    NETWORK = "network"
    DOCKER = "Docker"
    SERVING = "serving"
    OURS = "Sparkforge"


class Seen(Record):
    """A description of a problem: its URL or our page, and its date."""

    where: str
    date: dt.date | None = None

    def __str__(self) -> str:
        return f"{self.where} ({self.date})" if self.date else self.where


class FactCondition(Record):
    """A condition on a fact: it has the type and value of `equal`, or is a number within the bounds."""

    equal: bool | int | float | str | None = Field(default=None, alias="is")
    at_least: float | None = None
    below: float | None = None

    def holds(self, value: Any) -> bool:
        """Return whether a fact's value meets the condition; an unknown value (None) or another type does not."""
        if self.equal is not None:
            return type(value) is type(self.equal) and bool(value == self.equal)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.at_least is None or value >= self.at_least) and (self.below is None or value < self.below)


class Signature(Record):
    """One known problem; the head of the table describes the fields."""

    id: str
    kind: Kind
    severity: Severity
    line: re.Pattern[str] | None = None
    xid: tuple[int, ...] = ()
    cuda: tuple[int, ...] = ()
    signal: tuple[int, ...] = ()
    unless: re.Pattern[str] | None = None
    also: re.Pattern[str] | None = None
    warning: bool = False
    info: bool = False
    orderly: bool = False
    alone: bool = False
    block: bool = False
    times: int = 1
    facts: dict[str, FactCondition] = Field(default_factory=dict)
    what: str
    why: str
    fix: str
    follows: tuple[str, ...] = ()
    seen: tuple[Seen, ...] = ()

    @field_validator("facts", mode="before")
    @classmethod
    def _plain_values_are_equalities(cls, facts: dict[str, Any]) -> dict[str, Any]:
        return {name: value if isinstance(value, dict) else {"is": value} for name, value in facts.items()}

    @property
    def reads_logs(self) -> bool:
        """Whether it has a condition for the lines of a log."""
        return bool(self.line or self.xid or self.cuda or self.signal)

    def match(self, line: Line) -> dict[str, str] | None:
        """Return the named groups of a line that shows this problem; None for any other line."""
        if not self._reads(line) or (self.block and "next" not in line.parts):
            return None
        numbers = ((self.xid, line.xid), (self.cuda, line.cuda), (self.signal, line.signal))
        if any(wanted and number not in wanted for wanted, number in numbers):
            return None
        match = self.line.search(line.text) if self.line else None
        if (self.line and match is None) or (self.unless and self.unless.search(line.text)):
            return None
        return {name: value or "" for name, value in match.groupdict().items()} if match else {}

    def _reads(self, line: Line) -> bool:
        """Return whether a line of this level can show the problem."""
        if line.level == "FOREIGN":
            return False
        if self.info or self.severity is not Severity.FATAL:
            return self.info or not line.quiet
        return not (line.quiet or (line.level == "WARNING" and not self.warning) or NOISE.search(line.text))

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Return whether the facts show this problem."""
        return bool(self.facts) and all(condition.holds(facts.get(name)) for name, condition in self.facts.items())


class SignatureTable(Record):
    """The whole file."""

    signature: tuple[Signature, ...]


@dataclass
class Hit:
    """A signature that a log shows: the first line, the groups of that line, and the number of such lines."""

    signature: Signature
    line: Line
    groups: dict[str, str] = field(default_factory=dict)
    count: int = 1


def load(path: Path = TABLE) -> tuple[Signature, ...]:
    """Return every signature. Raises InputError for a file that cannot be read or is malformed."""
    return tables.load(path, SignatureTable).signature


def recognise(event: Event, known: Sequence[Signature]) -> tuple[list[Hit], Line | None]:
    """Return the hits of an event in the order of its lines, and the decisive line if no known problem explains it."""
    hits = sorted((hit for signature in known for hit in _hits(event, signature)), key=lambda hit: hit.line.number)
    hits = [
        hit for hit in hits if not any(h.line is hit.line and h.signature.id in hit.signature.follows for h in hits)
    ]
    decisive = event.decisive
    if decisive is None:  # the start or download recovered from these errors, so they did not cause a failure
        hits = [hit for hit in hits if hit.signature.severity is not Severity.FATAL or not hit.line.harmless]
    fatal = [hit.signature for hit in hits if hit.signature.severity is Severity.FATAL]
    caused = any(EVERY not in signature.follows and not signature.alone for signature in fatal)
    named = any(hit.line is decisive and hit.signature.severity is Severity.FATAL for hit in hits)
    unknown = None if caused or named or decisive is None or CONSEQUENCE.search(decisive.text) else decisive
    if caused or unknown:
        hits = [hit for hit in hits if not hit.signature.alone]
    elif any(hit.signature.alone for hit in hits):  # the log shows the end of the process, but no cause
        hits = [hit for hit in hits if hit.signature.alone or EVERY not in hit.signature.follows]
    elif decisive and not any(hit.signature.severity is Severity.FATAL for hit in hits):
        unknown = decisive
    return hits, unknown


def _hits(event: Event, signature: Signature) -> Iterator[Hit]:
    if not signature.reads_logs:
        return
    found: dict[tuple[str, ...], Hit] = {}
    for line in event.lines:
        if signature.orderly and event.ended and line.number > event.ended:
            continue
        groups = signature.match(line)
        if groups is None:
            continue
        if signature.also and not any(signature.also.search(other.text) for other in event.lines if other is not line):
            return
        groups |= line.parts if signature.block else {}
        key = tuple(groups.values())
        if key in found:
            found[key].count += line.count
        elif len(found) < DIFFERENT:
            found[key] = Hit(signature, line, groups, line.count)
    yield from (hit for hit in found.values() if hit.count >= signature.times)
