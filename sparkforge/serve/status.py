"""The data of `./inv status`: the server, its load from /metrics, the memory of host and GPU, the last error.

`status.schema.json`, which `lab.reference_pages` makes, describes what `--json` prints. A later version may add fields
to sparkforge-status/1; it removes and renames none.
"""

import os
import re
import shlex
import time
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import Field

from sparkforge.core import memory, openai, paths
from sparkforge.core.console import echo, echo_json, say, stream
from sparkforge.core.docker import program
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.files import read_json
from sparkforge.core.gpus import GpuState, number, query, states
from sparkforge.core.gpus import held as gpu_memory
from sparkforge.core.openai import Endpoint
from sparkforge.core.process import ProbeError, output, session_members
from sparkforge.core.tables import Record
from sparkforge.image.devices import FLEET
from sparkforge.serve import launch, logs, proof, record
from sparkforge.serve.record import Server

SECONDS = 2.0  # limit for each response of the server
FLEET_FILE = "fleet/status.json"  # below the state folder
INTERVAL = 1.0  # seconds between the two readings that tokens per second need
LOG_BYTES = 1 << 20  # the last error is looked for in this much of the log's end
GENERATED, PROMPT = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
RUNNING, WAITING, KV = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
# "(EngineCore pid=7) ERROR 11-21 03:40:13 [core.py:99] RuntimeError: …", as vLLM's logger writes it.
_ERROR = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:ERROR|CRITICAL) (\d\d-\d\d [\d:]+) \[[^\]]*\] ?(.*\S)", re.MULTILINE)


class Load(Record):
    """The current load of the server. Rates are tokens a second over `seconds`, all requests together."""

    running: int = Field(description="requests that are being answered")
    waiting: int = Field(description="requests that wait for their turn")
    kv_used: float = Field(description="used part of the KV cache, 0 to 1; with several engines the fullest one's")
    generated_per_second: float = Field(description="tokens of answers")
    prompt_per_second: float = Field(description="tokens of prompts")
    seconds: float = Field(description="time between the two readings of /metrics")
    tokens_per_draft: float | None = Field(
        default=None,
        description="tokens gained by each step with a draft, the model's own token included; null without drafts",
    )


class HostMemory(Record):
    """The host's memory in bytes; unified memory is also the GPU's."""

    total: int
    available: int = Field(description="memory that this user's programs can still get within their cgroups")
    bound: str = Field(description="what limits `available`: MemAvailable, or a cgroup's folder")
    server: int | None = Field(description="memory of the server's processes; null for a container of another machine")


class GpuStatus(Record):
    """A GPU by nvidia-smi; memory in bytes. `total` and `used` are null for unified memory, as on a DGX Spark."""

    name: str
    unified: bool
    total: int | None
    used: int | None
    busy: float | None = Field(description="part of the last second in which a kernel ran, 0 to 1")
    clock_mhz: float | None = Field(default=None, description="present clock of the SMs")
    max_clock_mhz: float | None = Field(default=None, description="highest clock of the SMs")
    power_watts: float | None = None
    power_limit_watts: float | None = Field(default=None, description="a DGX Spark reports none")
    temperature_celsius: float | None = None
    clock_reasons: list[str] = Field(default=[], description="the driver's reasons for a lowered clock")
    warning: str = Field(default="", description="why the clock is too low, and the next command; empty if it is not")


class LastError(Record):
    """The last error in the log of the running server; without one, that of the last `./inv up`."""

    source: Literal["log", "up"]
    when: str = Field(description="the log's time (MM-DD HH:MM:SS), or UTC by ISO 8601")
    text: str


class FleetStatus(Record):
    """One model of a fleet."""

    name: str
    names: list[str] = Field(description="names of the model in requests")
    folder: str = Field(default="", description="the model's checkpoint; empty for the tiny one that a start makes")
    state: Literal["stopped", "starting", "ready", "draining", "failed"]
    error: str = Field(description="why the model failed; empty if it did not")
    resident: bool
    needed: int = Field(description="bytes of memory planned for the model")
    memory: int | None = Field(
        default=None, description="host memory held by the model's processes in bytes; null if it does not run here"
    )
    gpu_memory: int | None = Field(
        default=None,
        description="GPU memory held by the model's processes in bytes, by nvidia-smi; part of `memory` if unified",
    )
    requests: int = Field(description="requests being answered")
    where: str = Field(description="pid or container; empty if it does not run")
    idle_seconds: float | None = Field(description="since its last request; null if it does not run")


class ServerStatus(Record):
    """The running server. `context` is the longest sequence in tokens, null if the server does not report it."""

    model: str
    url: str
    device: str
    profile: str = Field(description="serve profile")
    where: str = Field(description="pid or container")
    healthy: bool
    container_health: str = Field(description="result of the container's health check; empty without a container")
    key_required: bool
    key_accepted: bool
    uptime_seconds: float | None
    context: int | None
    load: Load | None = Field(description="null where /metrics does not answer")
    proved_at: str = Field(description="UTC by ISO 8601; empty while the start has not ended")
    proof: dict[str, str] = Field(description="first request → empty, or the known limit that the response showed")
    fleet: list[FleetStatus] = Field(default=[], description="the models of a fleet; empty for one model")


class StatusReport(Record):
    """The output of `./inv status --json`. `server` is null if none runs; the exit code is 24 then."""

    format: Literal["sparkforge-status/1"] = "sparkforge-status/1"
    time: str = Field(description="UTC by ISO 8601")
    server: ServerStatus | None
    host: HostMemory
    gpus: list[GpuStatus]
    last_error: LastError | None


def read_metrics(server: Server) -> dict[str, list[float]] | None:
    """Return the counters and gauges of /metrics; None without a usable response."""
    try:
        response = replace(server.endpoint, read_seconds=SECONDS).get("/metrics")
        counted = openai.metric_values(response.text, (GENERATED, PROMPT, RUNNING, WAITING, KV, DRAFTS, ACCEPTED))
    except (ServerError, *openai.WRONG_SHAPE):
        return None
    return counted if response.is_success and counted.get(GENERATED) else None


def report(server: Server) -> StatusReport:
    """Return the status of a running server; this takes a second, over which rates are measured."""
    before, began = read_metrics(server), time.monotonic()
    if before:
        time.sleep(INTERVAL)
    now, seconds = read_metrics(server), time.monotonic() - began
    pids, models = _pids(server), list[FleetStatus]()
    resident = memory.resident(pids)["pss"] if pids or not server.container else None
    held = gpu_memory() if server.device == FLEET else {}
    for row in fleet() if server.device == FLEET else []:
        model = record.read(paths.state() / record.MODELS / row["name"] / record.NAME) if row["where"] else None
        sizes = dict[str, int]()
        if model and (pids := _pids(model)):
            sizes = {"memory": memory.resident(pids)["pss"]}
            sizes |= {"gpu_memory": sum(held.get(p, 0) for p in pids)} if held else {}
        models.append(FleetStatus.model_validate({**row, **sizes}))
        resident = (resident or 0) + sizes.get("memory", 0)
    context: int | None = None
    with suppress(ServerError, UsageError):
        context = replace(server.endpoint, read_seconds=SECONDS).served().max_model_len or None
    container_health, log, up = _container(server) if server.container else ("", _end_of(server.log), server.started)
    served = ServerStatus(
        model=server.model_id,
        url=f"{server.url}/v1",
        device=server.device,
        profile=server.profile,
        where=server.where,
        healthy=Endpoint(server.url).healthy(),
        container_health=container_health,
        key_required=bool(server.key_file),
        key_accepted=not server.key_file or server.endpoint.accepts_key(),
        uptime_seconds=round(max(0.0, time.time() - up), 1) if up else None,
        context=context,
        load=_load(before, now, seconds) if before and now else None,
        proved_at=_iso(server.proved) if server.proved else "",
        proof=server.proof,
        fleet=models,
    )
    errors = _ERROR.findall(log)
    last = LastError(source="log", when=errors[-1][0], text=errors[-1][1]) if errors else None
    return _report(served, resident, last)


def fleet() -> list[dict[str, Any]]:
    """Return the state of each model, from the file that the fleet's process writes; empty without that file."""
    try:
        return list(read_json(paths.state() / FLEET_FILE)["models"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def report_of_none() -> StatusReport:
    """Return the status if no server runs."""
    failed = record.read_failure(paths.state())
    last = LastError(source="up", when=_iso(failed.ended), text=f"{failed.what}: {failed.why}") if failed else None
    return _report(None, None, last)


def _report(served: ServerStatus | None, resident: int | None, last: LastError | None) -> StatusReport:
    machine = memory.measure()
    total = psutil.virtual_memory().total
    host = HostMemory(total=total, available=machine.available, bound=machine.bound, server=resident)
    return StatusReport(time=_iso(time.time()), server=served, host=host, gpus=gpus(), last_error=last)


def gpus() -> list[GpuStatus]:
    """Return the GPUs that nvidia-smi lists; none if it fails or hangs. A DGX Spark is said to report no memory."""
    try:
        rows = query("name", "memory.total", "memory.used", "utilization.gpu", units=False)
    except ProbeError:
        return []
    clocks: list[dict[str, str]] = []
    with suppress(ProbeError):
        clocks = states()
    listed = []
    for row, clock in zip(rows, [*clocks, *({} for _ in rows)], strict=False):
        name, *figures = row.values()
        total, used, busy = map(number, figures)
        state = GpuState.read(clock)
        why, fix = state.fault()
        listed.append(
            GpuStatus(
                name=name,
                unified=total is None,
                total=None if total is None else int(total * 2**20),
                used=None if total is None or used is None else int(used * 2**20),
                busy=None if busy is None else busy / 100,
                clock_mhz=state.clock,
                max_clock_mhz=state.max_clock,
                power_watts=state.power,
                power_limit_watts=state.power_limit,
                temperature_celsius=state.temperature,
                clock_reasons=[reason.name for reason in state.active],
                warning=f"{why}. Next: {fix}" if why else "",
            )
        )
    return listed


def lines(report: StatusReport) -> list[str]:
    """Return a report as lines of text."""
    shown = []
    if served := report.server:
        health = "healthy" if served.healthy else "not healthy"
        if served.container_health:
            health += f", the container says {served.container_health}"
        if served.key_required:
            health += " · API key required"
        if not served.key_accepted:
            health += ", but the server refuses the key in the key's file: ./inv down && ./inv up"
        shown.append(f"{served.model} at {served.url} · {health} · {served.device} · {served.where}")
        uptime = served.uptime_seconds
        parts = [f"up {timedelta(seconds=int(uptime))}"] if uptime is not None else []
        parts += [f"profile {served.profile}"] if served.profile else []
        parts += [f"context {served.context} tokens"] if served.context else []
        shown += [" · ".join(parts)] if parts else []
        shown.append(f"now: {_describe_load(served.load)}")
        shown += map(_describe_member, served.fleet)
    shown.append(f"memory: {_memory(report)}")
    for gpu in report.gpus:
        figures = (gpu.clock_mhz, gpu.max_clock_mhz, gpu.power_watts, gpu.power_limit_watts, gpu.temperature_celsius)
        if described := GpuState(*figures, busy=None, reasons=0).describe():
            shown.append(f"{gpu.name}: {described}")
        shown += [f"warning: {gpu.name}: {gpu.warning}"] if gpu.warning else []
    if error := report.last_error:
        where = "in the log" if error.source == "log" else "of ./inv up"
        text, also, failed = error.text.partition(proof.FURTHER_FAILURES)  # the list of failed calls is not cut off
        shown.append(f"last error {where}, {error.when}: {text[:300]}{also}{failed}")
    elif report.server:
        shown.append("last error: none in the log")
    if (served := report.server) and not served.fleet:
        when = f" · at its start, {served.proved_at}"
        unproved = "proved nothing: its start has not ended"
        shown.append(f"{proof.describe(served.proof)}{when}" if served.proved_at else unproved)
    return shown


def _describe_member(row: FleetStatus) -> str:
    idle = f"idle {timedelta(seconds=int(row.idle_seconds))}" if row.idle_seconds is not None else ""
    words = [row.state, "resident" if row.resident else "on demand", f"{row.needed / 1e9:.1f} GB planned"]
    words += [f"{row.memory / 1e9:.1f} GB of the host"] if row.memory is not None else []
    words += [f"{row.gpu_memory / 1e9:.1f} GB of the GPU"] if row.gpu_memory is not None else []
    words += [f"{row.requests} requests" if row.requests else idle, row.where, row.error.partition("\n")[0]]
    return f"  {row.name}: {' · '.join(filter(None, words))}"


def _describe_load(load: Load | None) -> str:
    if load is None:
        return "/metrics does not answer"
    rates = f"{load.generated_per_second:.1f} tokens/s generated, {load.prompt_per_second:.1f} tokens/s of prompts"
    gained = "" if load.tokens_per_draft is None else f" · {load.tokens_per_draft:.2f} tokens a step with a draft"
    return f"{rates} · {load.running} running, {load.waiting} waiting · KV cache {load.kv_used:.1%} used{gained}"


def _memory(report: StatusReport) -> str:
    host = report.host
    parts = [f"server {host.server / 1e9:.1f} GB"] if host.server is not None else []
    limit = "" if host.bound == "MemAvailable" else f" (limit of {host.bound})"
    parts.append(f"{host.available / 1e9:.1f} of {host.total / 1e9:.1f} GB available{limit}")
    for gpu in report.gpus:
        busy = f", busy {gpu.busy:.0%}" if gpu.busy is not None else ""
        if gpu.unified:
            parts.append(f"{gpu.name} shares it (unified memory){busy}")
        elif gpu.total is not None and gpu.used is not None:
            parts.append(f"{gpu.name} {gpu.used / 1e9:.1f} of {gpu.total / 1e9:.1f} GB used{busy}")
    return " · ".join(parts)


def _load(before: dict[str, list[float]], now: dict[str, list[float]], seconds: float) -> Load:
    def increase(name: str) -> float:  # a counter falls to 0 when the server starts again
        return max(0.0, sum(now.get(name, [])) - sum(before.get(name, [])))

    return Load(
        running=int(sum(now.get(RUNNING, []))),
        waiting=int(sum(now.get(WAITING, []))),
        kv_used=max(0.0, *now.get(KV, [0.0])),
        generated_per_second=round(increase(GENERATED) / seconds, 3),
        prompt_per_second=round(increase(PROMPT) / seconds, 3),
        seconds=round(seconds, 3),
        tokens_per_draft=round(1 + increase(ACCEPTED) / drafts, 3) if (drafts := increase(DRAFTS)) else None,
    )


def _container(server: Server) -> tuple[str, str, float]:
    """Return a container's health, the end of its log, and the time of its start, 0 if that is unknown."""
    from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load
    from sparkforge.serve.devices import container  # noqa: PLC0415 - the same

    began = 0.0
    with engine.connected() as docker:
        with suppress(ValueError):
            if state := engine.state(docker, server.container):
                began = datetime.fromisoformat(state.started).timestamp()
        return container.health(docker, server), container.log_text(docker, server), began


def _pids(server: Server) -> list[int]:
    if not server.container:
        return session_members(server.pid)
    pids = []
    for pid in psutil.pids():
        with suppress(OSError):  # it may end while we look
            pids += [pid] if server.container in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8") else []
    return pids


def _end_of(log: str) -> str:
    try:
        with Path(log).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            return file.read(LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


READY = """model: {model_id}   log: ./inv logs -f   stop: ./inv down

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
{key}  -d '{{"model": "{model_id}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'"""


def show_ready(server: Server) -> None:
    """Print the model's URL and an example request."""
    echo(f"{server.url}/v1")
    key = f'  -H "Authorization: Bearer $(cat {shlex.quote(server.key_file)})" \\\n' if server.key_file else ""
    say(READY.format(url=server.url, model_id=server.model_id, key=key))


def stay(server: Server) -> None:
    """Show the log until the server ends; Ctrl-C stops it. Raises ServerError if it ended by itself."""
    log = Path(server.log)
    try:
        if server.container:
            _stay_with_container(server)
        else:
            stream(logs.follow(log, lambda: server.alive, from_end=True))
    except KeyboardInterrupt:
        say(f"stopping {server.url}")
        launch.stop()
        return
    end = record.ended(server)
    was_asked = record.read() != server or (end is not None and end.asked)  # `./inv down` elsewhere forgets the record
    if not server.container and not was_asked:
        record.forget()
        raise logs.failure("the server ended by itself", logs.read(log), server.log_command)


def _stay_with_container(server: Server) -> None:
    """Show a container's log until it has ended for good: Docker may start it again. Raises ServerError."""
    from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

    while True:
        _container_log(server, follow=True)
        with engine.connected() as docker_client:
            state = engine.state(docker_client, server.container)
        ended = state is None or state.status in {"exited", "dead"}
        if state is None or (ended and state.exit_code in record.CLEAN_EXITS):
            return
        if ended:
            why = "the kernel killed it: its memory limit" if state.out_of_memory else "its log is above"
            fix = f"./inv doctor   # the whole log: docker logs {server.container[:12]}"
            raise ServerError(f"the container ended with code {state.exit_code}", why, fix, code="server.start")
        time.sleep(1)


def show_status(server: Server, *, as_json: bool = False) -> None:
    """Print the running server's state, its health in the first line. Exit code 0: a process or container runs."""
    measured = report(server)
    if as_json:
        echo_json(measured.model_dump(mode="json"))
    else:
        echo("\n".join(lines(measured)))


def show_log(*, follow: bool) -> None:
    """Print the last started server's log; with `follow` go on as it grows. Raises ServerError without a log."""
    server, log = record.read(), record.log_path()
    if server and server.container:
        _container_log(server, follow=follow)
    elif log.exists():
        stream(logs.follow(log, lambda: follow and server is not None and server.alive))
    else:
        raise ServerError(
            "there is no log", "this checkout started no server yet", "./inv up", code="server.not-running"
        )


def _container_log(server: Server, *, follow: bool) -> None:
    """Print a container's log; the SDK would give up on a log that is silent for a while."""
    command = [program(), "logs", *(["--follow"] if follow else []), server.container]
    with closing(output(command, cwd=paths.ROOT)) as pieces:
        stream(pieces)
