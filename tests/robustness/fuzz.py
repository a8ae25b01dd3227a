"""Give a parser thousands of damaged inputs: only errors of ours may come out, each in 5 s and 4 GB.

    PYTHONPATH=tests python -m robustness.fuzz pins --inputs 10000 --seed 1
    PYTHONPATH=tests python -m robustness.fuzz pins --seed 1 --number 4711        # one again, with its traceback

The inputs are read in a child, which its timers end when one of them takes too long.
"""

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
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from robustness.mutation import mutated
from robustness.parsers import PARSERS
from sparkforge.core import console
from sparkforge.core.declare import declare
from sparkforge.core.errors import SparkforgeError

SECONDS, WALL = 5, 60  # of CPU time for one input, and on a machine that others use
MEMORY = 4 << 30  # bytes of address space
STATE = struct.Struct("<4q")  # number of the input; how many were accepted, declared, named before it
EXAMPLES = 2  # of one kind of failure that are kept


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
    failures: list = field(default_factory=list)  # number, what broke, where, the end of the traceback, how to repeat


class HangError(BaseException):
    """An input takes too long."""


def hang(*_):
    """End what is being read."""
    raise HangError(f"it takes more than {SECONDS} s")


@contextmanager
def scratch_folder():
    """Make a folder in memory where there is room for one, with a state and a cache of its own."""
    memory = Path("/dev/shm")
    usable = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30
    with tempfile.TemporaryDirectory(prefix="sparkforge-fuzz-", dir=memory if usable else None) as base:
        scratch = Path(base, "scratch")
        scratch.mkdir()
        os.environ |= {"SPARKFORGE_STATE": str(scratch / "state"), "SPARKFORGE_CACHE": str(scratch / "cache")}
        yield scratch


def input_of(parser, samples, seed, number):
    """Return the input of this number: first the samples themselves."""
    if number < len(samples):
        return samples[number]
    salt = zlib.crc32(parser.name.encode())
    return mutated(samples, random.Random((seed << 72) + (salt << 40) + number))  # noqa: S311


def read(parser, data, number, scratch):
    """Read one input; return 0 if it was accepted, 1 if declared, 2 if named, else what broke."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(WALL)  # which ends the process
    try:
        parser.read(data, scratch)
    except SparkforgeError:
        return 1
    except (Exception, HangError) as error:  # noqa: BLE001 - this is what we look for
        if isinstance(error, Exception) and declare(error) is not None:
            return 2
        broken = str(error) if isinstance(error, HangError) else f"{type(error).__name__}: {str(error)[:200]}"
        return {"number": number, "broken": broken, "where": where(error), "detail": traceback.format_exc()[-2000:]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return 0


def read_all(parser, make, numbers, deadline, state, report, scratch):
    """Read inputs in this child until the last one or the deadline."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    quiet = Console(quiet=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.console = lambda: quiet
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, hang)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    totals, number = [0, 0, 0], numbers.start
    with report.open("a", buffering=1) as rows, parser.around(scratch):
        while number < numbers.stop and time.monotonic() < deadline:
            state[:] = STATE.pack(number, *totals)
            outcome = read(parser, make(number), number, scratch)
            if isinstance(outcome, int):
                totals[outcome] += 1
            else:
                rows.write(json.dumps(outcome) + "\n")
            number += 1
        state[:] = STATE.pack(number, *totals)


def campaign(name, inputs, seconds, seed):
    """Read this many inputs, or as many as the time allows; return the counts."""
    parser, counts, begun, first = PARSERS[name], Counts(name), time.monotonic(), 0
    kinds = Counter()
    with scratch_folder() as scratch:
        make = partial(input_of, parser, parser.samples(scratch), seed)
        state, report = mmap.mmap(-1, STATE.size), scratch.with_name("report")
        while first < inputs and time.monotonic() - begun < seconds:
            report.write_bytes(b"")
            state[:] = STATE.pack(first, 0, 0, 0)
            child = os.fork()
            if child == 0:
                try:
                    read_all(parser, make, range(first, inputs), begun + seconds, state, report, scratch)
                except BaseException:  # noqa: BLE001 - the child must not return into its parent
                    row = {"number": -1, "broken": "the fuzzer itself failed", "detail": traceback.format_exc()}
                    report.write_text(json.dumps({**row, "where": "fuzz"}) + "\n")
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            number, *totals = STATE.unpack(state)
            rows = [json.loads(line) for line in report.read_text().splitlines() if line.endswith("}")]
            if code < 0:
                broken = hang_or_death(-code)
                rows.append({"number": number, "broken": broken, "where": "", "detail": ""})
                number += 1
            counts.inputs += number - first
            for total, more in zip(("accepted", "declared", "named"), totals, strict=True):
                setattr(counts, total, getattr(counts, total) + more)
            for row in rows:
                counts.hangs += (hangs := row["broken"].startswith("it takes"))
                counts.tracebacks += not hangs
                kind = f"{row['where']} {row['broken'].partition(':')[0]}"
                kinds[kind] += 1
                if kinds[kind] <= EXAMPLES:
                    again = f"PYTHONPATH=tests {sys.executable} -m robustness.fuzz {name} --seed {seed}"
                    counts.failures.append({"parser": name, **row, "repeat": f"{again} --number {row['number']}"})
            if code >= 0:
                break
            first = number
    counts.seconds = round(time.monotonic() - begun, 1)
    return counts


def hang_or_death(number):
    """Say of which signal a child died."""
    return f"it takes more than {WALL} s" if number == signal.SIGALRM else f"the process died of signal {number}"


def where(error):
    """Return the last place of ours that an error came through."""
    frames, root = traceback.extract_tb(error.__traceback__), str(Path(__file__).resolve().parents[2])
    ours = [frame for frame in frames if frame.filename.startswith(root) and "/robustness/" not in frame.filename
            and "/.sparkforge/" not in frame.filename]  # fmt: skip
    last = (ours or list(frames))[-1]
    return f"{last.filename.removeprefix(f'{root}/')}:{last.lineno}"


def show(counts):
    """Return the failures in words."""
    lines = []
    for failure in counts.failures:
        lines.append(f"{failure['parser']}, input {failure['number']}: {failure['broken']} {failure['where']}")
        lines += [f"    {line}" for line in failure["detail"].strip().splitlines()[-6:]]
        lines.append(f"    {failure['repeat']}")
    return "\n".join(lines)


def main():
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
        with scratch_folder() as scratch:
            chosen = PARSERS[options.parser]
            data = input_of(chosen, chosen.samples(scratch), options.seed, options.number)
            sys.stdout.write(f"{len(data)} bytes: {data[:2000]!r}\n")
            with chosen.around(scratch):
                chosen.read(data, scratch)
        return 0
    counts = campaign(options.parser, options.inputs, options.seconds, options.seed)
    if options.json:
        options.json.write_text(json.dumps(asdict(counts), indent=2))
    sys.stderr.write(show(counts))
    sys.stdout.write(json.dumps({name: item for name, item in asdict(counts).items() if name != "failures"}) + "\n")
    return 1 if counts.failures else 0


if __name__ == "__main__":
    sys.exit(main())
