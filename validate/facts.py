"""Facts: a flat table of names and values, each with the source that told it. Gathering never raises, always ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparkforge.errors import FactsError
from validate.scene import Scene

SCHEMA = 1
DEADLINE = 8.0  # seconds; facts that were not told by then stay unknown (a hung network disk, a hung driver)

Value = Any  # what JSON can hold


@dataclass(frozen=True)
class Fact:
    """One fact: its value, the command, file or API that told it, and why there is no value if there is none.

    `value` None with `error` None means: asked, and the answer is "none" (an unset variable, no cgroup limit).
    """

    value: Value
    source: str
    error: str | None = None


class Reading(NamedTuple):
    """How one fact is read. `read` may raise anything and may hang."""

    name: str
    source: str
    read: Callable[[Scene], Value]


Facts = Mapping[str, Fact]


def take(reading: Reading, scene: Scene) -> Fact:
    """Read one fact; whatever goes wrong becomes its `error`."""
    try:
        return Fact(reading.read(scene), reading.source)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a fact that cannot be read is a fact, never a crash
        told = " ".join(str(error).split())[:300]
        return Fact(None, reading.source, told or type(error).__name__)


def gather(scene: Scene, groups: Sequence[Sequence[Reading]], deadline: float = DEADLINE) -> dict[str, Fact]:
    """Read every fact of every group; the groups run side by side, and none is waited for beyond `deadline` seconds."""
    facts: dict[str, Fact] = {}

    def work(readings: Sequence[Reading]) -> None:
        """Read one group, one after another; a reading that hangs costs those behind it."""
        for reading in readings:
            facts[reading.name] = take(reading, scene)

    # Daemon threads: one that hangs in a system call cannot keep the interpreter from ending.
    workers = [threading.Thread(target=work, args=(group,), daemon=True) for group in groups]
    for worker in workers:
        worker.start()
    end = time.monotonic() + deadline
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
    told = dict(facts)  # a late worker writes into a table that nobody reads any more
    every = [reading for group in groups for reading in group]
    return {r.name: told.get(r.name, Fact(None, r.source, f"no answer within {deadline:g} s")) for r in every}


def as_json(facts: Facts) -> dict[str, dict[str, Value]]:
    """Return facts as JSON objects, sorted by name."""
    return {name: asdict(facts[name]) for name in sorted(facts)}


def load_sheet(path: Path) -> dict[str, Fact]:
    """Read a recorded sheet (or a report, which holds one): `{"schema": 1, "facts": {name: {value, source, error}}}`.

    Raises FactsError if the file is not there, not JSON, of another schema or shape.
    """
    try:
        sheet = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, " ".join(str(error).split())) from error
    if not isinstance(sheet, dict) or not isinstance(sheet.get("facts"), dict):
        raise _unusable(path, "it holds no table called facts")
    if sheet.get("schema") != SCHEMA:
        raise _unusable(path, f"its schema is {sheet.get('schema')!r} and this validator reads {SCHEMA}")
    return {name: _entry(path, name, entry) for name, entry in sheet["facts"].items()}


def _entry(path: Path, name: str, entry: Any) -> Fact:
    if not isinstance(entry, dict) or "value" not in entry or not set(entry) <= {"value", "source", "error"}:
        raise _unusable(path, f"fact {name!r} is not an object of value, source and error")
    source, error = entry.get("source", "recorded sheet"), entry.get("error")
    if not isinstance(source, str) or not (error is None or isinstance(error, str)):
        raise _unusable(path, f"source and error of fact {name!r} are not text")
    return Fact(entry["value"], source, error)


def _unusable(path: Path, why: str) -> FactsError:
    return FactsError(
        f"cannot read the fact sheet {path}",
        why,
        "record one: python -m validate --profile spark --json sheet.json",
    )
