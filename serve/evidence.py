"""What `./inv doctor` looks at: logs, the validator's report, build manifests, the machine. Read, never changed.

Whatever cannot be read is said in `sources`; nothing here raises for what a file holds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serve import client, failure, record
from serve.failure import Failure
from serve.record import Server
from sparkforge import paths
from sparkforge.errors import SparkforgeError, StorageError
from validate import facts, gpu, machine
from validate.facts import Fact
from validate.scene import Options, Scene

CHUNK = 1 << 20
HEAD, TAIL = 1 << 16, 1 << 18  # bytes of a log that are kept for a support archive: how it began, how it ended
MAX_JSON = 16 << 20
BUILD_LOGS = 300  # the newest ones; a kernel build leaves one for each unit
# Logs of builds, as forge writes them. A build of the image can lose a compiler, try again and be well: only one that
# failed counts.
UNIT_LOGS = ("kernels/logs/*.log", "build/vllm/*/logs/*.log")
IMAGE_LOGS = ("logs/image.log", "logs/compose.log")
FAILED_BUILD = (b"failed to solve", b"Error response from daemon")
MANIFESTS = (
    *("*.manifest.json", "*/*.manifest.json", "*/*/*.manifest.json", "envs/*/.complete.json"),
    *("*/audit-*.json", "build/vllm/*/audit.json", "up.json", "peaks.json"),
    "envs/*/lib/python3*/site-packages/.sparkforge-patches.*.json",
)
# A stage's manifest is removed first and written last (forge/manifest.py): where its folder stands and the manifest
# does not, it was begun and not finished. Fact → folder, manifest.
STAGES = {
    "build.kernels_finished": ("kernels", "kernels/*.manifest.json"),
    "build.vllm_finished": ("build/vllm", "vllm-overlay.manifest.json"),
}
STDIN = "-"
EMBEDDED, UNIT, OTHER = "embedded server", "compiler", "other"  # kinds of logs


@dataclass(frozen=True)
class Source:
    """One thing that was looked at, and what came of it: "35 kB, 2 min ago", or why it was not read."""

    name: str
    told: str
    read: bool = True


class Log:
    """A log that is read once; its first and last bytes are kept.

    `kind` says whose it is; `written` when it was written last, in Unix time.
    """

    def __init__(
        self, name: str, chunks: Callable[[], Iterator[bytes]], *, kind: str = OTHER, written: float = 0.0
    ) -> None:
        self.name, self._chunks, self.kind, self.written = name, chunks, kind, written
        self.head = self.tail = b""
        self.size, self.broken = 0, ""

    def chunks(self) -> Iterator[bytes]:
        """Yield the log's bytes; a file that cannot be read on ends there, and `broken` says why."""
        try:
            for chunk in self._chunks():
                self.size += len(chunk)
                self.head += chunk[: HEAD - len(self.head)]
                self.tail = (self.tail + chunk)[-TAIL:]
                yield chunk
        except OSError as error:
            self.broken = error.strerror or str(error)
        except SparkforgeError as error:  # the Docker engine's
            self.broken = f"{error.what}: {error.why}"

    def excerpt(self) -> bytes:
        """The whole log if it is short, else how it began and how it ended, in whole lines.

        A line that is cut could begin in the middle of a secret, where nobody would know it for one.
        """
        if self.size <= TAIL:
            return self.tail
        head, tail = self.head[: self.head.rfind(b"\n") + 1], self.tail[self.tail.find(b"\n") + 1 :]
        if b"\n" not in self.tail:
            tail = b""
        return head + b"\n[... %d bytes left out ...]\n\n" % max(0, self.size - len(head) - len(tail)) + tail


@dataclass
class Evidence:
    """All that was found. `facts` is a flat table for signatures, `where` says for each fact what told it.

    `reports` are the validator's, `documents` other JSON files, by name; `errors` what the engine itself refused, with
    what was asked; `machine` and `inspected` go into a support archive as they are.
    """

    logs: list[Log] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)
    errors: list[tuple[str, SparkforgeError]] = field(default_factory=list)
    failure: Failure | None = None
    server: Server | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    inspected: dict[str, Any] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)

    def say(self, name: str, told: str, *, read: bool = True) -> None:
        """Note what came of a source."""
        self.sources.append(Source(name, told, read))

    def fact(self, name: str, value: Any, where: str) -> None:
        """Note a fact and what told it."""
        self.facts[name], self.where[name] = value, where


def of_log(named: str) -> Log:
    """Return the log that a user named; `-` is stdin. Raises StorageError if it cannot be opened."""
    if named == STDIN:
        return Log("stdin", lambda: iter(lambda: sys.stdin.buffer.read(CHUNK), b""))
    path = paths.typed(named)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.open("rb").close()
    except OSError as error:
        raise StorageError(f"cannot read {path}", error.strerror or str(error), f"ls -ld {path}") from error
    return _file(path)


def of_state(state: Path) -> Evidence:
    """Gather everything under `state` and of this machine, except the Docker engine's part."""
    found = Evidence(failure=failure.read(state), server=record.read(state / record.record_path().name))
    _build_logs(state, found)
    _manifests(state, found)
    _report(state, found)
    _server(state, found)
    free = shutil.disk_usage(next(place for place in (state, *state.parents) if place.exists())).free
    found.fact("disk.state_free_bytes", free, f"statvfs {state}")
    if found.failure:
        found.say("the last ./inv up", f"failed {ago(found.failure.ended)}")
    return found


def of_machine(found: Evidence) -> None:
    """Add facts of this machine as the validator reads them. Takes 8 s at most."""
    for name, fact in sorted(machine_facts().items()):
        if not name.startswith(("serve.", "python.")):  # those are a server's that is to start
            found.machine[name] = asdict(fact)
            found.fact(name, fact.value, fact.source)
    found.say("this machine", f"{len(found.machine)} facts")


def machine_facts() -> Mapping[str, Fact]:
    """Return them; what cannot be read is a fact without a value."""
    return facts.gather(Scene(Options(), ""), (machine.READINGS, gpu.SMI_READINGS, gpu.CUDA_READINGS))


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object. Raises OSError, or ValueError for one that is broken, too large or no object."""
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"it has {size(path.stat().st_size)}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it holds no object")  # noqa: TRY004 - callers take ValueError for every broken file
    return value


def name_of(path: Path) -> str:
    """Return a path as a person in the checkout would type it."""
    return str(path.relative_to(paths.ROOT)) if path.is_relative_to(paths.ROOT) else str(path)


def ago(then: float) -> str:
    """Say how long ago a Unix time was."""
    seconds = max(0.0, time.time() - then)
    for unit, length in (("days", 172800.0), ("h", 7200.0), ("min", 120.0)):
        if seconds >= length:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def size(count: int) -> str:
    """Say a number of bytes."""
    return next(
        (f"{count / n:.1f} {unit}" for n, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= n), f"{count} B"
    )


def _file(path: Path, kind: str = OTHER) -> Log:
    def chunks() -> Iterator[bytes]:
        """CHUNK bytes at a time: a log may be larger than memory."""
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    return Log(name_of(path), chunks, kind=kind, written=-_age(path))


def _stale(path: Path, found: Evidence) -> bool:
    """Tell whether a file is from before the `./inv up` that failed last: then it says nothing about that one."""
    return found.failure is not None and path.stat().st_mtime < found.failure.began


def _add_log(path: Path, found: Evidence, kind: str = OTHER) -> None:
    """Take a log if it is there and readable, and say so."""
    name = name_of(path)
    try:
        if not path.is_file():
            found.say(name, "not there", read=False)
        elif not os.access(path, os.R_OK):
            found.say(name, "cannot be read: permission denied", read=False)
        elif _stale(path, found):
            found.say(name, f"left out: {ago(path.stat().st_mtime)}, before the last ./inv up", read=False)
        else:
            found.logs.append(_file(path, kind))
            found.say(name, f"{size(path.stat().st_size)}, {ago(path.stat().st_mtime)}")
    except OSError as error:
        found.say(name, f"cannot be read: {error.strerror}", read=False)


def _build_logs(state: Path, found: Evidence) -> None:
    units = sorted((path for pattern in UNIT_LOGS for path in state.glob(pattern)), key=_age)[:BUILD_LOGS]
    for path in sorted(units):
        if os.access(path, os.R_OK):
            found.logs.append(_file(path, UNIT))
    if units:
        found.say(f"{name_of(units[0].parent)}/*.log", f"{len(units)} logs of compilers, newest {ago(-_age(units[0]))}")
    for name in IMAGE_LOGS:
        path = state / name
        if path.is_file() and _failed(path):
            _add_log(path, found)


def _age(path: Path) -> float:
    """Sort key, newest first; 0 for a file that is gone by now."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _failed(path: Path) -> bool:
    """Tell whether a log of docker ends in a failure; one that cannot be read is looked at by who says so."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - HEAD))
            end = file.read()
    except OSError:
        return True
    return any(sign in end for sign in FAILED_BUILD)


def _manifests(state: Path, found: Evidence) -> None:
    places = sorted({path for pattern in MANIFESTS for path in state.glob(pattern) if path.is_file()})
    broken = 0
    for path in places:
        try:
            found.documents[name_of(path)] = read_json(path)
        except (OSError, ValueError) as error:
            broken += 1
            found.say(name_of(path), f"cannot be read: {error}; that stage is done again", read=False)
    if len(places) > broken:
        found.say("build manifests", f"{len(places) - broken} under {name_of(state)}")
    for fact, (folder, pattern) in STAGES.items():
        if (state / folder).is_dir():
            found.fact(fact, any(state.glob(pattern)), f"{name_of(state / pattern)}, beside {folder}/")


def _report(state: Path, found: Evidence) -> None:
    """Take the embedded server's validation report."""
    path = state / "validation.json"
    name = name_of(path)
    try:
        if not path.exists():
            found.say(name, "not there", read=False)
        elif _stale(path, found):
            found.say(name, f"left out: {ago(path.stat().st_mtime)}, before the last ./inv up", read=False)
        else:
            found.reports[name] = read_json(path)
            found.say(name, f"verdict {found.reports[name].get('verdict')}, {ago(path.stat().st_mtime)}")
    except (OSError, ValueError) as error:
        found.say(name, f"cannot be read: {error}", read=False)


def _server(state: Path, found: Evidence) -> None:
    """Take the embedded server's log, and whether it runs."""
    server = found.server
    if server and server.container:
        return  # its log is the engine's
    path = Path(server.log) if server else state / "logs" / record.log_path().name
    _add_log(path, found, EMBEDDED)
    if server is None:
        return
    where = f"{name_of(state / record.record_path().name)}, {server.where}"
    found.fact("server.alive", server.alive, where)
    if server.alive:
        found.fact("server.healthy", client.healthy(server.url), f"{server.url}/health")
        found.fact("server.age_seconds", round(time.time() - server.started), where)
    found.say("server", f"{server.model_id} at {server.url}, {'runs' if server.alive else 'has ended'}")
