"""The Docker engine's evidence for `./inv doctor`: our container's state, log, and validation report."""

import io
import tarfile
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import docker

from sparkforge.core.errors import SparkforgeError
from sparkforge.core.files import parse_json
from sparkforge.doctor.evidence import EMBEDDED, MAX_JSON, Evidence, Log, ago, size
from sparkforge.image import compose, engine
from sparkforge.serve.health import RUN

# sparkforge/serve/entrypoint.py's names; that module needs libraries that only the container has.
REPORT, REFUSED = "validation.json", "refused.json"
FRAME = 1 << 16  # bytes
LINES = 100_000  # of the container's log, the last ones
# The only fields of `docker inspect` that are kept. They show how a container was started and how it ended.
INSPECT_FIELDS = ("Image", "RestartCount", "Platform", "Created")
KEPT_CONFIG = ("Image", "User", "Entrypoint", "Cmd")
KEPT_HOST = (
    *("Memory", "ShmSize", "RestartPolicy", "DeviceRequests", "Runtime", "IpcMode", "ReadonlyRootfs", "PidsLimit"),
)
KEPT_MOUNT = ("Type", "Destination", "RW")
# Variables whose values help a diagnosis. Of all other variables, only the names are kept.
KEPT_VARIABLES = (
    *("SPARKFORGE_", "VLLM_", "CUDA_", "NVIDIA_", "FLASHINFER_", "TORCH_", "TRITON_", "NCCL_", "HF_HUB_OFFLINE="),
    *("TRANSFORMERS_OFFLINE=", "MAX_JOBS=", "OMP_", "PYTHON", "PATH=", "TIKTOKEN_"),
)


def add_container(evidence: Evidence) -> None:
    """Add the engine's evidence. A missing engine or container is noted and is no error."""
    for model in evidence.containers:
        evidence.logs.append(Log(f"docker logs {model[:12]}", partial(_read_log, model)))
    if evidence.server and not evidence.server.container:
        evidence.add_source("Docker engine", "not asked: the last server runs without a container", read=False)
        return
    try:
        with engine.connected() as client:
            evidence.add_fact("engine.version", engine.read(client).version, "docker info")
            _add_container(client, evidence)
    except SparkforgeError as error:
        evidence.add_source("Docker engine", f"{error.what} ({error.why})", read=False)
        if evidence.server:
            evidence.errors.append(("docker info", error))


def essential(inspected: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `docker inspect`'s answer that is needed to understand a container."""
    config, host = inspected.get("Config") or {}, inspected.get("HostConfig") or {}
    state = inspected.get("State") or {}
    health = state.get("Health") or {}
    variables = [str(variable) for variable in config.get("Env") or []]
    return {
        **{name: inspected[name] for name in INSPECT_FIELDS if name in inspected},
        "State": {name: value for name, value in state.items() if name not in {"Pid", "Health"}},
        "Health": {"Status": health.get("Status"), "Log": (health.get("Log") or [])[-3:]},
        "Config": {
            **{name: config.get(name) for name in KEPT_CONFIG},
            "Env": [v if v.startswith(KEPT_VARIABLES) else f"{v.partition('=')[0]}=…" for v in variables],
        },
        "HostConfig": {name: host[name] for name in KEPT_HOST if name in host},
        "Mounts": [{name: mount.get(name) for name in KEPT_MOUNT} for mount in inspected.get("Mounts") or []],
    }


def _add_container(client: docker.DockerClient, evidence: Evidence) -> None:
    recorded = evidence.server.container if evidence.server else ""
    container = recorded or engine.service_container(client, compose.project(), compose.SERVICE)
    state = engine.state(client, container) if container else None
    if container is None or state is None:
        note = f"{container[:12]} is gone" if container else f"the Compose project {compose.project()} has none"
        evidence.add_source("container", note, read=False)
        return
    inspected = client.api.inspect_container(container)
    short_id = container[:12]
    name, source = f"container {short_id}", f"docker inspect {short_id}"
    ended = float("inf") if state.runs or state.status == "restarting" else _ended(inspected)
    embedded = [log for log in evidence.logs if log.kind == EMBEDDED]
    if (evidence.failure and ended < evidence.failure.began) or any(log.written > ended for log in embedded):
        evidence.add_source(name, f"left out: {state.status}, older than the last ./inv up", read=False)
        return
    for log in embedded:
        evidence.logs.remove(log)
        evidence.sources = [source for source in evidence.sources if source.name != log.name]
        evidence.add_source(log.name, f"left out: {ago(log.written)}, older than the container", read=False)
    evidence.add_fact("container.status", state.status, source)
    evidence.add_fact("container.exit_code", state.exit_code, source)
    evidence.add_fact("container.restarts", state.restarts, source)
    evidence.add_fact("container.oom_killed", state.out_of_memory, source)
    evidence.add_fact("container.health", state.health, f"{source}, whose health check says: {state.health_output}")
    evidence.add_source(name, f"{state.status}, {state.health or 'no health yet'}, exit code {state.exit_code}")
    evidence.inspected = essential(inspected)
    evidence.logs.append(Log(f"docker logs {short_id}", lambda: _read_log(container)))
    _add_report(client, container, inspected, evidence)


def _ended(inspected: dict[str, Any]) -> float:
    """Return the Unix time at which the container's program ended; infinity if the engine does not report one."""
    try:
        return datetime.fromisoformat(str(inspected["State"]["FinishedAt"])).timestamp()
    except (KeyError, ValueError, OverflowError):
        return float("inf")


def _read_log(container: str) -> Iterator[bytes]:
    """Yield the log in pieces of at least FRAME bytes, except the last; the API yields a piece for every write."""
    buffer = bytearray()
    with engine.connected() as client:
        for frame in client.api.logs(container, stream=True, follow=False, tail=LINES):
            buffer += frame
            if len(buffer) >= FRAME:
                yield bytes(buffer)
                buffer.clear()
    yield bytes(buffer)


def _add_report(client: docker.DockerClient, container: str, inspected: dict[str, Any], evidence: Evidence) -> None:
    """Add the container's validation report, or the report in the state folder of a refused container."""
    environment = (inspected.get("Config") or {}).get("Env") or []
    variables = dict(str(variable).partition("=")[::2] for variable in environment)
    report_path = PurePosixPath(variables.get("SPARKFORGE_RUN") or RUN) / REPORT
    candidates = [(report_path, "")]
    if state := variables.get("SPARKFORGE_STATE"):
        candidates.append((PurePosixPath(state) / REFUSED, "document"))
    for path, key in candidates:
        name = f"{container[:12]}:{path}"
        try:
            report = _read_object(client, container, path, key)
        except docker.errors.NotFound:
            evidence.add_source(name, "not there", read=False)
        except (docker.errors.APIError, tarfile.TarError, ValueError, KeyError, IndexError) as error:
            evidence.add_source(name, f"cannot be read: {error}", read=False)
        else:
            evidence.reports[name] = report
            evidence.add_source(name, f"verdict {report.get('verdict')}")
            return


def _read_object(client: docker.DockerClient, container: str, path: PurePosixPath, key: str) -> dict[str, Any]:
    """Return a JSON object from a file in a container, running or not; with `key` the object under that key."""
    stream, _ = client.api.get_archive(container, str(path))
    data = b""
    for chunk in stream:
        data += chunk
        if len(data) > MAX_JSON:
            raise ValueError(f"it has over {size(MAX_JSON)}")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile(archive.getmembers()[0])
        document = parse_json(member.read() if member else b"", path.name, finite=False)
    value = document[key] if key and isinstance(document, dict) else document
    if not isinstance(value, dict):
        raise ValueError("it holds no object")  # noqa: TRY004 - every broken file is reported in one way
    return value
