"""Runs a program that may hang: whoever does not answer in time is killed, and left alone if that does not help."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sparkforge.core.documents import parse_json, read_bytes

LONGEST = 16 << 20  # bytes that are read of what a program printed
POLL = 0.01  # seconds between two looks at the child


class ProbeError(Exception):
    """A probe gave no answer; the message says why in one line."""


@dataclass(frozen=True)
class ProgramOutput:
    """What a program left behind: its exit code (None: it was still running when time was up) and its output."""

    code: int | None
    stdout: str
    stderr: str

    def last_line(self) -> str:
        """Last line that was printed on stderr, else on stdout; empty if nothing was."""
        lines = [line.strip() for text in (self.stdout, self.stderr) for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""


def ask(command: Sequence[str | Path], *, seconds: float, env: Mapping[str, str] | None = None) -> ProgramOutput:
    """Run `command` for at most `seconds`, in a session of its own; then kill that session and do not wait for it.

    Output goes to files, not pipes: a process stuck in the kernel (a known way for a GPU driver to fail) cannot be
    reaped, and reading its pipe would never end. `env` is the whole environment; None keeps ours.
    Raises ProbeError if the program cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise ProbeError(f"cannot run {command[0]}: {error.strerror}") from error
        code = _wait(child, seconds)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(LONGEST).decode(errors="replace"))
        return ProgramOutput(code, *texts)


def watch(command: Sequence[str | Path], *, seconds: float, env: Mapping[str, str]) -> int | None:
    """Run `command` with our own stdout and stderr for at most `seconds`; return its exit code, None if time was up.

    What outlives its time, or an exception such as a signal's in this process, is killed with all its descendants.
    Raises ProbeError if the program cannot be started.
    """
    try:
        child = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
    except OSError as error:
        raise ProbeError(f"cannot run {command[0]}: {error.strerror}") from error
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if (code := child.poll()) is not None:
                return code
            time.sleep(POLL)
    finally:
        if child.poll() is None:
            _kill_tree(child)
    return None


def _kill_tree(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and what it started; probes sit in sessions of their own, so that its session is not enough."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(child.pid)
        for process in (*root.children(recursive=True), root):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=0.2)


def require(answer: ProgramOutput, name: str, seconds: float) -> str:
    """Return the stdout of a program that ended well; raise ProbeError that says how it ended otherwise."""
    if answer.code is None:
        raise ProbeError(f"{name} did not answer within {seconds:g} s")
    if answer.code != 0:
        raise ProbeError(f"{name} {ending(answer.code)}: {answer.last_line() or 'it printed nothing'}")
    return answer.stdout


def entries(answers: Path) -> list[dict[str, Any]]:
    """Return the JSON objects that a child appended to `answers`, one a line, but for the line that it died in."""
    objects = []
    for line in read_bytes(answers).splitlines() if answers.is_file() else ():
        with suppress(ValueError):
            value = parse_json(line, str(answers), finite=False)  # a wrong kernel gives NaN
            if isinstance(value, dict):
                objects.append(value)
    return objects


def ending(code: int) -> str:
    """Say how a process ended, from its return code."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            return code
        time.sleep(POLL)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=0.2)  # collects an ordinary sleeper; one that is stuck in the kernel is left behind
    return None
