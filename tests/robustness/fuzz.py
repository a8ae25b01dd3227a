"""Give a parser thousands of damaged inputs: only our own errors may result, each within 5 s and 4 GB.

PYTHONPATH=tests python -m robustness.fuzz pins --inputs 10000 --seed 1
PYTHONPATH=tests python -m robustness.fuzz pins --seed 1 --number 4711        # repeats one, with its traceback
"""

import argparse
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from rich.console import Console

from robustness.mutation import mutated
from robustness.parsers import PARSERS
from sparkforge.core import console
from sparkforge.core.errors import SparkforgeError
from sparkforge.core.program import declare

SECONDS = 5  # of CPU time for one input
# If WATCHED inputs take more than WALL seconds, compiled code hangs: the process prints its stack and ends.
WATCHED, WALL = 100, 600
MEMORY = 4 << 30  # bytes of address space
EXAMPLES = 2  # failures kept of each kind


# Counts of one parser's inputs. `named`: exceptions that `declare` turned into errors of ours.
COUNTS = ("inputs", "accepted", "declared", "named", "tracebacks", "hangs")


class HangError(BaseException):
    """An input takes too long."""


def hang(*_):
    raise HangError(f"it takes more than {SECONDS} s")


@contextmanager
def scratch_folder():
    """Make a folder with its own state and cache, in memory if there is room."""
    memory = Path("/dev/shm")
    usable = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30
    with tempfile.TemporaryDirectory(prefix="sparkforge-fuzz-", dir=memory if usable else None) as base:
        scratch = Path(base, "scratch")
        scratch.mkdir()
        folders = {"SPARKFORGE_STATE": str(scratch / "state"), "SPARKFORGE_CACHE": str(scratch / "cache")}
        with mock.patch.dict(os.environ, folders):
            yield scratch


@contextmanager
def bounded():
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, hang)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, limits[1]))
    try:
        with Path(os.devnull).open("w") as null:
            quiet = Console(quiet=True, file=null)
            with mock.patch.object(console, "console", return_value=quiet):
                yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def input_of(parser, samples, seed, number):
    """Return the input of this number; the first numbers are the samples themselves."""
    if number < len(samples):
        return samples[number]
    salt = zlib.crc32(parser.name.encode())
    return mutated(samples, random.Random((seed << 72) + (salt << 40) + number))  # noqa: S311


def read(parser, data, scratch):
    """Read one input and return the result: the name of a count, and any undeclared error."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        parser.read(data, scratch)
    except SparkforgeError:
        return "declared", None
    except HangError as error:
        return "hangs", error
    except Exception as error:  # noqa: BLE001 - this is what we look for
        return ("named", None) if declare(error) is not None else ("tracebacks", error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "accepted", None


def campaign(name, inputs, seconds, seed):
    """Read inputs for some time; return the counts, and descriptions of failures."""
    parser, begun, kinds = PARSERS[name], time.monotonic(), Counter()
    counts = {"parser": name, **dict.fromkeys(COUNTS, 0), "failures": []}
    with scratch_folder() as scratch:
        samples = parser.samples(scratch)
        with bounded(), parser.around(scratch):
            while counts["inputs"] < inputs and time.monotonic() - begun < seconds:
                number = counts["inputs"]
                if number % WATCHED == 0:
                    faulthandler.dump_traceback_later(WALL, exit=True)
                outcome, error = read(parser, input_of(parser, samples, seed, number), scratch)
                counts[outcome] += 1
                counts["inputs"] += 1
                if error:
                    kinds[kind := (where(error), type(error))] += 1
                    if kinds[kind] <= EXAMPLES:
                        counts["failures"].append(described(name, seed, number, error, kind[0]))
    counts["seconds"] = round(time.monotonic() - begun, 1)
    return counts


def described(name, seed, number, error, place):
    repeat = f"PYTHONPATH=tests {sys.executable} -m robustness.fuzz {name} --seed {seed} --number {number}"
    broken, detail = f"{type(error).__name__}: {str(error)[:200]}", "".join(traceback.format_exception(error))[-2000:]
    return {"number": number, "where": place, "broken": broken, "detail": detail, "repeat": repeat}


def where(error):
    frames, root = traceback.extract_tb(error.__traceback__), str(Path(__file__).resolve().parents[2])
    ours = [frame for frame in frames if frame.filename.startswith(root) and "/robustness/" not in frame.filename
            and "/.sparkforge/" not in frame.filename]  # fmt: skip
    last = (ours or list(frames))[-1]
    return f"{last.filename.removeprefix(f'{root}/')}:{last.lineno}"


def show(counts):
    """Return the failures as text: what broke where, the end of the traceback, and how to repeat it."""
    return "".join(
        f"{counts['parser']}, input {failure['number']}: {failure['broken']} {failure['where']}\n"
        + "".join(f"    {line}\n" for line in [*failure["detail"].strip().splitlines()[-6:], failure["repeat"]])
        for failure in counts["failures"]
    )


def main():
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
        options.json.write_text(json.dumps(counts, indent=2))
    sys.stderr.write(show(counts))
    sys.stdout.write(json.dumps({name: item for name, item in counts.items() if name != "failures"}) + "\n")
    return 1 if counts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
