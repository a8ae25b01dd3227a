"""`python -P supervise.py -- COMMAND`: runs a server, and ends with an exit code that a restart policy can use.

vLLM's API server ends with code 0 when its engine process has died, and a killed API server leaves the engine and
its workers behind. This process is the server's parent and the reaper of all that descends from it: it passes signals
on, ends what the server leaves, and writes down how the server ended. If it is killed itself, the server gets SIGTERM.
Meanwhile it watches the memory (`guard.py`): before there is none left, it ends the server and says why.

It runs as a file, below the server's own interpreter or another one: it imports the standard library, psutil, and
modules of ours that need no more.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # for this process: the server has a path of its own

from sparkforge.core import memory, paths
from sparkforge.plan import thresholds
from sparkforge.serve import pagecache
from sparkforge.serve.guard import MemoryWatch, Trouble

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
MCL_CURRENT, MCL_FUTURE = 1, 2  # mlockall(2)
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
WATCHED_SIGNALS = {*STOPS, signal.SIGCHLD}
FIRST_VICTIM = "500"  # the kernel, where it must kill, takes the server before us and before a login
# The code for an unrequested end with code 0: sparkforge.core.errors.ServerError's code, which is "the server ended".
ENDED = 24
NOT_STARTED = 127  # as shells have it
SIGNALLED = 128  # plus the signal's number
GRACE_SECONDS = 5.0  # for processes that the server left
LONG_SECONDS = 3600.0  # between two looks where there is no guard
TURN_SECONDS = 0.1  # between two looks while the server ends
# Read by doctor: sparkforge/doctor/signatures.toml, memory-guard.
MESSAGE = """✗ the memory guard ended the server [server.memory]
  why:  {why}{other}
  next: {fix}"""
FIX = (
    "./inv plan --help   # less context (MAX_MODEL_LEN), a smaller --gpu-memory-utilization, or stop "
    "what else holds memory"
)


@dataclass(frozen=True)
class Outcome:
    """The end of a server: this process's exit code, whether a signal asked for it, and why if it was for memory."""

    code: int
    asked: bool
    why: str = ""


def supervised(
    command: Sequence[str], end: Path | None = None, weights: str = "", *, trial: bool = False
) -> tuple[str, ...]:
    """Return the command that runs `command` under this program.

    `end` is the file that will say how it ended, `weights` the folder whose files leave the page cache once read. A
    `trial` ends with the process that starts it, even if that is killed.
    """
    options = (*(("--end", str(end)) if end else ()), *(("--weights", weights) if weights else ()))
    options += ("--parent", str(os.getpid())) if trial else ()
    return (sys.executable, "-P", __file__, *options, "--", *command)


def run(command: Sequence[str], watch: MemoryWatch | None = None, weights: str = "") -> Outcome:
    """Run `command` to its end and say how it ended.

    After a requested end the exit code is 0 if the server's is, else 128 plus the signal. Any other end is never 0.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
    parent = os.getpid()
    server = os.fork()
    if not server:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        _become(command, parent, former)
    if weights and not os.fork():
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        pagecache.tend(weights, former)
    if watch:
        libc.mlockall(MCL_CURRENT | MCL_FUTURE)  # where it may: it must act when the machine swaps
    keeper = _Keeper(server, watch)
    stop_signal: int | None = None
    code: int | None = None
    while code is None:
        info = signal.sigtimedwait(WATCHED_SIGNALS, keeper.period)
        number = info.si_signo if info else 0
        if number == signal.SIGCHLD:
            code = _reap(server)
        elif number in STOPS:
            stop_signal = stop_signal or number
            _send(server, number)
        if code is None:
            keeper.look(time.monotonic())
    _end_the_rest()
    if keeper.trouble:
        return Outcome(ENDED, asked=False, why=keeper.trouble.why)
    if stop_signal:
        return Outcome(SIGNALLED + stop_signal if code else 0, asked=True)
    why = watch.killed() if watch and code else ""
    return Outcome((code if code > 0 else SIGNALLED - code) if code else ENDED, asked=False, why=why)


class _Keeper:
    """Ends the server for memory: SIGTERM, then SIGKILL of its process group after a moment, or at once.

    `trouble` is the first reason, `period` how many seconds to wait for the next look.
    """

    def __init__(self, server: int, watch: MemoryWatch | None) -> None:
        self._server, self._watch = server, watch
        self.trouble: Trouble | None = None
        self._since = 0.0
        self.period = watch.limits.period_seconds if watch else LONG_SECONDS
        self._grace = watch.limits.grace_seconds if watch else GRACE_SECONDS

    def look(self, now: float) -> None:
        """Look, and do what must be done."""
        trouble = self._watch.look(now) if self._watch else None
        if trouble and not self.trouble:
            self.trouble, self._since, self.period = trouble, now, min(self.period, TURN_SECONDS)
            print(f"memory guard: {trouble.why}; the server is ended", flush=True)
            _send(self._server, signal.SIGURG)  # ignored by all but serve/cluster/watch.py, which tells the other nodes
            _send(self._server, signal.SIGTERM)
        if self.trouble and ((trouble and trouble.now) or now - self._since > self._grace):
            with suppress(ProcessLookupError, PermissionError):  # what left the group is ended afterwards
                os.killpg(self._server, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="supervise", description=__doc__)
    parser.add_argument("--end", type=Path, help="JSON file to write when the server has ended")
    parser.add_argument("--weights", default="", help="folder whose files leave the page cache once they were read")
    parser.add_argument("--parent", type=int, default=0, help="end when this process, our parent, has ended")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if options.parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != options.parent:  # it died before prctl, so that no signal comes
            return SIGNALLED + signal.SIGTERM
    outcome = run(options.command, open_watch(), options.weights)
    if outcome.why:
        other = memory.largest_process()
        other = f"; now the largest is {other}" if other else ""
        print(MESSAGE.format(why=outcome.why, other=other, fix=paths.where_it_runs(FIX)), flush=True)
    elif not outcome.asked:
        print(f"the server ended by itself; exit code {outcome.code}", flush=True)
    if options.end:
        end = {"pid": os.getpid(), "code": outcome.code, "asked": outcome.asked, "time": time.time()}
        with suppress(OSError):
            _write(options.end, {**end, "why": outcome.why})
    return outcome.code


def open_watch() -> MemoryWatch | None:
    """Return the watch that the environment configures; None, with a line in the log, if there can be none."""
    try:
        limits = thresholds.configured(os.environ)
        return MemoryWatch(limits, around=True) if limits else None
    except (OSError, ValueError) as error:
        print(f"WARNING: no memory guard: {error}", flush=True)
        return None


def _become(command: Sequence[str], parent: int, mask: set[int | signal.Signals]) -> None:
    """Replace the forked child by the server. Never returns."""
    try:
        if os.getppid() != parent:  # it died before prctl, so that no signal comes
            os._exit(SIGNALLED + signal.SIGTERM)
        os.setpgid(0, 0)  # so that one call kills all of it
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM, encoding="ascii")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(command[0], list(command))  # noqa: S606 - the child becomes the server
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", flush=True)
    finally:
        os._exit(NOT_STARTED)


def _reap(server: int) -> int | None:
    """Take every child that has ended from the kernel's table; return the server's code, -N for signal N."""
    code = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == server:
                code = os.waitstatus_to_exitcode(status)
    return code


def _send(server: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(server, number)


def _end_the_rest() -> None:
    """End every process that the server left: they are our children now, however they were started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        descendants = psutil.Process().children(recursive=True)
        for process in descendants:
            with suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(descendants, timeout=GRACE_SECONDS)


def _write(path: Path, value: dict[str, object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
