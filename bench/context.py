"""What a result says of its server beyond figures: what it tells itself, and what this checkout knows if it is ours."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.endpoint import LOOPBACK, Endpoint
from bench.schema import Server
from sparkforge import paths
from sparkforge.files import sha256_file
from sparkforge.process import session_members, started_at

RECORDS = ("pins.toml", "locks/embedded.txt", "locks/spark.txt", "validation.json")


def server(endpoint: Endpoint) -> Server:
    """Return what is known of the server; of one that this checkout did not start, only its name and version."""
    told = Server(model=endpoint.model, version=endpoint.version())
    record = ours(endpoint)
    if record is None:
        return told
    report = _read("validation.json")
    return told.model_copy(
        update={
            "device": str(record.get("device", "")),
            "startup_seconds": _read("up.json").get("seconds", {}),
            "memory_bytes": memory(int(record["pid"])) if record["pid"] else {},
            "findings": [{key: str(value) for key, value in each.items()} for each in report.get("findings", [])],
            "records": {name: sha256_file(path) for name in RECORDS if (path := _place(name)).is_file()},
        }
    )


def ours(endpoint: Endpoint) -> dict[str, Any] | None:
    """Return the record of this checkout's running server if it is the one at the endpoint."""
    found, at = record(), urlsplit(endpoint.url)
    return found if found and at.hostname in LOOPBACK and at.port == found["port"] else None


def record() -> dict[str, Any] | None:
    """Return what serve/record.py wrote of this checkout's server, if its process lives.

    A container's life is not looked at: whether it answers shows at the first request.
    """
    found = _read("server.json")
    with suppress(KeyError, TypeError, ValueError):
        alive = found.get("container") or started_at(int(found["pid"])) == found["started"]
        return {**found, "port": int(found["port"]), "pid": int(found["pid"])} if alive else None
    return None


def key() -> str:
    """Return the API key of this checkout's server; empty if it has none that can be read."""
    try:
        return Path((record() or {}).get("key_file") or "").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def memory(leader: int) -> dict[str, int]:
    """Return bytes over all of a server's processes now: resident, and proportional (shared pages counted once)."""
    sizes = {"rss": 0, "pss": 0}
    for pid in session_members(leader):
        with suppress(psutil.Error):
            used = psutil.Process(pid).memory_full_info()
            sizes = {"rss": sizes["rss"] + used.rss, "pss": sizes["pss"] + used.pss}
    return sizes


def _place(name: str) -> Path:
    return (paths.state() if name == "validation.json" else paths.ROOT) / name


def _read(name: str) -> dict[str, Any]:
    try:
        value = json.loads((paths.state() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
