"""The plan of a start, the record of the server that runs, and the failure of the last `./inv up`.

Commands send the API key to the address in the server's record, `server.json`. So the file and its folder must be ours
and closed to others, the process must be ours, and a key is read only from the file that the process or container
itself was started with.
"""

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from sparkforge.core import memory, paths
from sparkforge.core.console import without_passwords
from sparkforge.core.errors import ServerError, SparkforgeError, StorageError, UsageError, completed, on
from sparkforge.core.files import read_json, untrusted, write_atomic, write_json
from sparkforge.core.openai import Endpoint
from sparkforge.core.process import session_members, started_at, with_variable
from sparkforge.core.vllm_flags import passable
from sparkforge.serve import access

MARK = "SPARKFORGE_SERVER"  # in the environment of each process of a server: the server's state folder
NAME = "server.json"
MODELS = "fleet/models"  # below the state folder: a state folder for each model of a fleet
LONGEST = 1 << 16  # bytes; a record has a few hundred
# Exit codes after a requested end, by SIGINT or SIGTERM (supervise.py).
CLEAN_EXITS = {0, 130, 143}
LATEST = 1e11  # latest Unix time that is accepted


@dataclass(frozen=True)
class End:
    """The end of a server: its exit code, whether a signal asked for it, when, in Unix time, and why if for memory."""

    code: int
    asked: bool
    time: float
    why: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Server:
    """A started server: a process of ours, or a container (then `pid` is 0 and `log` is empty).

    `started` is the process's start time, since process ids are reused, or the time at which the log of a container's
    start begins. `key_file` holds its API key, if any. `proved` is the Unix time at which it passed the start-up test,
    0 before that, and `proof` is what `sparkforge.serve.proof.prove` returned, after `proof_seconds`.
    """

    pid: int
    started: float
    host: str
    port: int
    model: str
    model_id: str
    device: str
    log: str
    container: str = ""
    key_file: str = ""
    profile: str = ""
    proved: float = 0.0
    proof: dict[str, str] = field(default_factory=dict)
    proof_seconds: float = 0.0

    @property
    def url(self) -> str:
        """Base URL of its OpenAI API."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - not bound
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def endpoint(self) -> Endpoint:
        """Its OpenAI API, with its API key. Raises what `key` raises."""
        return Endpoint(self.url, self.model_id, key=self.key)

    @property
    def alive(self) -> bool:
        """Tell whether the very process or container that was started still runs."""
        if self.container:
            from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

            return engine.runs(self.container)
        try:
            return started_at(self.pid) == self.started and psutil.Process(self.pid).uids().real == os.getuid()
        except psutil.Error:
            return False

    @property
    def key(self) -> str:
        """The API key of its clients, empty for none. Raises StorageError for a file that it was not started with."""
        if not self.key_file:
            return ""
        own = ""
        if self.container:
            from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

            own = engine.mounted_from(self.container, access.SECRET)
        elif self.alive:
            with suppress(psutil.Error):
                own = psutil.Process(self.pid).environ().get(access.KEY_FILE, "")
        if self.key_file != own:
            failure = f"the record names {self.key_file} as the API key's file"
            why = f"{self.where} was not started with that file"
            raise StorageError(failure, why, "./inv down && ./inv up", code="storage.access")
        return access.read_key(Path(self.key_file), private=not self.container)

    @property
    def where(self) -> str:
        """The process or container that runs it, in words."""
        return f"container {self.container[:12]}" if self.container else f"pid {self.pid}"

    @property
    def log_command(self) -> str:
        """The command that prints its whole log."""
        return f"docker logs {self.container[:12]}" if self.container else on("less", self.log)


SERVER, END = TypeAdapter(Server), TypeAdapter(End)


def record_path() -> Path:
    """Return the path of the record."""
    return paths.state() / NAME


def end_path(state: Path | None = None) -> Path:
    """Return the path of the record of the server's end."""
    return (state or paths.state()) / "server.end.json"


def begun_path() -> Path:
    """Return the file that exists while a container is started and `server.json` does not name it yet."""
    return paths.state() / "container.begun"


def log_path() -> Path:
    """Return the path of the server's log."""
    return paths.state() / "logs" / "server.log"


def write(server: Server) -> None:
    """Record a started server."""
    paths.secure_state()
    write_json(record_path(), asdict(server), mode=0o600)


def read(path: Path | None = None) -> Server | None:
    """Return the recorded server, dead or alive, or None. Raises StorageError if others may have written the record."""
    path = path or record_path()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        if path.is_symlink():
            raise untrusted(path, "it is a link", on("rm", path)) from None
        return None
    try:
        require_ours(path, os.fstat(descriptor))
        data = os.read(descriptor, LONGEST)
    finally:
        os.close(descriptor)
    with suppress(ValueError):
        server = SERVER.validate_json(data, strict=True)
        return server if 0 <= server.proved < LATEST else None
    return None


def running() -> Server:
    """Return the server that runs. Raises ServerError."""
    server = read()
    if server and server.alive:
        return server
    if pids := leftovers():
        failure = "no server is running, but processes of one are left"
        raise ServerError(failure, describe_left(pids), "./inv down", code="server.not-running")
    why = f"its {server.where} {how_it_ended(server)}; its log: ./inv logs" if server else "this checkout started none"
    raise ServerError("no server is running", why, "./inv up", code="server.not-running")


def leftovers(state: Path | None = None) -> list[int]:
    """Return the processes of servers of this checkout that the running server, if there is one, does not own.

    A killed server leaves its engine and workers, and a killed `./inv up` a server that nobody recorded; all have MARK
    in their environment. `state` is another state folder. The models of a fleet have folders of their own.
    """
    server = read(state / record_path().name if state else None)
    own_pids = list[int]()
    if server and not server.container and server.alive:
        children = psutil.Process(server.pid).children(recursive=True)
        own_pids = [*session_members(server.pid), *(child.pid for child in children)]
    marks = [mark(folder) for folder in (state, *(state or paths.state()).glob(f"{MODELS}/*"))]
    return [pid for value in marks for pid in with_variable(MARK, value) if pid not in own_pids]


def mark(state: Path | None = None) -> str:
    """Return the value of MARK in the environment of the servers of a state folder."""
    return str((state or paths.state()).resolve())


def describe_left(pids: Sequence[int]) -> str:
    """Return a sentence about the processes that are left and the memory that they hold."""
    size, ids = memory.resident(pids)["rss"], f"pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
    return f"a server was killed; its {ids} hold up to {size / 1e9:.1f} GB"


def last_end(since: float, pid: int = 0, state: Path | None = None) -> End | None:
    """Return the end that supervise.py recorded since that time, for `pid` unless that is 0; None without one."""
    with suppress(OSError, ValueError):
        end = END.validate_python(read_json(end_path(state)))
        return end if pid in (0, end.pid) and end.time >= since else None
    return None


def ended(server: Server, state: Path | None = None) -> End | None:
    """Return how the server ended; None if it runs or was killed with its supervisor."""
    return last_end(server.started, server.pid, state)


def how_it_ended(server: Server, state: Path | None = None) -> str:
    """Say how a server that does not run any more has ended, as far as it is known."""
    end = ended(server, state)
    if end is None:
        return "has ended"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.time))
    if end.why:
        return f"was ended for memory at {when} with exit code {end.code}: {end.why}"
    return f"{'was asked to end' if end.asked else 'ended by itself'} at {when} with exit code {end.code}"


def forget() -> None:
    """Remove the record."""
    record_path().unlink(missing_ok=True)


def require_ours(path: Path, status: os.stat_result) -> None:
    """Raise StorageError unless a record and its folder belong to us and nobody else can write them."""
    folder = path.parent.stat()
    for owned, owner in ((path, status.st_uid), (path.parent, folder.st_uid)):
        if owner != os.geteuid():
            fix = on("rm", path, "or run the command as that user")
            raise untrusted(path, f"{owned} belongs to uid {owner}, this process is uid {os.geteuid()}", fix)
    if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise untrusted(path, f"other users can write into {path.parent}", f"chmod 700 {path.parent}")
    if not stat.S_ISREG(status.st_mode):
        raise untrusted(path, "it is not a regular file", on("rm", path))
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        why = f"its mode is {stat.S_IMODE(status.st_mode):04o}, and we write 0600"
        raise untrusted(path, why, f"chmod 600 {path}   # if you started this server; else: rm {path}")


FAILURE = "failure.json"
# The command was wrong, not the server: an argument, a missing model or stack, a second start.
NOT_FAILURES = {"usage", "input.model", "input.pins", "server.running", "storage.busy"}


@dataclass(frozen=True)
class Failure:
    """An error of ours: its code, its three parts, and when that `./inv up` began and ended, in Unix time."""

    error: str
    what: str
    why: str
    fix: str
    began: float
    ended: float


@contextmanager
def remembered() -> Iterator[None]:
    """Record a SparkforgeError that is raised inside, and raise it again; success removes the last record."""
    began, path = time.time(), paths.state() / FAILURE
    try:
        yield
    except SparkforgeError as error:
        if error.code not in NOT_FAILURES:
            fix = completed(error.fix, "./inv up")
            failed, why, fix = map(without_passwords, (error.what, error.why, fix))
            failure = Failure(error.code, failed, why, fix, began, time.time())
            with suppress(OSError, SparkforgeError):  # a full disk may be the very error
                write_atomic(path, json.dumps(asdict(failure)) + "\n", mode=0o600)
        raise
    with suppress(OSError):
        path.unlink(missing_ok=True)


def read_failure(state: Path) -> Failure | None:
    """Return the last failure under `state`; None if there was none or it cannot be read."""
    with suppress(OSError, ValueError):
        return TypeAdapter(Failure).validate_python(read_json(state / FAILURE))
    return None


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class StartPlan:
    """The plan of a start: model, device, address and access. Every device uses the same plan.

    `model` is a folder, `model_id` its name in the API, and `host` an IP address; an empty field means the device's
    default. `key_file` has the API key that clients must send, `hosts` further names for the Host header. `flags` are
    vLLM's own and win over the profile's. `variables` are the environment, with --context as MAX_MODEL_LEN. `image` is
    the id of a container's image, empty for the one that Compose names. `python` is the interpreter of an environment
    that the user made. A `profiled` server can write traces. With `tiny_first` a GPU serves the tiny model before a
    larger one, and its answers must be the recorded ones. A `trial` ends with this process, unless it is a container,
    and is never recorded as known good.
    """

    device: str
    model: str = ""
    model_id: str = ""
    profile: str = ""
    stack: str = ""
    port: int = 8000
    host: str = ""
    key_file: str | None = None
    key: str = field(default="", repr=False)
    hosts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    python: str = ""
    profiled: bool = False
    trial: bool = False
    tiny_first: bool = False

    @property
    def address(self) -> str:
        """The IP address to listen on."""
        return self.host or LOOPBACK


def checked_flags(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return vLLM's flags of a configuration file. Raises ValueError for one that `./inv up` refuses."""
    try:
        return passable(flags, relative_to=None)
    except UsageError as error:
        raise ValueError(f"{error.what}: {error.why}") from None
