"""The evidence that `./inv doctor` examines: logs, the validator's report, build manifests, the machine.

Files are never changed. A source that cannot be read is noted in `sources`; no content of a file raises an error.
"""

import os
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from sparkforge.core import files, paths
from sparkforge.core.errors import SparkforgeError, StorageError, on
from sparkforge.core.files import existing_part
from sparkforge.core.openai import Endpoint
from sparkforge.image import devices
from sparkforge.serve import record
from sparkforge.serve.record import Failure, Server
from validate.facts import gpu, machine
from validate.facts.fact import Fact, gather
from validate.facts.target import Options, Target

CHUNK = 1 << 20
HEAD, TAIL = 1 << 16, 1 << 18  # bytes of a log's beginning and end that are kept for a support archive
MAX_JSON = 16 << 20
BUILD_LOGS = 300  # the newest ones; a kernel build leaves one for each unit
UNIT_LOGS = ("kernels/logs/*.log", "build/vllm/*/logs/*.log")
# A compiler may be killed in an image build that then succeeds: these logs count only with FAILED_BUILD near the end.
IMAGE_LOGS = ("logs/image.log", "logs/compose.log")
FLEET_LOGS = ("fleet/haproxy.log", "fleet/models/*/up.log", "fleet/models/*/logs/server.log")
FAILED_BUILD = (b"failed to solve", b"Error response from daemon")
MANIFESTS = (
    *("*.manifest.json", "*/*.manifest.json", "*/*/*.manifest.json"),
    *("*/audit-*.json", "build/vllm/*/audit.json", "up.json"),
    "envs/*/lib/python3*/site-packages/*.dist-info/patches/upstream.json",
)
# A stage removes its manifest first and writes it last (sparkforge/core/manifest.py), so a folder without a manifest is
# that of an unfinished stage. Fact → folder, manifest.
STAGES = {
    "build.kernels_finished": ("kernels", "kernels/*.manifest.json"),
    "build.vllm_finished": ("build/vllm", "vllm-overlay.manifest.json"),
}
STDIN, STDIN_NAME = "-", "stdin"
EMBEDDED, UNIT, NAMED, OTHER = "embedded server", "compiler", "named", "other"  # kinds of logs


@dataclass(frozen=True)
class EvidenceSource:
    """A file or program, and the result of reading it: "35 kB, 2 min ago", or why it was not read."""

    name: str
    note: str
    read: bool = True


class Log:
    """A log that is read once; its beginning and end are kept. `written` is the Unix time of the last change."""

    def __init__(
        self, name: str, chunks: Callable[[], Iterator[bytes]], *, kind: str = OTHER, written: float = 0.0
    ) -> None:
        self.name, self._chunks, self.kind, self.written = name, chunks, kind, written
        self.head = self.tail = b""
        self.size, self.broken = 0, ""

    @property
    def command(self) -> str:
        """The command that prints the log."""
        if self.kind == EMBEDDED:
            return "./inv logs"
        if self.name == STDIN_NAME:
            return "cat"  # in the pipe, in place of ./inv doctor
        return self.name if self.name.startswith("docker logs ") else f"cat {shlex.quote(self.name)}"

    @classmethod
    def of_file(cls, path: Path, kind: str = OTHER) -> Self:
        """Return the log in a file, which is opened when it is read."""

        def chunks() -> Iterator[bytes]:
            with _open_file(path) as file:
                while chunk := file.read(CHUNK):
                    yield chunk

        return cls(name_of(path), chunks, kind=kind, written=_modified(path))

    def chunks(self) -> Iterator[bytes]:
        """Yield the log's bytes. A failure to read ends the iteration, and `broken` has the reason."""
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
        """Return the whole log if it is short, else its beginning and its end, in whole lines.

        A cut line could begin in the middle of a secret, and the redaction would not recognise the rest.
        """
        if self.size <= TAIL:
            return self.tail
        head, tail = self.head[: self.head.rfind(b"\n") + 1], self.tail[self.tail.find(b"\n") + 1 :]
        if b"\n" not in self.tail:
            tail = b""
        return head + b"\n[... %d bytes left out ...]\n\n" % max(0, self.size - len(head) - len(tail)) + tail


@dataclass
class Evidence:
    """All evidence. `facts` is a flat table for the signatures, `fact_sources` the source of each.

    `reports` are the validator's, `documents` other JSON files, by name. `containers` serve a fleet's models. `errors`
    are the Docker engine's, each with the command. `machine` and `inspected` are for the support archive.
    """

    logs: list[Log] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    fact_sources: dict[str, str] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)
    errors: list[tuple[str, SparkforgeError]] = field(default_factory=list)
    failure: Failure | None = None
    server: Server | None = None
    containers: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    inspected: dict[str, Any] = field(default_factory=dict)
    sources: list[EvidenceSource] = field(default_factory=list)

    def add_source(self, name: str, note: str, *, read: bool = True) -> None:
        """Note a source, and the result of reading it."""
        self.sources.append(EvidenceSource(name, note, read))

    def add_fact(self, name: str, value: Any, source: str) -> None:
        """Note a fact and its source."""
        self.facts[name], self.fact_sources[name] = value, source


def open_log(name: str) -> Log:
    """Return the log that a user named; `-` is stdin. Raises StorageError if it cannot be opened or is no file."""
    if name == STDIN:
        return Log(STDIN_NAME, lambda: iter(lambda: sys.stdin.buffer.read(CHUNK), b""))
    path = paths.typed(name)
    try:
        _open_file(path).close()
    except OSError as error:
        why = "it is a folder" if isinstance(error, IsADirectoryError) else error.strerror or str(error)
        raise StorageError(
            f"cannot read {path}", why, on("ls -ld", existing_part(path)), code="storage.access"
        ) from error
    return Log.of_file(path, NAMED)


def collect_state(state: Path) -> Evidence:
    """Return the evidence under `state`."""
    evidence = Evidence(failure=record.read_failure(state))
    record_path = state / record.record_path().name
    try:
        evidence.server = record.read(record_path)
    except StorageError as error:  # another user may have written the record
        evidence.add_source(name_of(record_path), f"not believed: {error.why}", read=False)
    _add_build_logs(state, evidence)
    _add_manifests(state, evidence)
    report_path = state / "validation.json"
    if _usable(report_path, evidence):
        try:
            report = evidence.reports[name_of(report_path)] = _read_object(report_path)
            note = f"verdict {report.get('verdict')}, {ago(_modified(report_path))}"
            evidence.add_source(name_of(report_path), note)
        except (OSError, ValueError) as error:
            evidence.add_source(name_of(report_path), f"cannot be read: {error}", read=False)
    _add_server(state, evidence)
    existing = next(folder for folder in (state, *state.parents) if folder.exists())
    evidence.add_fact("disk.state_free_bytes", shutil.disk_usage(existing).free, f"statvfs {state}")
    if evidence.failure:
        evidence.add_source("the last ./inv up", f"failed {ago(evidence.failure.ended)}")
    return evidence


def add_machine(evidence: Evidence) -> None:
    """Add the validator's facts about this machine. Takes 8 s at most."""
    for name, fact in sorted(machine_facts().items()):
        if not name.startswith(("serve.", "python.")):  # these describe a server that is about to start
            evidence.machine[name] = asdict(fact)
            evidence.add_fact(name, fact.value, fact.source)
    evidence.add_source("this machine", f"{len(evidence.machine)} facts")


def machine_facts() -> Mapping[str, Fact]:
    """Return the validator's facts about this machine; a fact that cannot be read has no value."""
    return gather(Target(Options(), ""), (machine.READINGS, gpu.SMI_READINGS, gpu.CUDA_READINGS))


def name_of(path: Path) -> str:
    """Return a path relative to the checkout if it is inside."""
    return str(path.relative_to(paths.ROOT)) if path.is_relative_to(paths.ROOT) else str(path)


def ago(time_: float) -> str:
    """Return the time since a Unix time as text, such as "2 h ago"."""
    seconds = max(0.0, time.time() - time_)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def size(count: int) -> str:
    """Return a number of bytes as text, such as "35.0 kB"."""
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= length:
            return f"{count / length:.1f} {unit}"
    return f"{count} B"


def _open_file(path: Path) -> BinaryIO:
    """Open a regular file. Raises OSError, also for a pipe or device, because reading one may never end."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except ValueError as error:  # a NUL in the name
        raise OSError(None, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(None, f"it is a pipe, socket or device; to read one: ./inv doctor --log {STDIN} < {path}")
    return file


def _read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object. Raises OSError; ValueError if the JSON is broken, too large or not an object."""
    value = files.read_json(path, largest=MAX_JSON, finite=False)
    if not isinstance(value, dict):
        raise ValueError("it holds no object")  # noqa: TRY004 - callers take ValueError for every broken file
    return value


def _modified(path: Path) -> float:
    """Return the Unix time of the last change; 0 for a file that does not exist any more."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _usable(path: Path, evidence: Evidence) -> bool:
    """Return whether a file can be read and is not older than the last failed `./inv up`; note the reason if not."""
    try:
        _open_file(path).close()
        written = _modified(path)
    except OSError as error:
        note = "not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
    else:
        if evidence.failure is None or written >= evidence.failure.began:
            return True
        note = f"left out: {ago(written)}, before the last ./inv up"
    evidence.add_source(name_of(path), note, read=False)
    return False


def _add_log(path: Path, evidence: Evidence, kind: str = OTHER) -> None:
    if _usable(path, evidence):
        evidence.logs.append(Log.of_file(path, kind))
        evidence.add_source(name_of(path), f"{size(path.stat().st_size)}, {ago(_modified(path))}")


def _add_build_logs(state: Path, evidence: Evidence) -> None:
    units = [
        path for pattern in UNIT_LOGS for path in state.glob(pattern) if path.is_file() and os.access(path, os.R_OK)
    ]
    units = sorted(units, key=_modified, reverse=True)[:BUILD_LOGS]
    evidence.logs += [Log.of_file(path, UNIT) for path in sorted(units)]
    if units:
        newest = ago(_modified(units[0]))
        evidence.add_source(f"{name_of(units[0].parent)}/*.log", f"{len(units)} logs of compilers, newest {newest}")
    for path in (state / name for name in IMAGE_LOGS):
        with suppress(OSError), _open_file(path) as file:
            file.seek(max(0, path.stat().st_size - HEAD))
            end = file.read()
            if any(sign in end for sign in FAILED_BUILD):
                _add_log(path, evidence)


def _add_manifests(state: Path, evidence: Evidence) -> None:
    count = 0
    for path in sorted({path for pattern in MANIFESTS for path in state.glob(pattern) if path.is_file()}):
        try:
            evidence.documents[name_of(path)] = _read_object(path)
            count += 1
        except (OSError, ValueError) as error:
            evidence.add_source(name_of(path), f"cannot be read: {error}; that stage is done again", read=False)
    if count:
        evidence.add_source("build manifests", f"{count} under {name_of(state)}")
    for fact, (folder, pattern) in STAGES.items():
        if (state / folder).is_dir():
            evidence.add_fact(fact, any(state.glob(pattern)), f"{name_of(state / pattern)}, beside {folder}/")


def _add_server(state: Path, evidence: Evidence) -> None:
    server = evidence.server
    with suppress(StorageError):  # a record that is not trusted
        if leftovers := record.leftovers(state):
            evidence.add_fact("server.leftovers", len(leftovers), record.describe_left(leftovers))
    if server and server.container:
        return  # the Docker engine has its log
    _add_log(Path(server.log) if server else state / "logs" / record.log_path().name, evidence, EMBEDDED)
    if server is None or server.device == devices.FLEET:
        for path in sorted(log for pattern in FLEET_LOGS for log in state.glob(pattern)):
            _add_log(path, evidence)
        models = map(record.read, sorted(state.glob(f"{record.MODELS}/*/{record.NAME}")))
        evidence.containers += [model.container for model in models if model and model.container]
    if server is None:
        return
    source = f"{name_of(state / record.record_path().name)}, {server.where}"
    if not server.alive:
        source += f" {record.how_it_ended(server, state)}"
    evidence.add_fact("server.alive", server.alive, source)
    if server.alive:
        evidence.add_fact("server.healthy", Endpoint(server.url).healthy(), f"{server.url}/health")
        evidence.add_fact("server.age_seconds", round(time.time() - server.started), source)
    evidence.add_source("server", f"{server.model_id} at {server.url}, {'runs' if server.alive else 'has ended'}")
