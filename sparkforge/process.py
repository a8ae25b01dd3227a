"""The one way in which Sparkforge runs other programs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sparkforge import interrupt
from sparkforge.errors import CommandError

TAIL_LINES = 15
KILL_SECONDS = 10.0  # until the kernel has freed the memory of a killed process


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    fix: str = "",
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end and return it with stdout and stderr as text.

    `env` is added to this process's environment. Raises CommandError, with the last lines that the program printed
    and `fix` as the next step, if it cannot be started or (with `check`) ends with another code than 0. If we are
    interrupted, it ends with all that it has started.
    """
    words = [str(word) for word in command]
    pipe = subprocess.PIPE
    streams = {"stdin": pipe if stdin is not None else None, "stdout": pipe, "stderr": pipe}
    options = {"cwd": cwd, "env": {**os.environ, **(env or {})}, "text": True, "errors": "replace", **streams}
    try:
        done = _to_its_end(words, options, stdin)
    except OSError as error:
        raise CommandError(f"cannot run {words[0]}", str(error), fix or f"install {words[0]}") from error
    if check and done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-TAIL_LINES:])
        raise CommandError(
            f"{Path(words[0]).name} ended with code {done.returncode}",
            tail or "it printed nothing",
            fix or f"run it by hand: {' '.join(words)}",
        )
    return done


def call(command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str]) -> int:
    """Run `command` with our own stdin, stdout and stderr and return its exit code. `env` is added to ours."""
    return _to_its_end([str(word) for word in command], {"cwd": cwd, "env": {**os.environ, **env}}).returncode


def _to_its_end(
    words: list[str], options: Mapping[str, Any], stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program as `subprocess.run` does, but if we are interrupted end its children and theirs as well."""
    with ExitStack() as stack:
        with interrupt.held():
            process = stack.enter_context(subprocess.Popen(words, **options))
            stack.push(lambda kind, *_: terminate_tree(process.pid) if kind else None)
        out, err = process.communicate(stdin)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def spawn(command: Sequence[str | Path], *, log: Path, env: Mapping[str, str], cwd: Path) -> int:
    """Start `command` in a session of its own with stdout and stderr appended to `log`; return its process id.

    `env` is the whole environment. The child outlives this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return child.pid


@dataclass(frozen=True)
class Usage:
    """How a program ended: its exit code (-N for signal N) and what it used, together with those that it waited for.

    `peak` is the kernel's own high-water mark, in bytes, of the resident size of the *largest single process* among
    them: exact for a driver whose stages run one after another, too low where stages run side by side. It is never
    below the size that this process had when it started the program.
    """

    code: int
    peak: int
    cpu_seconds: float


class Child:
    """A program in a session of its own, stdout and stderr in `log`, whose resource usage is read when it ends.

    Raises CommandError if it cannot be started.
    """

    def __init__(self, command: Sequence[str | Path], *, log: Path, env: Mapping[str, str], cwd: Path) -> None:
        words = [str(word) for word in command]
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    words,
                    cwd=cwd,
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise CommandError(f"cannot run {words[0]}", str(error), f"install {words[0]}") from error
        self.pid = self._process.pid

    def poll(self) -> Usage | None:
        """Return how it ended; None while it runs."""
        pid, status, used = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)  # Popen must not wait for it again
        return Usage(self._process.returncode, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime)

    def end(self) -> None:
        """End it and every process of its session."""
        if self._process.returncode is None:
            terminate_session(self.pid)
            self._process.returncode = -signal.SIGTERM


def resident_sizes(leaders: Iterable[int]) -> dict[int, int]:
    """Return, for each session leader, the sum in bytes of the resident sizes in its session now.

    Pages that several processes share count once for each of them.
    """
    sizes, page = dict.fromkeys(leaders, 0), os.sysconf("SC_PAGE_SIZE")
    for pid in psutil.pids():
        with suppress(OSError, ValueError):  # it may end while we look
            if (leader := os.getsid(pid)) in sizes:
                sizes[leader] += int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * page
    return sizes


def started_at(pid: int) -> float | None:
    """Start time of a live process in seconds since the epoch; None if there is none or only its zombie.

    Process ids are used again, so a record of a process is the pair (pid, start time).
    """
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def terminate_session(pid: int, *, grace: float = 15.0) -> None:
    """End every process of the session that `pid` leads: SIGTERM, `grace` seconds, SIGKILL. Waits for their end."""
    members = session_members(pid)
    _signal_all(members, signal.SIGTERM)
    if not _wait_for_end(pid, members, grace):
        members = [*members, *session_members(pid)]  # with what they started meanwhile
        _signal_all(members, signal.SIGKILL)
        _wait_for_end(pid, members, KILL_SECONDS)


def terminate_tree(pid: int, *, grace: float = 15.0) -> None:
    """End a process and all that descend from it: SIGTERM, `grace` seconds, SIGKILL. Waits for their end."""
    members = [pid, *_descendants(pid)]
    _signal_all(members, signal.SIGTERM)
    if not _wait_for_end(pid, members, grace):
        members = [*members, *(each for member in members for each in _descendants(member))]
        _signal_all(members, signal.SIGKILL)
        _wait_for_end(pid, members, KILL_SECONDS)


def _descendants(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def session_members(leader: int) -> list[int]:
    """Process ids of the session that `leader` leads, the leader first if it still lives."""
    members = []
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getsid(pid) == leader:
                members.append(pid)
    return sorted(members, key=lambda p: (p != leader, p))


def _wait_for_end(leader: int, pids: Sequence[int], seconds: float) -> bool:
    """Wait until all of `pids` have ended; return whether they have. `leader` may be our own child, and is reaped."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(ChildProcessError):
            os.waitpid(leader, os.WNOHANG)
        if all(started_at(pid) is None for pid in pids):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
