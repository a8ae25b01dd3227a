"""Give a parser thousands of damaged inputs: only errors of ours may come out, each in 5 s and 4 GB.

    PYTHONPATH=tests python -m robustness.fuzz pins --inputs 10000 --seed 1
    PYTHONPATH=tests python -m robustness.fuzz pins --seed 1 --number 4711        # one again, with its traceback

The inputs are read in a child, which a watchdog ends when one of them takes too long.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from robustness.mutation import mutated
from robustness.parsers import PARSERS, Parser
from sparkforge.core import console
from sparkforge.core.declare import declare
from sparkforge.core.errors import SparkforgeError

SECONDS = 5.0  # of CPU time for one input; this much wall time passes on a machine that others use
WALL = 12 * SECONDS
MEMORY = 4 << 30  # bytes of address space
STATE = struct.Struct("<qdd")  # number of the input, wall time and CPU time at its begin
EXAMPLES = 2  # of one kind of failure that are kept


@dataclass
class Failure:
    """An input that broke a promise, and the command that repeats it."""

    parser: str
    number: int
    broken: str
    where: str
    detail: str
    repeat: str


@dataclass
class Counts:
    """What was read by one parser, and what came of it. `named`: errors that only the console's last resort names."""

    parser: str
    inputs: int = 0
    accepted: int = 0
    declared: int = 0
    named: int = 0
    tracebacks: int = 0
    hangs: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)


def last_resort(error: Exception) -> bool:
    """Tell whether the one exit point of all commands would name this error instead of showing a traceback."""
    return declare(error) is not None


class Fuzzer:
    """Reads inputs of one parser in children; `scratch` is an empty folder."""

    def __init__(self, parser: Parser, seed: int, scratch: Path) -> None:
        self.parser, self.seed, self.scratch = parser, seed, scratch
        self.salt = zlib.crc32(parser.name.encode())
        self.samples = parser.samples(scratch)
        self.state = mmap.mmap(-1, STATE.size)
        self.report = scratch.parent / f"{scratch.name}.report"

    def input(self, number: int) -> bytes:
        """Return the input of this number: first the samples themselves."""
        if number < len(self.samples):
            return self.samples[number]
        return mutated(self.samples, random.Random((self.seed << 72) + (self.salt << 40) + number))  # noqa: S311

    def run(self, inputs: int, seconds: float) -> Counts:
        """Read this many inputs, or as many as the time allows."""
        counts, begun, first = Counts(self.parser.name), time.monotonic(), 0
        kinds: dict[str, int] = {}
        while first < inputs and time.monotonic() - begun < seconds:
            self.report.write_bytes(b"")
            self.state[:] = STATE.pack(first, time.monotonic(), 0.0)
            child = os.fork()
            if child == 0:
                self._child(first, inputs, begun + seconds)
            stopped = self._watch(child)
            last = STATE.unpack(self.state)[0]
            for line in self.report.read_text().splitlines():
                with suppress(ValueError):  # the line that it died in
                    self._count(counts, json.loads(line), kinds)
            if stopped:
                counts.inputs += last + 1 - first
                counts.hangs += stopped.startswith("it takes")
                counts.tracebacks += not stopped.startswith("it takes")
                self._keep(counts, kinds, last, stopped, "", "")
                first = last + 1
            else:
                counts.inputs += last - first
                break
        counts.seconds = round(time.monotonic() - begun, 1)
        return counts

    def _count(self, counts: Counts, row: dict[str, Any], kinds: dict[str, int]) -> None:
        if "totals" in row:
            counts.accepted += row["totals"][0]
            counts.declared += row["totals"][1]
            counts.named += row["totals"][2]
            return
        counts.tracebacks += 1
        self._keep(counts, kinds, row["number"], row["broken"], row["where"], row["detail"])

    def _keep(self, counts: Counts, kinds: dict[str, int], number: int, broken: str, where: str, detail: str) -> None:
        kind = f"{where} {broken.partition(':')[0]}"
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= EXAMPLES:
            repeat = (f"PYTHONPATH=tests {sys.executable} -m robustness.fuzz {self.parser.name} --seed {self.seed} "
                      f"--number {number}")  # fmt: skip
            counts.failures.append(Failure(self.parser.name, number, broken, where, detail, repeat))

    def _child(self, first: int, last: int, deadline: float) -> None:
        code, totals = 1, [0, 0, 0]
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            quiet = Console(quiet=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
            console.console = lambda: quiet  # type: ignore[assignment]
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            with self.report.open("a", buffering=1) as report, self.parser.around(self.scratch):
                number = first
                while number < last:
                    now = time.monotonic()
                    if now > deadline:
                        break
                    self.state[:] = STATE.pack(number, now, time.process_time())
                    self._one(number, totals, report)
                    number += 1
                self.state[:] = STATE.pack(number, time.monotonic(), time.process_time())
                report.write(json.dumps({"totals": totals}) + "\n")
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not return into its parent
            with self.report.open("a") as report:
                row = {"number": STATE.unpack(self.state)[0], "broken": "the fuzzer itself failed", "where": "fuzz",
                       "detail": traceback.format_exc()}  # fmt: skip
                report.write(json.dumps(row) + "\n")
        os._exit(code)

    def _one(self, number: int, totals: list[int], report: Any) -> None:
        data = self.input(number)
        try:
            self.parser.read(data, self.scratch)
            totals[0] += 1
        except SparkforgeError:
            totals[1] += 1
        except Exception as error:  # noqa: BLE001 - this is what we look for
            if last_resort(error):
                totals[2] += 1
                return
            row = {"number": number, "broken": f"{type(error).__name__}: {str(error)[:200]}", "where": _where(error),
                   "detail": traceback.format_exc()[-2000:]}  # fmt: skip
            report.write(json.dumps(row) + "\n")

    def _watch(self, child: int) -> str:
        """Wait for the child; return why it had to be ended or died, empty if it came to its end."""
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return "" if code >= 0 else f"the process died of signal {-code}"
            _, begun, used = STATE.unpack(self.state)
            waited = time.monotonic() - begun
            if waited > SECONDS and (cpu_seconds(child) - used > SECONDS or waited > WALL):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"it takes more than {SECONDS:g} s"
            time.sleep(0.02)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _where(error: BaseException) -> str:
    """Return the last place of ours that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(Path(__file__).resolve().parents[2])
    ours = [frame for frame in frames if frame.filename.startswith(root) and "/robustness/" not in frame.filename
            and "/.sparkforge/" not in frame.filename]  # fmt: skip
    last = (ours or list(frames))[-1]
    return f"{Path(last.filename).relative_to(root) if ours else last.filename}:{last.lineno}"


def folder() -> Path:
    """Return a new folder in memory where there is room for one, else where temporary files go."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30
    return Path(tempfile.mkdtemp(prefix="sparkforge-fuzz-", dir=memory if usable else None))


def campaign(name: str, inputs: int, seconds: float, seed: int) -> Counts:
    """Fuzz one parser; return the counts."""
    base = folder()
    try:
        (base / "scratch").mkdir()
        os.environ |= {"SPARKFORGE_STATE": str(base / "scratch/state"), "SPARKFORGE_CACHE": str(base / "scratch/cache")}
        return Fuzzer(PARSERS[name], seed, base / "scratch").run(inputs, seconds)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def show(counts: Counts) -> str:
    """Return the failures in words."""
    lines = []
    for failure in counts.failures:
        lines.append(f"{failure.parser}, input {failure.number}: {failure.broken} {failure.where}")
        lines += [f"    {line}" for line in failure.detail.strip().splitlines()[-6:]]
        lines.append(f"    {failure.repeat}")
    return "\n".join(lines)


def again(name: str, seed: int, number: int) -> int:
    """Read one input in this process and show what it does."""
    base = folder()
    try:
        (base / "scratch").mkdir()
        os.environ |= {"SPARKFORGE_STATE": str(base / "scratch/state"), "SPARKFORGE_CACHE": str(base / "scratch/cache")}
        fuzzer = Fuzzer(PARSERS[name], seed, base / "scratch")
        data = fuzzer.input(number)
        sys.stdout.write(f"{len(data)} bytes: {data[:2000]!r}\n")
        sys.stdout.flush()
        with fuzzer.parser.around(fuzzer.scratch):
            fuzzer.parser.read(data, fuzzer.scratch)
    except SparkforgeError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return 0


def main() -> int:
    """Fuzz from the command line; returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parser", choices=sorted(PARSERS))
    parser.add_argument("--inputs", type=int, default=1 << 60)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.number is not None:
        return again(options.parser, options.seed, options.number)
    counts = campaign(options.parser, options.inputs, options.seconds, options.seed)
    value = asdict(counts)
    if options.json:
        options.json.write_text(json.dumps(value, indent=2))
    shown = show(counts)
    sys.stderr.write(f"{shown}\n" if shown else "")
    sys.stdout.write(json.dumps({name: item for name, item in value.items() if name != "failures"}) + "\n")
    return 1 if counts.failures else 0


if __name__ == "__main__":
    sys.exit(main())
