"""`python -m sparkforge.serve.fleet.keeper`: runs HAProxy, starts and stops a fleet's models, answers other requests.

This process is the server in the record: `supervise.py` is its parent, and the processes that it started end with it.
It runs in the state folder, starts each model with `./inv up` in a state folder of its own, and ends the model with
`./inv down`. It runs one start or stop at a time, so that two starts cannot use the same free memory.
"""

import difflib
import json
import os
import re
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil

from sparkforge.core import interrupt, paths
from sparkforge.core.console import Steps
from sparkforge.core.errors import ServerError, SparkforgeError, on
from sparkforge.core.files import write_json
from sparkforge.core.memory import GIB
from sparkforge.core.openai import POLL_SECONDS, Endpoint
from sparkforge.core.process import Child
from sparkforge.image import compose
from sparkforge.image.devices import FLEET
from sparkforge.plan import thresholds
from sparkforge.serve import access, launch, record, settings, status
from sparkforge.serve.fleet import config, router
from sparkforge.serve.fleet.config import GB, Fleet, Member
from sparkforge.serve.fleet.router import FOLDER
from sparkforge.serve.launch import Launch
from sparkforge.serve.record import LOOPBACK, Server, StartPlan
from sparkforge.serve.status import FLEET_FILE

PLAN = f"{FOLDER}/plan.json"
NAMES = "SPARKFORGE_SERVED_NAMES"  # read by `./inv up`: further names of the model, comma-separated
LOOK_SECONDS = 1.0
DRAIN_SECONDS = 600.0  # for the running answers of a model that is stopped for another
RETRY_SECONDS = 30.0  # after a failed start; until then requests get the error of that start
END_SECONDS = 90.0  # for all models to end: a container has 60 s
STOPPED, STARTING, READY, DRAINING, FAILED = "stopped", "starting", "ready", "draining", "failed"


@dataclass
class Running:
    """A model with its state, the times of the last change and the last request, and its error; times are monotonic."""

    member: Member
    state: str = STOPPED
    since: float = 0.0
    used: float = 0.0
    requests: int = 0
    context: int = 0
    error: str = ""
    server: Server | None = None

    @property
    def folder(self) -> Path:
        """Its state folder."""
        return paths.state() / FOLDER / "models" / self.member.name

    def run(self, *arguments: str, environment: dict[str, str]) -> Child:
        """Start an `./inv` command for this model."""
        env = {
            "SPARKFORGE_STATE": str(self.folder), paths.SHARED: str(paths.state()),
            "COMPOSE_PROJECT_NAME": re.sub(r"[^\w-]", "-", f"{compose.project()}-{self.member.name}".lower()),
            **environment,
        }  # fmt: skip
        command = [sys.executable, "-m", "sparkforge.cli", *arguments]
        return Child(command, log=self.folder / f"{arguments[0]}.log", env=env, cwd=paths.ROOT)


class Keeper:
    """Decides which models run. `wake` and `look` may be called by any thread."""

    def __init__(self, fleet: Fleet, key: str) -> None:
        self.fleet, self.key = fleet, key
        self.models = {member.name: Running(member) for member in fleet.members}
        self.moving = threading.Lock()  # held while a model is started or stopped
        self.ending = False

    def wake(self, name: str) -> str:
        """Start a model unless it serves; return the reason if it still does not serve, else an empty string."""
        with self.moving:
            model = self.models[name]
            if self.ending:
                return "the fleet is ending"
            if model.state == READY and model.server:  # started by another request, or HAProxy was restarted meanwhile
                router.admit(name, model.server.port)
                return ""
            if model.state == FAILED and time.monotonic() - model.since < RETRY_SECONDS:
                return model.error
            try:
                model.error = self._make_room(model) or self._start(model)
            except OSError as error:  # HAProxy was killed, the disk is full
                model.error = f"{name} cannot be started now: {error}"
            return model.error

    def look(self) -> None:
        """Record which models are in use or have ended, and stop the models that were idle for too long."""
        counts = router.requests()
        for name, model in self.models.items():
            if model.state != READY or not model.server:
                continue
            now = time.monotonic()
            model.requests, last = counts.get(name, (0, -1.0))
            model.used = now if model.requests else max(model.used, now - last if last >= 0 else 0.0)
            if not model.server.alive:
                router.switch(name, "maint")
                self._fail(model, f"the server {record.how_it_ended(model.server, model.folder)}")
            elif (
                not model.member.resident
                and model.member.idle_seconds
                and now - model.used > model.member.idle_seconds
                and self.moving.acquire(blocking=False)
            ):
                try:
                    self._drain(model, 0)
                finally:
                    self.moving.release()
        self.tell()

    def keep_residents(self) -> None:
        """Start resident models that do not run; never returns."""
        while not self.ending:
            for name, model in self.models.items():
                if model.member.resident and model.state in (STOPPED, FAILED):
                    self.wake(name)
            time.sleep(LOOK_SECONDS)

    def end(self) -> None:
        """Stop every model at the same time, and a start that is under way."""
        self.ending = True
        with self.moving:
            downs = [model.run("down", environment={}) for model in self.models.values() if model.folder.exists()]
            deadline = time.monotonic() + END_SECONDS
            while (downs := [down for down in downs if down.poll() is None]) and time.monotonic() < deadline:
                time.sleep(0.05)

    def tell(self) -> None:
        """Write the state of every model to a file, for `./inv status`."""
        rows = [
            {
                "name": name, "names": list(model.member.names), "folder": model.member.folder,
                "state": model.state, "error": model.error,
                "resident": model.member.resident, "needed": model.member.needed, "requests": model.requests,
                "where": model.server.where if model.server and model.state == READY else "",
                "idle_seconds": round(time.monotonic() - model.used, 1) if model.state == READY else None,
            }
            for name, model in self.models.items()
        ]  # fmt: skip
        with suppress(OSError, SparkforgeError):  # a full disk ends no model
            write_json(paths.state() / FLEET_FILE, {"models": rows})

    def _make_room(self, model: Running) -> str:
        """Stop the least recently used models until `model` fits; return the reason if it cannot fit, else ""."""
        pool, needed = model.member.pool, model.member.needed
        while True:
            live = [m for m in self.models.values() if m.member.pool == pool and m.state == READY]
            if needed <= self.fleet.free[pool] - sum(m.member.needed for m in live):
                return ""
            others = sorted((m for m in live if not m.member.resident), key=lambda m: m.used)
            if not others:
                return f"{model.member.name} needs {needed / 1e9:.1f} GB, and the resident models leave less"
            if not self._drain(others[0], DRAIN_SECONDS):
                busy = f"{others[0].member.name} still answers {others[0].requests} requests"
                return f"{busy}, and must end before {model.member.name} has memory; ask again later"

    def _drain(self, model: Running, seconds: float) -> bool:
        """Stop a model after its last answer, while new requests wait; return False if answers run after `seconds`."""
        name, deadline = model.member.name, time.monotonic() + seconds
        router.switch(name, "drain")
        while (count := router.requests()[name][0]) and time.monotonic() < deadline and not self.ending:
            model.requests = count
            self._set(model, DRAINING)
            time.sleep(0.05)
        if count:
            router.switch(name, "ready")
            self._set(model, READY)
            return False
        router.switch(name, "maint")
        self._set(model, STOPPED)
        down = model.run("down", environment={})
        while down.poll() is None:
            time.sleep(0.05)
        return True

    def _start(self, model: Running) -> str:
        self._set(model, STARTING)
        member = model.member
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = probe.getsockname()[1]
        hosts = ",".join(router.allowed_hosts(self.fleet))
        up = ["up", *member.arguments, "--port", str(port), "--allow-hosts", hosts]
        up += ["--api-key-file", self.fleet.key_file] if self.fleet.key_file else []
        # The tiny model runs before the first start only.
        up += [] if not any(other.used for other in self.models.values()) else ["--no-tiny-first"]
        # The guards' bounds differ, so that resident models end last if memory runs out.
        limits = thresholds.configured({thresholds.VARIABLE: self.fleet.guard})
        order = sorted(self.fleet.members, key=lambda other: not other.resident)[::-1]
        share = 1 - order.index(member) / (2 * len(order))
        bound = share * limits.end_below(psutil.virtual_memory().total) / GIB if limits else 0.0
        environment = {
            NAMES: ",".join(member.names), "MODEL": "", "PORT": "", access.KEY_FILE: "",
            thresholds.VARIABLE: f"{bound:.3f}", access.PROXIES: "*",  # on loopback, behind HAProxy
        }  # fmt: skip
        start = model.run(*up, "--", *member.flags, environment=environment)
        while (usage := start.poll()) is None:
            if self.ending:
                start.end()
                return "the fleet is ending"
            time.sleep(0.05)
        model.server = record.read(model.folder / record.NAME)
        if usage.code or not model.server:
            log = (model.folder / "up.log").read_text(encoding="utf-8", errors="replace")
            return self._fail(model, log[max(0, log.rfind("✗ ")) :].removeprefix("✗ ").strip()[:2000])
        with suppress(SparkforgeError):
            model.context = self.endpoint(model.server).served().max_model_len
        model.used = time.monotonic()
        self._set(model, READY)
        router.admit(member.name, port)
        return ""

    def _fail(self, model: Running, why: str) -> str:
        self._set(model, FAILED, f"{model.member.name} does not serve: {why or 'its start printed nothing'}")
        return model.error

    def _set(self, model: Running, state: str, error: str = "") -> None:
        model.state, model.since, model.error = state, time.monotonic(), error
        self.tell()

    def endpoint(self, server: Server) -> Endpoint:
        """Return the API endpoint of a model's server."""
        return Endpoint(server.url, server.model_id, key=self.key)


class Answers(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers HAProxy over a socket: `/wake/NAME`, and requests that no model can answer."""

    daemon_threads, request_queue_size = True, 512

    def __init__(self, keeper: Keeper) -> None:
        Path(router.KEEPER).unlink(missing_ok=True)
        super().__init__(router.KEEPER, Answer)
        self.keeper = keeper


class Answer(BaseHTTPRequestHandler):
    """One request."""

    server: Answers

    def do_GET(self) -> None:
        """Answer `/wake/NAME`, /v1/models, /metrics and /health."""
        keeper, path = self.server.keeper, self.path.partition("?")[0]
        listed = {
            name: {"id": name, "object": "model", "owned_by": "sparkforge", "max_model_len": model.context or None}
            for model in keeper.models.values()
            for name in model.member.names
        }
        if path.startswith("/wake/"):
            why = keeper.wake(path.removeprefix("/wake/"))
            self._reply(503 if why else 200, {"why": why})
        elif path == "/v1/models":
            self._reply(200, {"object": "list", "data": list(listed.values())})
        elif (name := path.removeprefix("/v1/models/")) in listed:
            self._reply(200, listed[name])
        elif path == "/health":
            self._reply(200, {name: model.state for name, model in keeper.models.items()})
        elif path == "/metrics":
            self._reply(200, _metrics(keeper))
        elif path.startswith("/v1/models/"):
            self._refuse(404, *_unknown(name, listed))
        else:
            self._refuse(404, f"no model answers GET {path[:200]}: only a request with `model` in its body has one")

    def do_POST(self) -> None:
        """Refuse a request that no model answers: the model is not named, not known, or did not start."""
        with suppress(ValueError, AttributeError, RecursionError):
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")
            name = body.get("model")
            models = self.server.keeper.models.values()
            known = {own: model for model in models for own in model.member.names}
            if not isinstance(name, str):
                self._refuse(400, "the body names no model", "model")
            elif name not in known:
                self._refuse(404, *_unknown(name, known))
            else:
                self._refuse(503, known[name].error or f"{name} has just ended; send the request again")
            return
        self._refuse(400, "the body is not a JSON object")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an unknown method in JSON."""
        self._refuse(code, message or explain or "")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Write no log, because HAProxy logs every request."""

    def _refuse(self, status: int, message: str, parameter: str | None = None) -> None:
        kind = {400: "invalid_request_error", 404: "not_found_error"}.get(status, "server_error")
        error = {"message": message, "type": kind, "param": parameter, "code": status}
        self._reply(status, {"type": "error", "error": error})  # OpenAI's form, and Anthropic's

    def _reply(self, status: int, value: dict[str, Any] | str) -> None:
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if isinstance(value, str) else "application/json")
        self.send_header("content-length", str(len(data)))
        with suppress(OSError):  # the client may have disconnected while a model started
            self.end_headers()
            self.wfile.write(data)


def _unknown(name: str, known: Iterable[str]) -> tuple[str, str]:
    names = list(known)
    nearest = difflib.get_close_matches(name, names, cutoff=0.4) or names[:3]
    return f"The model `{name[:200]}` does not exist; the nearest: {', '.join(nearest)}", "model"


def _metrics(keeper: Keeper) -> str:
    """Return every model's state, and vLLM's metrics of the running models; each has the label model_name."""
    states = [f'sparkforge_fleet_model{{model_name="{n}",state="{m.state}"}} 1' for n, m in keeper.models.items()]
    families = {"": (["# TYPE sparkforge_fleet_model gauge"], states)}
    for model in keeper.models.values():
        text = ""
        with suppress(SparkforgeError):
            text = keeper.endpoint(model.server).get("/metrics").text if model.server and model.state == READY else ""
        family = ""
        for line in text.splitlines():
            family = line.split(" ")[2] if line.startswith("# ") else family
            if family.startswith("vllm:"):
                head, samples = families.setdefault(family, ([], []))
                if not line.startswith("# "):
                    samples.append(line)
                elif line not in head:
                    head.append(line)
    return "".join(f"{line}\n" for head, samples in families.values() for line in (*head, *samples))


def main() -> int:
    """Run the fleet of PLAN until a signal ends it; return 0 then, or 1 if HAProxy could not listen."""
    fleet = Fleet.model_validate_json((paths.state() / PLAN).read_bytes())
    key = access.read_key(Path(fleet.key_file)) if fleet.key_file else ""
    keeper = Keeper(fleet, key)
    log = paths.state() / FOLDER / "haproxy.log"
    with interrupt.caught(), Answers(keeper) as answers:
        for target in (answers.serve_forever, keeper.keep_residents):
            threading.Thread(target=target, daemon=True).start()
        haproxy, listened = None, True
        try:
            while listened:  # start HAProxy again if it was killed, but not if it could not listen
                listened = False
                ports = {
                    n: m.server.port for n, m in keeper.models.items() if m.server and m.state in (READY, DRAINING)
                }
                haproxy = Child(router.write(paths.state(), fleet, key, ports), log=log, env={}, cwd=paths.state())
                while haproxy.poll() is None:
                    with suppress(OSError):  # it is about to listen, or has just been killed
                        keeper.look()
                        listened = True
                    time.sleep(LOOK_SECONDS)
                print(f"HAProxy has ended: {log.read_text(errors='replace')[-2000:]}", flush=True)
        except KeyboardInterrupt:
            keeper.ending = True
            if haproxy and haproxy.poll() is None:
                os.kill(haproxy.pid, signal.SIGUSR1)  # HAProxy refuses new connections and ends after the last answer
                while haproxy.poll() is None:
                    time.sleep(0.05)
            return 0
        finally:
            keeper.end()
            if haproxy:
                haproxy.end()
    return 1


def start(file: Path, plan: StartPlan) -> Server:
    """Start the fleet of a fleet.toml at `plan`'s address, and return it once its resident models serve.

    The fleet uses the plan's address, port, key, hosts and interpreter. Raises the errors of `config.make_plan` and
    `launch.starting`, and ServerError for a resident model that does not start; nothing is left running then.
    """
    access.refuse_inherited_key(os.environ)
    settings.judge(os.environ)
    steps, again = Steps(2), f"./inv up --fleet {file}"
    key_file = access.key_path(plan.key_file)
    key = access.read_key(key_file) if key_file else ""
    with launch.starting(), ExitStack() as stack:
        launch.check_free(plan.port, plan.address, again)
        with steps.step("plan", str(file)) as tell:
            more = ("--python", plan.python) if plan.python else ()
            free = config.free_memory()
            members = config.make_plan(config.read(file), file.parent, free, more)
            fleet = Fleet(
                address=plan.address, port=plan.port, key_file=str(key_file or ""), free=free, members=tuple(members),
                hosts=access.chosen_hosts(plan.hosts, os.environ),
                guard=os.environ.get(thresholds.VARIABLE, ""),
            )  # fmt: skip
            needs = [f"{m.name} {m.needed / GB:.1f} GB{' resident' if m.resident else ''}" for m in members]
            tell(f"{', '.join(needs)}; {', '.join(f'{size / GB:.1f} GB free ({pool})' for pool, size in free.items())}")
        paths.secure_state()
        write_json(paths.state() / PLAN, fleet.model_dump(mode="json"), mode=0o600)
        (paths.state() / status.FLEET_FILE).unlink(missing_ok=True)
        first = min(members, key=lambda member: not member.resident).name
        own = replace(plan, device=FLEET, model_id=first, key_file=fleet.key_file)
        # Each model has a memory guard of its own, which ends only that model (Keeper._start).
        environment = {access.KEY_FILE: fleet.key_file, thresholds.VARIABLE: "0"}
        command = (sys.executable, "-P", "-m", __name__)
        with steps.step("models") as tell:
            with interrupt.held():
                server = launch.begin(Launch(command, {**environment, "PYTHONPATH": str(paths.ROOT)}, own, file))
                stack.push(lambda kind, *_: launch.end(server) if kind else None)
            while not (rows := status.fleet()) or any(row["resident"] and row["state"] != READY for row in rows):
                for row in rows:
                    if row["resident"] and row["state"] == FAILED:
                        log = paths.state() / router.FOLDER / "models" / row["name"] / "up.log"
                        failure = f"the resident model {row['name']} does not start"
                        raise ServerError(failure, row["error"], on("less", log, f"then {again}"), code="server.start")
                if not server.alive:
                    why = f"it {record.how_it_ended(server)}"
                    raise ServerError("the fleet has ended", why, on("less", server.log), code="server.start")
                tell(", ".join(f"{row['name']} {row['state']}" for row in rows))
                time.sleep(POLL_SECONDS)
            if not Endpoint(server.url, key=key).healthy():
                why, fix = "HAProxy does not answer /health", on("less", server.log)
                raise ServerError("the fleet does not answer", why, fix, code="server.start")
            tell(", ".join(f"{row['name']} {row['state']}" for row in rows))
        server = replace(server, proved=time.time())
        record.write(server)
        return server


if __name__ == "__main__":
    sys.exit(main())
