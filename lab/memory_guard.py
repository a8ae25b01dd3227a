"""`python -m lab.memory_guard`: check that a server that uses up the memory ends with a named error in time.

A program that allocates until it is stopped replaces the server. It runs below the real supervisor, in a memory cgroup
of LIMIT bytes. In the same cgroup a probe starts a small program repeatedly, as a login would, and times it. A trial
passes if the server ends with a reason in its record before the kernel has to kill it.

`python -m lab.memory_guard --machine` makes the same trials without a cgroup, in a virtual machine of at most
MOST_MEMORY bytes, whose whole memory is used up. It imports only the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkforge.core.memory import groups
from sparkforge.serve.supervise import supervised

MB = 10**6
LIMIT = 900 * MB
MOST_MEMORY = 2 << 30  # largest machine whose memory may be used up
TRIALS = 10
SECONDS = 120.0  # for one trial
IDLE_SECONDS = 3.0
# Bytes a second. On a GB10 free memory fell from 29 to 2.5 GiB in 9 s while vLLM started (vLLM issue 54200). With this
# limit the guard's bounds are 34 times smaller, so 90 MB a second corresponds to that rate.
RATES = {"as a starting vLLM": 90 * MB, "four times as fast": 360 * MB}
PIECE = 1 * MB
HOG = """
import sys, time
rate, piece, kind, file = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
held, begun, size = [], time.monotonic(), 0
data = open(file, "rb") if kind == "reads" else None
while True:
    block = bytearray(piece)
    block[::4096] = b"x" * len(block[::4096])
    held.append(block)
    size += piece
    if data and not data.read(piece):
        data.seek(0)
    time.sleep(max(0.0, begun + size / rate - time.monotonic()))
"""
PROBE = """
import subprocess, sys, time
with open(sys.argv[1], "w") as times:
    while True:
        begun = time.monotonic()
        subprocess.run(["/bin/true"])
        times.write(f"{time.monotonic() - begun}\\n")
        times.flush()
        time.sleep(0.02)
"""


@dataclass(frozen=True)
class TrialScope:
    """Where trials run: a description, the prefix of their commands, and the cgroup's folder, if there is one."""

    description: str
    prefix: tuple[str, ...] = ()
    group: Path | None = None

    def kills(self) -> int:
        """Return how many processes of this scope the kernel has killed for lack of memory."""
        files = ("memory.events", "memory.oom_control") if self.group else ("/proc/vmstat",)
        for file in files:
            with suppress(OSError):
                text = ((self.group or Path()) / file).read_text(encoding="ascii")
                return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)
        return 0


@dataclass(frozen=True)
class PressureTrial:
    """One trial. `why` is the supervisor's reason; `kills` counts the kernel's OOM kills.

    Times are in seconds, `probe_*` in milliseconds.
    """

    kind: str
    why: str
    code: int
    kills: int
    seconds: float
    probes: int
    probe_median: float
    probe_most: float

    @property
    def named(self) -> bool:
        """Whether the guard ended the server, with a reason, before the kernel killed it."""
        return bool(self.why) and not self.kills and self.code == 24


@contextmanager
def limited(bytes_: int = LIMIT) -> Iterator[TrialScope]:
    """Make a memory cgroup with a limit and no swap, and remove it. Raises OSError if this user may not."""
    refused: OSError = PermissionError("there is no memory cgroup that this user may make")
    for flavour, limit, swap in (
        ("cgroup2", "memory.max", "memory.swap.max"),
        ("cgroup", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    ):
        for parent in groups(Path("/"), flavour, "memory"):
            group = parent / f"sparkforge-{uuid.uuid4().hex}"
            try:
                group.mkdir()
            except OSError as error:
                refused = error
                continue
            try:
                try:
                    (group / limit).write_text(str(bytes_), encoding="ascii")
                except OSError as error:
                    refused = error
                    continue
                with suppress(OSError):
                    (group / swap).write_text("0" if flavour == "cgroup2" else str(bytes_), encoding="ascii")
                enter = ("/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
                yield TrialScope(f"{flavour}, {bytes_ // MB} MB, no swap", enter, group)
                return
            finally:
                _remove(group)
    raise refused


def trial(scope: TrialScope, kind: str, rate: float, file: Path, *, reads: bool = False) -> PressureTrial:
    """Let a server take `rate` bytes a second until something ends it; with `reads` it reads `file` meanwhile.

    Raises TimeoutError if nothing ends it.
    """
    with tempfile.TemporaryDirectory(prefix="sparkforge-pressure-") as name:
        folder = Path(name)
        hog = (sys.executable, "-c", HOG, str(rate), str(PIECE), "reads" if reads else "", str(file))
        before, start = scope.kills(), time.monotonic()
        with _probe(scope, folder / "probe"), (folder / "log").open("wb") as log:
            command = [*scope.prefix, *supervised(hog, folder / "end.json")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            supervisor = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                code = supervisor.wait(SECONDS)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{kind}: nothing ended the server within {SECONDS:g} s") from None
            finally:
                with suppress(OSError):
                    os.killpg(supervisor.pid, signal.SIGKILL)
                supervisor.wait()
            seconds = time.monotonic() - start
        times = _times(folder / "probe")
        try:
            why = str(json.loads((folder / "end.json").read_text(encoding="utf-8"))["why"])
        except (OSError, ValueError, KeyError):
            why = ""
        median, most = (statistics.median(times), max(times)) if times else (0.0, 0.0)
        return PressureTrial(kind, why, code, scope.kills() - before, seconds, len(times), median, most)


def run(scope: TrialScope, trials: int, file: Path) -> dict[str, Any]:
    """Make all trials and return them with a summary; `file` is read while memory is taken."""
    with tempfile.TemporaryDirectory() as folder, _probe(scope, Path(folder) / "probe"):
        time.sleep(IDLE_SECONDS)
        idle = _times(Path(folder) / "probe")
    results = []
    kinds = [(kind, rate, False) for kind, rate in RATES.items()]
    for kind, rate, reads in (
        *kinds,
        ("as a starting vLLM, which reads its weights", RATES["as a starting vLLM"], True),
    ):
        for number in range(trials):
            results.append(trial(scope, kind, rate, file, reads=reads))
            print(f"{kind} {number + 1}/{trials}: {_describe(results[-1])}", file=sys.stderr, flush=True)
    return {
        "place": scope.description,
        "idle_probe_ms": {"median": round(statistics.median(idle), 1), "most": round(max(idle), 1)},
        "summary": {
            kind: _summary([t for t in results if t.kind == kind]) for kind in dict.fromkeys(t.kind for t in results)
        },
        "trials": [{**asdict(t), "named": t.named} for t in results],
    }


def main(output: str, trials: int = TRIALS) -> None:
    """Run the trials in a cgroup, print the summary, save it with the machine's facts.

    Raises UsageError if this user may not make a cgroup, BenchmarkError if a server ended without a named error.
    """
    from sparkforge.bench.context import facts  # noqa: PLC0415 - the trials need the standard library only
    from sparkforge.core import paths  # noqa: PLC0415
    from sparkforge.core.console import echo, say  # noqa: PLC0415
    from sparkforge.core.errors import BenchmarkError, UsageError  # noqa: PLC0415
    from sparkforge.core.files import write_json  # noqa: PLC0415

    file = paths.typed(output)
    try:
        with limited() as scope, weights() as read:
            result = {"machine": facts(), **run(scope, trials, read)}
    except OSError as error:
        fix = "run it as root on a machine whose memory controller may be used, or in a virtual machine"
        raise UsageError("a memory cgroup cannot be made here", str(error), fix) from error
    for kind, summary in result["summary"].items():
        named, most = f"{summary['named']} of {summary['trials']}", summary["probe_most_ms"]
        echo(f"{kind}: {named} ended with a named error, probe at most {most} ms")
    write_json(file, result)
    say(f"saved {file}")
    failed = [kind for kind, summary in result["summary"].items() if summary["named"] < summary["trials"]]
    if failed:
        why = "the kernel killed it first, or nothing said why it ended: see `trials` in the result"
        raise BenchmarkError(
            f"not every server ended with a named error: {failed[0]}", why, f"less {file}", code="benchmark.guard"
        )


@contextmanager
def weights(bytes_: int = 300 * MB) -> Iterator[Path]:
    """Make a file for the server to read, and remove it."""
    with tempfile.TemporaryDirectory(prefix="sparkforge-pressure-", dir="/var/tmp") as folder:
        file = Path(folder) / "weights"
        with file.open("wb") as output:
            for _ in range(bytes_ // MB):
                output.write(os.urandom(MB))
        yield file


@contextmanager
def _probe(scope: TrialScope, file: Path) -> Iterator[None]:
    process = subprocess.Popen([*scope.prefix, sys.executable, "-S", "-c", PROBE, str(file)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _times(file: Path) -> list[float]:
    """Return the probe's times in milliseconds, without the first run, which is slower."""
    with suppress(OSError, ValueError):
        return [1000 * float(line) for line in file.read_text(encoding="ascii").splitlines()][1:]
    return []


def _summary(trials: Sequence[PressureTrial]) -> Mapping[str, float]:
    return {
        "trials": len(trials),
        "named": sum(t.named for t in trials),
        "killed_by_kernel": sum(t.kills > 0 for t in trials),
        "seconds_median": round(statistics.median(t.seconds for t in trials), 2),
        "probe_median_ms": round(statistics.median(t.probe_median for t in trials), 1),
        "probe_most_ms": round(max(t.probe_most for t in trials), 1),
    }


def _describe(result: PressureTrial) -> str:
    ended = (
        f"ended with a named error ({result.why})"
        if result.named
        else f"code {result.code}, kernel kills {result.kills}: {result.why}"
    )
    return (
        f"{ended} after {result.seconds:.1f} s, probe {result.probe_median:.0f} ms, at most {result.probe_most:.0f} ms"
    )


def _remove(group: Path) -> None:
    """Kill the remaining processes of a cgroup and remove the cgroup."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            group.rmdir()
        except OSError:
            with suppress(OSError, ValueError):
                for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        else:
            return


def _machine(trials: int) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory > MOST_MEMORY:
        print(
            f"this machine has {memory / 2**30:.1f} GiB, more than may be used up; take a virtual machine",
            file=sys.stderr,
        )
        return 2
    with weights() as file:
        result = run(TrialScope(f"the whole machine, {memory // MB} MB"), trials, file)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.memory_guard", description=__doc__)
    parser.add_argument("--machine", action="store_true", help="use up this whole machine's memory, without a cgroup")
    parser.add_argument("--trials", type=int, default=TRIALS, help="trials of each kind; default: %(default)s")
    parser.add_argument("--output", default="bench/results/memory-guard.json", help="JSON file for the figures")
    options = parser.parse_args()
    if options.machine:
        sys.exit(_machine(options.trials))
    from sparkforge.core.program import exit_code  # imported here, because --machine needs only the standard library

    sys.exit(exit_code(lambda: main(options.output, options.trials)))
