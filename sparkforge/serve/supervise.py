"""`python -P supervise.py -- COMMAND`: runs a server, and ends with an exit code that a restart policy can use.

vLLM's API server ends with code 0 when its engine process has died, and a killed API server leaves the engine and
its workers behind. This process is the server's parent and the reaper of all that descends from it: it passes signals
on, ends what the server leaves, and writes down how the server ended. If it is killed itself, the server gets SIGTERM.

It runs as a file, below the server's own interpreter or another one: it imports the standard library and psutil only.
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
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
# An end with code 0 that nobody asked for: sparkforge.core.errors.ServerError's code, which is "the server ended".
ENDED = 24
NOT_STARTED = 127  # as shells have it
SIGNALLED = 128  # plus the signal's number
GRACE_SECONDS = 5.0  # for processes that the server left


def supervised(command: Sequence[str], end: Path | None = None) -> tuple[str, ...]:
    """Return the command that runs `command` under this program; `end` is the file that will say how it ended."""
    return (sys.executable, "-P", __file__, *(("--end", str(end)) if end else ()), "--", *command)


def run(command: Sequence[str]) -> tuple[int, bool]:
    """Run `command` to its end; return the exit code of this process, and whether a signal asked for that end.

    An end that was asked for is 0 if the server says so, else 128 plus the signal. Any other end is never 0.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPS, signal.SIGCHLD})
    parent = os.getpid()
    server = os.fork()
    if not server:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        _become(command, parent, former)
    asked: int | None = None
    code: int | None = None
    while code is None:
        number = signal.sigwait({*STOPS, signal.SIGCHLD})
        if number == signal.SIGCHLD:
            code = _reap(server)
        else:
            asked = asked or number
            with suppress(ProcessLookupError):
                os.kill(server, number)
    _end_the_rest()
    if asked:
        return (SIGNALLED + asked if code else 0), True
    return (code if code > 0 else SIGNALLED - code) if code else ENDED, False


def main(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="supervise", description=__doc__)
    parser.add_argument("--end", type=Path, help="JSON file to write when the server has ended")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    code, asked = run(options.command)
    if not asked:
        print(f"the server ended by itself; exit code {code}", flush=True)
    if options.end:
        with suppress(OSError):
            _write(options.end, {"pid": os.getpid(), "code": code, "asked": asked, "time": time.time()})
    return code


def _become(command: Sequence[str], parent: int, mask: set[int | signal.Signals]) -> None:
    """Replace the forked child by the server. Never returns."""
    try:
        if os.getppid() != parent:  # it died before prctl, so that no signal comes
            os._exit(SIGNALLED + signal.SIGTERM)
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


def _end_the_rest() -> None:
    """End every process that the server left: they are our children now, however they were started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        rest = psutil.Process().children(recursive=True)
        for process in rest:
            with suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(rest, timeout=GRACE_SECONDS)


def _write(path: Path, value: dict[str, object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
