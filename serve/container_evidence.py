"""The Docker engine's part of what `./inv doctor` looks at: our container's state, log, and validation report."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

import docker

from serve import docker_compose, engine
from serve.evidence import EMBEDDED, MAX_JSON, Evidence, Log, ago, size
from serve.healthy import RUN
from sparkforge.errors import SparkforgeError

# serve/entrypoint.py's names; that module needs libraries that only the container has.
REPORT, REFUSED = "validation.json", "refused.json"
FRAME = 1 << 16  # bytes
LINES = 100_000  # of the container's log, the last ones
# Of `docker inspect`: what says how it was started and how it ended, and nothing else.
KEPT = ("Image", "RestartCount", "Platform", "Created")
KEPT_HOST = (
    "Memory",
    "ShmSize",
    "RestartPolicy",
    "DeviceRequests",
    "Runtime",
    "IpcMode",
    "ReadonlyRootfs",
    "PidsLimit",
)
KEPT_MOUNT = ("Type", "Destination", "RW")
# Variables whose values explain something; of all others only the name is kept.
TELLING = (
    *("SPARKFORGE_", "VLLM_", "CUDA_", "NVIDIA_", "FLASHINFER_", "TORCH_", "TRITON_", "NCCL_", "HF_HUB_OFFLINE="),
    *("TRANSFORMERS_OFFLINE=", "MAX_JOBS=", "OMP_", "PYTHON", "PATH=", "TIKTOKEN_"),
)


def look(found: Evidence) -> None:
    """Add what the engine knows. No engine, or no container of ours, is said and is no error."""
    if found.server and not found.server.container:
        found.say("Docker engine", "not asked: the last server is an embedded one", read=False)
        return
    try:
        with engine.connected() as client:
            found.fact("engine.version", engine.read(client).version, "docker info")
            _container(client, found)
    except SparkforgeError as error:
        found.say("Docker engine", f"{error.what} ({error.why})", read=False)
        if found.server:
            found.errors.append(("docker info", error))


def cut(told: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an inspected container that is needed to understand it."""
    config, host = told.get("Config") or {}, told.get("HostConfig") or {}
    state = {name: value for name, value in (told.get("State") or {}).items() if name not in {"Pid", "Health"}}
    health = (told.get("State") or {}).get("Health") or {}
    return {
        **{name: told[name] for name in KEPT if name in told},
        "State": state,
        "Health": {"Status": health.get("Status"), "Log": (health.get("Log") or [])[-3:]},
        "Config": {
            "Image": config.get("Image"),
            "User": config.get("User"),
            "Entrypoint": config.get("Entrypoint"),
            "Cmd": config.get("Cmd"),
            "Env": [_variable(str(each)) for each in config.get("Env") or []],
        },
        "HostConfig": {name: host[name] for name in KEPT_HOST if name in host},
        "Mounts": [{name: each.get(name) for name in KEPT_MOUNT} for each in told.get("Mounts") or []],
    }


def _variable(text: str) -> str:
    name = text.partition("=")[0]
    return text if text.startswith(TELLING) else f"{name}=…"


def _container(client: docker.DockerClient, found: Evidence) -> None:
    recorded = found.server.container if found.server else ""
    container = recorded or engine.service_container(client, docker_compose.project(), docker_compose.SERVICE)
    state = engine.state(client, container) if container else None
    if container is None or state is None:
        told = f"{container[:12]} is gone" if container else f"the Compose project {docker_compose.project()} has none"
        found.say("container", told, read=False)
        return
    told = client.api.inspect_container(container)
    name = f"container {container[:12]}"
    if _is_older(told, state, found):
        found.say(name, f"left out: {state.status}, older than the last ./inv up", read=False)
        return
    _leave_out_embedded(found)
    _facts(name, state, found)
    found.inspected = cut(told)
    found.logs.append(Log(f"docker logs {container[:12]}", lambda: _log(container)))
    _reports(client, container, told, found)


def _facts(name: str, state: engine.State, found: Evidence) -> None:
    """Take the state as facts."""
    where = f"docker inspect {name.removeprefix('container ')}"
    for fact, value in (
        ("status", state.status),
        ("exit_code", state.exit_code),
        ("restarts", state.restarts),
        ("oom_killed", state.out_of_memory),
    ):
        found.fact(f"container.{fact}", value, where)
    found.fact("container.health", state.health, f"{where}, whose health check says: {state.said}")
    found.say(name, f"{state.status}, {state.health or 'no health yet'}, exit code {state.exit_code}")


def _is_older(told: dict[str, Any], state: engine.State, found: Evidence) -> bool:
    """Tell whether another start came after this container's end; a container that runs is the newest."""
    ended = float("inf") if state.runs or state.status == "restarting" else _ended(told)
    if found.failure and ended < found.failure.began:
        return True
    return any(log.written > ended for log in found.logs if log.kind == EMBEDDED)


def _leave_out_embedded(found: Evidence) -> None:
    """Forget the log of an embedded server: the container is the newer one."""
    for log in [log for log in found.logs if log.kind == EMBEDDED]:
        found.logs.remove(log)
        found.sources = [source for source in found.sources if source.name != log.name]
        found.say(log.name, f"left out: {ago(log.written)}, older than the container", read=False)


def _ended(told: dict[str, Any]) -> float:
    """When the container's program ended, in Unix time; infinite if the engine does not tell."""
    try:
        return datetime.fromisoformat(str(told["State"]["FinishedAt"])).timestamp()
    except (KeyError, ValueError, OverflowError):
        return float("inf")


def _log(container: str) -> Iterator[bytes]:
    """Yield the log in pieces of some size; the API gives one for each write of the server's."""
    gathered = bytearray()
    with engine.connected() as client:
        for frame in client.api.logs(container, stream=True, follow=False, tail=LINES):
            gathered += frame
            if len(gathered) >= FRAME:
                yield bytes(gathered)
                gathered.clear()
    yield bytes(gathered)


def _reports(client: docker.DockerClient, container: str, told: dict[str, Any], found: Evidence) -> None:
    """Take the validation report from where the container has it, or the refusal that it left behind."""
    variables = dict(str(each).partition("=")[::2] for each in (told.get("Config") or {}).get("Env") or [])
    run, state = variables.get("SPARKFORGE_RUN") or RUN, variables.get("SPARKFORGE_STATE") or ""
    places = [(PurePosixPath(run) / REPORT, "")]
    places += [(PurePosixPath(state) / REFUSED, "document")] if state else []
    for path, key in places:
        name = f"{container[:12]}:{path}"
        try:
            report = _read(client, container, path, key)
        except docker.errors.NotFound:
            found.say(name, "not there", read=False)
        except (docker.errors.APIError, tarfile.TarError, ValueError, KeyError, IndexError) as error:
            found.say(name, f"cannot be read: {error}", read=False)
        else:
            found.reports[name] = report
            found.say(name, f"verdict {report.get('verdict')}")
            return


def _read(client: docker.DockerClient, container: str, path: PurePosixPath, key: str) -> dict[str, Any]:
    """Return a JSON object out of a container, running or not; with `key` the object that it holds under it."""
    stream, _ = client.api.get_archive(container, str(path))
    data = b""
    for chunk in stream:
        data += chunk
        if len(data) > MAX_JSON:
            raise ValueError(f"it has over {size(MAX_JSON)}")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile(archive.getmembers()[0])
        document = json.loads(member.read() if member else b"")
    found = document[key] if key and isinstance(document, dict) else document
    if not isinstance(found, dict):
        raise ValueError("it holds no object")  # noqa: TRY004 - every broken file is told in one way
    return found
