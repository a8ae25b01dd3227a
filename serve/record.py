"""What this checkout serves right now: one JSON record, believed only while its process lives."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge import paths
from sparkforge.errors import NotRunningError, StorageError
from sparkforge.files import write_json
from sparkforge.process import started_at


@dataclass(frozen=True)
class Server:
    """A started server: a process of ours, or a container (then `pid` is 0 and `log` is empty).

    `started` is the process's start time, since process ids are used again. `key_file` holds its API key, if any.
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

    @property
    def url(self) -> str:
        """Base URL of its OpenAI API."""
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Tell whether the very process or container that was started still runs."""
        if self.container:
            from serve import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

            return engine.runs(self.container)
        return started_at(self.pid) == self.started

    @property
    def key(self) -> str:
        """The API key that its clients must send; empty if it has none. Raises StorageError for an unreadable file."""
        if not self.key_file:
            return ""
        try:
            return Path(self.key_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise StorageError(
                f"cannot read the API key in {self.key_file}", str(error), f"ls -l {self.key_file}"
            ) from error

    @property
    def where(self) -> str:
        """What runs it, in words."""
        return f"container {self.container[:12]}" if self.container else f"pid {self.pid}"


def record_path() -> Path:
    """Return where the record lies."""
    return paths.state() / "server.json"


def log_path() -> Path:
    """Return where the server's output goes."""
    return paths.state() / "logs" / "server.log"


def write(server: Server) -> None:
    """Record a started server."""
    write_json(record_path(), asdict(server))


def read(path: Path | None = None) -> Server | None:
    """Return the recorded server, dead or alive; None if there is none or the record is unreadable.

    `path` is the record, if it is another state's.
    """
    try:
        server = Server(**json.loads((path or record_path()).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    numbers = isinstance(server.pid, int) and isinstance(server.port, int) and isinstance(server.started, int | float)
    texts = (server.host, server.model, server.model_id, server.device, server.log, server.container, server.key_file)
    return server if numbers and all(isinstance(text, str) for text in texts) else None


def running() -> Server:
    """Return the server that runs. Raises NotRunningError."""
    server = read()
    if server and server.alive:
        return server
    why = f"its {server.where} has ended; its log: ./inv logs" if server else "this checkout started none"
    raise NotRunningError("no server is running", why, "./inv up")


def forget() -> None:
    """Remove the record."""
    with suppress(FileNotFoundError):
        record_path().unlink()
