"""What this checkout serves right now: one JSON record, believed only while its process lives."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge import paths
from sparkforge.errors import NotRunningError
from sparkforge.files import write_json
from sparkforge.process import started_at


@dataclass(frozen=True)
class Server:
    """A started server. `started` is its process's start time, since process ids are used again."""

    pid: int
    started: float
    host: str
    port: int
    model: str
    model_id: str
    device: str
    log: str

    @property
    def url(self) -> str:
        """Base URL of its OpenAI API."""
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Tell whether the very process that was started still runs."""
        return started_at(self.pid) == self.started


def record_path() -> Path:
    """Return where the record lies."""
    return paths.state() / "server.json"


def log_path() -> Path:
    """Return where the server's output goes."""
    return paths.state() / "logs" / "server.log"


def write(server: Server) -> None:
    """Record a started server."""
    write_json(record_path(), asdict(server))


def read() -> Server | None:
    """Return the recorded server, dead or alive; None if there is none or the record is unreadable."""
    try:
        return Server(**json.loads(record_path().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def running() -> Server:
    """Return the server that runs. Raises NotRunningError."""
    server = read()
    if server and server.alive:
        return server
    why = f"its process {server.pid} has ended; its log is {server.log}" if server else "this checkout started none"
    raise NotRunningError("no server is running", why, "./inv up")


def forget() -> None:
    """Remove the record."""
    with suppress(FileNotFoundError):
        record_path().unlink()
