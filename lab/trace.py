"""Reads traces of torch's profiler: the time of each operator, and the share of each part of the model.

A trace is JSON in Chrome's format, as Kineto writes it (torch 2.13.0), plain or in gzip. If the trace has GPU work,
kernels and copies are counted. Otherwise the operators of the thread that runs the model are counted, each without the
operators that it calls. `operators.toml` maps operators to parts of the model.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sparkforge.core import tables
from sparkforge.core.errors import InputError
from sparkforge.core.files import DocumentError, parse_json, read_bytes
from sparkforge.core.tables import Record

TABLE = Path(__file__).with_name("operators.toml")
LARGEST = 256 << 20  # bytes, packed and unpacked; documents.MOST_VALUES bounds the memory of the parsed events
GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})  # Kineto's categories of GPU work
CPU, SPAN = "cpu_op", "user_annotation"  # operators, and phases that record_function names
LATEST = 1e18  # microseconds, 30,000 years: sums of such times stay finite
OTHER, WAITING = "other", "waiting"
Processor = Literal["gpu", "cpu"]
GZIP = b"\x1f\x8b"
LONGEST_NAME = 20_000  # characters of an operator's name; templates of C++ have thousands


class Pattern(Record):
    """The operators of a group: those with a match of `pattern` in their name, case ignored.

    With `whole`, the operators that they call belong to the group too, regardless of their names. The examples are
    names that this row must match and earlier rows must not.
    """

    group: str
    processor: Processor
    pattern: str
    whole: bool = False
    examples: list[str] = Field(min_length=1)


class OperatorTable(Record):
    """`operators.toml`: the parts of the model's work, and patterns of operators; the first match counts."""

    source: str = Field(min_length=1)
    groups: dict[str, str]
    patterns: list[Pattern]

    def first(self, processor: Processor, name: str) -> Pattern | None:
        """Return the first pattern that an operator's name matches."""
        rows = (row for row in self.patterns if row.processor == processor)
        return next((row for row in rows if re.search(row.pattern, name, re.IGNORECASE)), None)


@cache
def load_table(path: Path = TABLE) -> OperatorTable:
    """Read the table. Raises InputError for one that is malformed."""
    return tables.load(path, OperatorTable)


class OperatorTime(Record):
    """An operator of a group: its number of runs and its milliseconds, without the operators that it called."""

    name: str
    group: str
    calls: int
    ms: float
    share: float = Field(description="of all time, waiting included")


class GroupTime(Record):
    """The time of a part of the model."""

    name: str
    about: str
    ms: float
    share: float = Field(description="of all time, waiting included")


class Breakdown(Record):
    """The time of a trace by groups and operators. Milliseconds.

    `window_ms` is the time from the first operator's start to the last one's end. If kernels of a GPU overlap, as with
    programmatic dependent launch or several streams, the time counts for the kernel that started first.
    """

    processor: Processor
    window_ms: float
    events: int
    groups: list[GroupTime]
    operators: list[OperatorTime] = Field(description="every one, the heaviest first")


@dataclass
class Event:
    """A run of an operator, or a phase; microseconds.

    `callee_time` belongs to other operators, which this one called or waited for.

    `operator` is the event itself, or for a phase the nearest operator around it.
    """

    name: str
    begin: float
    end: float
    is_span: bool = False
    callee_time: float = 0.0
    group: str = OTHER
    whole: bool = False
    operator: Event | None = None


def read(path: Path) -> Breakdown:
    """Return the breakdown of a trace's time. Raises InputError if it is not a trace or has no operators."""
    table, (on_gpu, threads) = load_table(), _events(path)
    if on_gpu:
        _classify("gpu", table, on_gpu)
        end = -math.inf  # the end of the previous event; this event gets only the time after it
        for event in sorted(on_gpu, key=lambda event: event.begin):
            event.callee_time = max(0.0, min(end, event.end) - event.begin)
            end = max(end, event.end)
        return _breakdown("gpu", table, on_gpu)
    busy = [events for events in threads.values() if not all(event.is_span for event in events)]
    if not busy:
        raise _malformed(path, "it holds no operator: nothing ran between the profiler's start and its stop")
    # The thread that runs the model; other threads, which free memory for example, take almost no time.
    thread = max(busy, key=lambda events: sum(_merged([event for event in events if not event.is_span])))
    _classify("cpu", table, thread)
    return _breakdown("cpu", table, list(_nested(thread)))


def _classify(processor: Processor, table: OperatorTable, events: Sequence[Event]) -> None:
    rows = {name: table.first(processor, name) for name in {event.name for event in events}}
    for event in events:
        if row := rows[event.name]:
            event.group, event.whole = row.group, row.whole


def _malformed(path: Path, why: str) -> InputError:
    fix = "./inv bench.profile makes one"
    return InputError(f"{path.name} is no trace of torch's profiler", why, fix, code="input.trace")


def _document(path: Path) -> Any:
    try:
        data = read_bytes(path, largest=LARGEST)
        if data.startswith(GZIP):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(LARGEST + 1)
            if len(data) > LARGEST:
                raise _malformed(path, f"it has more than {LARGEST:,} bytes unpacked; profile fewer tokens")
        return parse_json(data, str(path), finite=False)
    except DocumentError as error:
        raise _malformed(path, error.why) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _malformed(path, f"its gzip stream is damaged: {error}") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"cannot read {path}", why, "without --trace", code="input.trace") from error


def _events(path: Path) -> tuple[list[Event], dict[tuple[str, str], list[Event]]]:
    """Return the GPU events, and by thread the operators and phases on the CPU. Raises InputError."""
    document = _document(path)
    rows = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise _malformed(path, "it has no list of traceEvents")
    on_gpu, threads = list[Event](), defaultdict[tuple[str, str], list[Event]](list)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise _malformed(path, f"event {number} is no object")
        category = str(row.get("cat"))
        if row.get("ph") != "X" or category not in GPU | {CPU, SPAN}:
            continue
        name, times = row.get("name"), [row.get("ts"), row.get("dur")]
        begin, length = (float(time) if isinstance(time, int | float) else -1.0 for time in times)
        is_timed = 0 <= begin <= LATEST and 0 <= length <= LATEST
        if not is_timed or not isinstance(name, str) or len(name) > LONGEST_NAME:
            raise _malformed(path, f"event {number} has no valid name, start or duration")
        events = on_gpu if category in GPU else threads[str(row.get("pid")), str(row.get("tid"))]
        events.append(Event(name, begin, begin + length, category == SPAN))
    return on_gpu, threads


def _merged(events: Sequence[Event]) -> Iterator[float]:
    """Yield the lengths of the times in which at least one event ran."""
    end = -math.inf
    for event in sorted(events, key=lambda event: event.begin):
        if event.end > end:
            yield event.end - max(event.begin, end)
            end = event.end


def _nested(events: Sequence[Event]) -> Iterator[Event]:
    """Yield a thread's operators with groups and callees: an operator within the time of another is its callee."""
    callers: list[Event] = []
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        while callers and callers[-1].end <= event.begin:
            callers.pop()
        caller = callers[-1] if callers else None
        if caller and caller.whole:
            event.group, event.whole = caller.group, True
        event.operator = caller.operator if caller else None
        if not event.is_span:  # only operators have time, phases have none
            if event.operator:
                event.operator.callee_time += min(event.end, event.operator.end) - event.begin
            event.operator = event
            yield event
        callers.append(event)


def _breakdown(processor: Processor, table: OperatorTable, events: Sequence[Event]) -> Breakdown:
    window = max(event.end for event in events) - min(event.begin for event in events)
    waiting = max(0.0, window - sum(_merged(events)))
    times, calls = defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], int](int)
    for event in events:
        times[event.name, event.group] += max(0.0, event.end - event.begin - event.callee_time)
        calls[event.name, event.group] += 1
    total = sum(times.values()) + waiting or 1.0
    sums = defaultdict[str, float](float, {WAITING: waiting})
    for (_, group), time in times.items():
        sums[group] += time
    rows = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return Breakdown(
        processor=processor,
        window_ms=window / 1000,
        events=len(events),
        groups=[
            GroupTime(name=name, about=about, ms=sums[name] / 1000, share=sums[name] / total)
            for name, about in table.groups.items()
        ],
        operators=[
            OperatorTime(name=name, group=group, calls=calls[name, group], ms=time / 1000, share=time / total)
            for (name, group), time in rows
        ],
    )
