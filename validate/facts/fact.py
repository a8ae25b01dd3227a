"""Facts: a flat table of names and values, each with its source. Gathering never raises and always ends."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from sparkforge.core.errors import InputError
from sparkforge.core.files import DocumentError, read_json
from sparkforge.core.tables import Record, parse_record
from validate.facts.target import Target

SCHEMA = 1
DEADLINE = 8.0  # seconds; later facts stay unknown (a hung network disk, a hung driver)

Value = Any  # any JSON value


@dataclass(frozen=True)
class Fact:
    """One fact: its value, its source (a command, file or API), and the reason if there is no value.

    `value` None with `error` None means that the fact is known to be absent (an unset variable, no cgroup limit).
    """

    value: Value
    source: str
    error: str | None = None


class Reading(NamedTuple):
    """The reader of one fact. `read` may raise any exception and may hang; its time limit is `seconds`."""

    name: str
    source: str
    read: Callable[[Target], Value]
    seconds: float = DEADLINE


Facts = Mapping[str, Fact]


def take(reading: Reading, target: Target) -> Fact:
    """Read and return one fact; any exception becomes the fact's `error`."""
    try:
        return Fact(reading.read(target), reading.source)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a fact that cannot be read is a fact, never a crash
        why = " ".join(str(error).split())[:300]
        return Fact(None, reading.source, why or type(error).__name__)


def gather(target: Target, groups: Sequence[Sequence[Reading]], deadline: float | None = None) -> dict[str, Fact]:
    """Read and return all facts. Groups run in parallel, for `deadline` seconds or their slowest reading's limit."""
    facts: dict[str, Fact] = {}
    limits = [deadline or max((reading.seconds for reading in group), default=0.0) for group in groups]

    def work(readings: Sequence[Reading]) -> None:
        """Read the facts of one group in turn; if a reading hangs, the following facts are lost."""
        for reading in readings:
            facts[reading.name] = take(reading, target)

    # Daemon threads, because a thread that hangs in a system call must not keep the interpreter running.
    workers = [threading.Thread(target=work, args=(group,), daemon=True) for group in groups]
    for worker in workers:
        worker.start()
    started = time.monotonic()
    for worker, limit in zip(workers, limits, strict=True):
        worker.join(max(0.0, started + limit - time.monotonic()))
    in_time = dict(facts)  # a copy, because a late worker may still write into `facts`
    return {
        reading.name: in_time.get(reading.name, Fact(None, reading.source, f"no answer within {limit:g} s"))
        for group, limit in zip(groups, limits, strict=True)
        for reading in group
    }


def as_json(facts: Facts) -> dict[str, dict[str, Value]]:
    """Return facts as JSON objects, sorted by name."""
    return {name: asdict(facts[name]) for name in sorted(facts)}


class _Entry(Record):
    value: Value
    source: str = "recorded sheet"
    error: str | None = None


class _Sheet(Record, extra="ignore"):
    schema_: Literal[1] = Field(alias="schema")
    facts: dict[str, _Entry]


def load_sheet(path: Path) -> dict[str, Fact]:
    """Return the facts of a recorded sheet, `{"schema": 1, "facts": {name: {value, source, error}}}`, or of a report.

    Raises InputError if the file is missing, is not JSON, or has another schema.
    """
    try:
        sheet = parse_record(read_json(path), str(path), _Sheet)
    except (OSError, DocumentError) as error:
        fix = "python -m validate --profile spark --json sheet.json   # records one"
        why = " ".join(str(error).split())
        raise InputError(f"cannot read the fact sheet {path}", why, fix, code="input.facts") from error
    return {name: Fact(entry.value, entry.source, entry.error) for name, entry in sheet.facts.items()}
