"""The context of a result: its server and the machine, without host names or paths."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from sparkforge import __version__
from sparkforge.bench.schema import ServedModel
from sparkforge.core import memory, paths
from sparkforge.core.files import read_json, sha256_file
from sparkforge.core.git import checkout_commit
from sparkforge.core.gpus import query
from sparkforge.core.openai import Endpoint, uses_proxy
from sparkforge.core.process import ProbeError, session_members
from sparkforge.serve import record as records

INPUTS = ("pins.toml", "locks/embedded.txt", "locks/spark.txt")


def describe_server(endpoint: Endpoint) -> ServedModel:
    """Return the facts of the server: only name and version, unless this checkout started the server."""
    server = ServedModel(model=endpoint.model, version=endpoint.version())
    record = own_server(endpoint)
    if record is None:
        return server
    files = {name: paths.ROOT / name for name in INPUTS} | {"validation.json": paths.state() / "validation.json"}
    findings = read_table(files["validation.json"]).get("findings", [])
    known = {
        "device": record.device,
        "startup_seconds": read_table(paths.state() / "up.json").get("seconds", {}),
        "memory_bytes": memory.resident(session_members(record.pid)) if record.pid else {},
        "findings": [{key: str(value) for key, value in finding.items()} for finding in findings],
        "records": {name: sha256_file(path) for name, path in files.items() if path.is_file()},
    }
    return server.model_copy(update=known)


def own_server(endpoint: Endpoint) -> records.Server | None:
    """Return the record of this checkout's running server if it serves the endpoint; else None."""
    server, url = running_server(), urlsplit(endpoint.url)
    return server if server and not uses_proxy(endpoint.url) and url.port == server.port else None


def running_server() -> records.Server | None:
    """Return this checkout's server if its process runs. Raises StorageError if others may have written it.

    A container is not checked, because the first request shows whether it still runs.
    """
    server = records.read()
    return server if server and (server.container or server.alive) else None


def read_table(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; empty if the file is missing or has no object."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def facts() -> dict[str, Any]:
    """Return processor, cores, memory (bytes), GPUs, system, Python, our version and commit, and the time in UTC."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(names, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "sparkforge": __version__,
        "commit": checkout_commit(paths.ROOT),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def gpus() -> list[str]:
    """Return name and driver of each NVIDIA GPU; none if nvidia-smi is missing or lists none."""
    try:
        return [", ".join(row.values()) for row in query("name", "driver_version")]
    except ProbeError:
        return []
