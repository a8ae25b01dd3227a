"""Runs programs: to their end, detached, measured, or as probes that may hang."""

import os
import shlex
import signal
import subprocess
import tempfile
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import psutil

from sparkforge.core import interrupt
from sparkforge.core.errors import ProcessError

TAIL_LINES = 15
LARGEST_PID = 1 << 22  # PID_MAX_LIMIT of 64-bit Linux, include/linux/threads.h
PIECE = 1 << 16  # bytes
GRACE_SECONDS = 15.0  # between SIGTERM and SIGKILL
KILL_SECONDS = 10.0  # until the kernel has freed the memory of a killed process
REAP_SECONDS = 0.2  # for a killed probe; a probe that is stuck in the kernel is abandoned
LONGEST_OUTPUT = 16 << 20  # bytes of a probe's output that are read


class RunOptions(TypedDict, total=False):
    """The keywords of `run`; `run_unchecked` documents them."""

    cwd: Path | None
    env: Mapping[str, str | None] | None
    stdin: str | None
    fix: str
    seconds: float | None


def run(command: Sequence[str | Path], **options: Unpack[RunOptions]) -> subprocess.CompletedProcess[str]:
    """Run `command` as `run_unchecked` does; raise ProcessError, with its last lines, if its exit code is not 0."""
    result = run_unchecked(command, **options)
    if result.returncode:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-TAIL_LINES:]) or "it printed nothing"
        failure = f"{Path(command[0]).name} ended with code {result.returncode}"
        raise ProcessError(failure, tail, options.get("fix") or _by_hand(command), code="process.failed")
    return result


def run_unchecked(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    stdin: str | None = None,
    fix: str = "",
    seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end, whatever its exit code is, and return it with stdout and stderr as text.

    `env` is added to this process's environment; None removes a variable. Raises ProcessError, with `fix` as the next
    step, if it cannot be started or runs longer than `seconds`. If we are interrupted or time is up, the program and
    all its descendants are ended.
    """
    variables = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
    pipe = subprocess.PIPE
    options = {"stdin": None if stdin is None else pipe, "stdout": pipe, "stderr": pipe, "errors": "replace"}
    with _running(command, fix, cwd=cwd, env=variables, text=True, **options) as process:
        try:
            out, err = process.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            failure, fix = f"{Path(command[0]).name} did not end within {seconds:g} s", fix or _by_hand(command)
            raise ProcessError(failure, "it was stopped", fix, code="process.failed") from error
    return subprocess.CompletedProcess([str(word) for word in command], process.returncode, out, err)


def _by_hand(command: Sequence[str | Path]) -> str:
    return f"{shlex.join(map(str, command))}   # by hand"


@contextmanager
def _running(command: Sequence[str | Path], fix: str = "", **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a program; if an exception ends the block, end it and all its descendants. Raises ProcessError."""
    with ExitStack() as stack:
        with interrupt.held():
            process = stack.enter_context(_started(command, fix, **options))
            stack.push(lambda kind, *_: terminate_tree(process.pid) if kind else None)
        yield process


def _started(command: Sequence[str | Path], fix: str = "", **options: Any) -> subprocess.Popen[Any]:
    try:
        return subprocess.Popen([str(word) for word in command], **options)
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument or a variable
        if isinstance(error, ValueError):
            fix = "--help   # correct that argument"
        elif (folder := options.get("cwd")) and not Path(folder).is_dir():  # the folder is missing, not the program
            fix = f"--help   # name an existing folder in place of {folder}"
        fix = fix or f"command -v {shlex.quote(str(command[0]))}   # install it"
        raise ProcessError(f"cannot run {command[0]}", str(error), fix, code="process.failed") from error


def call(command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str]) -> int:
    """Run `command` with our streams and `env` added to ours; return its exit code. Raises ProcessError."""
    with _running(command, cwd=cwd, env={**os.environ, **env}) as process:
        return process.wait()


def output(command: Sequence[str | Path], *, cwd: Path) -> Generator[str, None, None]:
    """Run `command`, yield its output, and end it when the caller stops reading. Raises ProcessError."""
    decoder = getincrementaldecoder("utf-8")("replace")  # a piece can end in the middle of a character
    with _running(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as process:
        while process.stdout and (data := process.stdout.read(PIECE)):
            yield decoder.decode(data)
        yield decoder.decode(b"", final=True)


def spawn(command: Sequence[str | Path], *, log: Path, env: Mapping[str, str], cwd: Path) -> int:
    """Start `command` in a session of its own, which outlives this process; return its process id.

    Its output is appended to `log`; `env` is its whole environment. Raises ProcessError if it cannot be started.
    """
    return _detached(command, log, "ab", env=dict(env), cwd=cwd).pid


def _detached(command: Sequence[str | Path], log: Path, mode: str, **options: Any) -> subprocess.Popen[Any]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open(mode) as file:
        return _started(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **options
        )


class ProbeError(Exception):
    """A probe gave no answer; the message says why in one line."""


def last_line(output: str) -> str:
    """Return the last line of a program's output that is not blank, 300 characters at most."""
    lines = (line.strip() for line in reversed(output.splitlines()))
    return next((line[:300] for line in lines if line), "it printed nothing")


@dataclass(frozen=True)
class ProgramOutput:
    """The result of a program: its exit code (None: it was still running when time was up) and its output."""

    code: int | None
    stdout: str
    stderr: str

    def last_line(self) -> str:
        """Last line that was printed on stderr, else on stdout."""
        return last_line(f"{self.stdout}\n{self.stderr}")


def ask(command: Sequence[str | Path], *, seconds: float, env: Mapping[str, str] | None = None) -> ProgramOutput:
    """Run a program, which may hang, for at most `seconds`; then kill its session without waiting for its end.

    Output goes to files: a process that is stuck in the kernel (a known way for a GPU driver to fail) never closes its
    pipe. `env` is the whole environment; None keeps ours. Raises ProbeError if the program cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = watch(command, seconds=seconds, env=env, stdout=out, stderr=err)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(LONGEST_OUTPUT).decode(errors="replace"))
        return ProgramOutput(code, *texts)


def watch(
    command: Sequence[str | Path], *, seconds: float, env: Mapping[str, str] | None, **streams: Any
) -> int | None:
    """Run `command` for at most `seconds`, with our stdout and stderr or `streams`; return its code, None at a timeout.

    When its time is up, or after an exception here such as a signal's, the program is killed with all its descendants.
    Raises ProbeError if the program cannot be started.
    """
    try:
        child = subprocess.Popen(
            [str(word) for word in command], env=env, stdin=subprocess.DEVNULL, start_new_session=True, **streams
        )
    except OSError as error:
        raise ProbeError(f"cannot run {command[0]}: {error.strerror}") from error
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            _signal_all([*_tree([child.pid]), *session_members(child.pid)], signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                child.wait(REAP_SECONDS)


def require(answer: ProgramOutput, name: str, seconds: float) -> str:
    """Return the stdout of a program that succeeded. Raises ProbeError, which names the end, for other programs."""
    if answer.code is None:
        raise ProbeError(f"{name} did not answer within {seconds:g} s")
    if answer.code != 0:
        raise ProbeError(f"{name} {ending(answer.code)}: {answer.last_line()}")
    return answer.stdout


def ending(code: int) -> str:
    """Return in words how a process with this return code ended."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


@dataclass(frozen=True)
class Usage:
    """The end of a program: its exit code (-N for signal N) and resource usage, with its awaited children's.

    `peak` is the kernel's high-water mark, in bytes, of the resident size of the *largest single process* among them:
    too low where stages run in parallel, and never below the size of this process when it started the program.
    """

    code: int
    peak: int
    cpu_seconds: float


class Child:
    """A program in its own session, printing to `log`; its usage is read when it ends. Raises ProcessError."""

    def __init__(self, command: Sequence[str | Path], *, log: Path, env: Mapping[str, str], cwd: Path) -> None:
        self._process = _detached(command, log, "wb", env={**os.environ, **env}, cwd=cwd)
        self.pid = self._process.pid

    def poll(self) -> Usage | None:
        """Return how the program ended; None while it runs."""
        pid, status, used = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)  # Popen must not wait for it again
        return Usage(self._process.returncode, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime)

    def end(self) -> None:
        """End the program and every process of its session."""
        if self._process.returncode is None:
            terminate_session(self.pid)
            self._process.returncode = -signal.SIGTERM


def resident_sizes(leaders: Iterable[int]) -> dict[int, int]:
    """Return each leader's sum of resident bytes in its session; shared pages count once for each process."""
    sizes, page = dict.fromkeys(leaders, 0), os.sysconf("SC_PAGE_SIZE")
    for pid in psutil.pids():
        with suppress(OSError, ValueError):  # it may end while we look
            if (leader := os.getsid(pid)) in sizes:
                sizes[leader] += int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * page
    return sizes


def started_at(pid: int) -> float | None:
    """Start time of a live process in seconds since the epoch; None if there is no such process or only its zombie.

    Process ids are reused, so a record of a process is the pair (pid, start time).
    """
    if not _is_program(pid):
        return None
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def _is_program(pid: int) -> bool:
    """Tell whether a process with this id may be ended: -1 would be all of this user's, 0 our group, 1 the system's."""
    return 1 < pid < LARGEST_PID


def terminate_session(pid: int, *, grace: float = GRACE_SECONDS) -> None:
    """End every process of the session that `pid` leads: SIGTERM, `grace` seconds, SIGKILL; wait for the end.

    Raises ProcessError, after the end of all others, if a process may not be signalled.
    """
    if _is_program(pid):
        _end(pid, grace, lambda _pids: session_members(pid))


def terminate(pids: Sequence[int]) -> None:
    """End these processes: SIGTERM, GRACE_SECONDS, SIGKILL. Waits for their end."""
    if pids:
        _end(pids[0], GRACE_SECONDS, lambda _: list(pids))


def terminate_tree(pid: int, *, grace: float = GRACE_SECONDS) -> None:
    """End a process and its descendants: SIGTERM, `grace` seconds, SIGKILL; wait for the end. Raises ProcessError."""
    if _is_program(pid):
        _end(pid, grace, _tree)


def _end(pid: int, grace: float, members_of: Callable[[list[int]], list[int]]) -> None:
    members = members_of([pid])
    _signal_all(members, signal.SIGTERM)
    if not _wait_for_end(pid, members, grace):
        members = [*members, *members_of(members)]  # and the processes that they started meanwhile
        _signal_all(members, signal.SIGKILL)
        _wait_for_end(pid, members, KILL_SECONDS)


def _tree(pids: list[int]) -> list[int]:
    members = list(pids)
    for pid in pids:
        with suppress(psutil.Error):
            members += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return members


def with_variable(name: str, value: str) -> list[int]:
    """Return the ids of this user's processes whose environment had `name` set to `value` at their start."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or it ends while we look
            if process.environ().get(name) == value:
                pids.append(process.pid)
    return pids


def session_members(leader: int) -> list[int]:
    """Process ids of the session that `leader` leads, the leader first if it still lives."""
    members = []
    for pid in psutil.pids() if _is_program(leader) else ():
        with suppress(OSError):
            if os.getsid(pid) == leader:
                members.append(pid)
    return sorted(members, key=lambda p: (p != leader, p))


def listens(leader: int, port: int) -> bool:
    """Return whether a process of the session that `leader` leads listens on the TCP port."""
    for pid in session_members(leader):
        with suppress(psutil.Error):
            connections = psutil.Process(pid).net_connections("tcp")
            if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections):
                return True
    return False


def _wait_for_end(leader: int, pids: Sequence[int], seconds: float) -> bool:
    """Wait until all of `pids` have ended; return whether they have. If `leader` is our own child, it is reaped."""
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
    refused = []
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            refused.append(str(pid))
    if refused:
        why, fix = "it belongs to another user", f"sudo kill {' '.join(refused)}   # or ask that user"
        raise ProcessError(f"cannot end process {', '.join(refused)}", why, fix, code="process.failed")
