"""Queries a node that may not have Sparkforge: the head runs `python3 - ARGUMENT < probe.py`, which prints JSON.

It runs with the node's Python, 3.9 or newer, as the user of the ssh login, and imports only the standard library. A
fact that cannot be read is null, and `errors` has the reason.

The argument is a JSON object with a `mode`:
  facts   all facts, including which of `ports` are in use on this node; `model` is a folder whose files are hashed,
          `image` is a Docker image's name
  listen  answer on `address` and `ports` for `duration` seconds, over TCP and UDP
  reach   connect from `source` to `address` and each of `ports`, send small UDP packets there and back, and one of
          `mtu` bytes unfragmented
"""

from __future__ import annotations

import hashlib
import json
import platform
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

HEADERS = 28  # bytes of an IPv4 and a UDP header
EDGE = 1 << 20  # bytes at both ends of a file that its fingerprint reads
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: do not fragment, at any path MTU
COMPARED = (".safetensors", ".json")  # suffixes of the files that must be the same on all nodes
CONNECT_SECONDS = 3.0
ECHOES, ECHO_BYTES = 50, 16  # small packets there and back
FAREWELLS = 5  # packets of one byte that end the listener if the large packet was lost
ECHO_SECONDS = 2.0  # for all small packets, and the same time again for late answers
PROGRAM_SECONDS = 20


def facts(options: dict[str, Any], root: Path = Path("/")) -> dict[str, Any]:
    """Return all facts."""
    errors: dict[str, str] = {}

    def ask(name: str, read: Callable[[], Any]) -> Any:
        """Return the result of `read`; if it fails, return None and note the reason in `errors`."""
        try:
            return read()
        except (OSError, ValueError, LookupError, RecursionError, subprocess.SubprocessError) as error:
            errors[name] = " ".join(str(error).split())[:300] or type(error).__name__
            return None

    answers = {
        "hostname": socket.gethostname(),
        "machine": platform.machine(),
        "interfaces": ask("interfaces", lambda: interfaces(root)),
        "rdma": ask("rdma", lambda: rdma(root)),
        "infiniband": ask("infiniband", lambda: sorted(path.name for path in (root / "dev/infiniband").iterdir())),
        "memory": ask("memory", lambda: memory(root)),
        "driver": ask("driver", driver),
        "ports_taken": ask("ports_taken", lambda: [port for port in options.get("ports", ()) if is_taken(port)]),
    }
    if image := options.get("image"):
        answers["image"] = ask("image", lambda: program("docker", "image", "inspect", "--format", "{{.Id}}", image))
    if model := options.get("model"):
        answers["model"] = ask("model", lambda: fingerprint(Path(model)))
    return {**answers, "errors": errors}


def program(*argv: str) -> str:
    """Return the output of a program. Raises OSError or SubprocessError."""
    result = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=PROGRAM_SECONDS)
    return result.stdout.strip()


def interfaces(root: Path) -> list[dict[str, Any]]:
    """Return every interface but loopback: its IPv4 networks, state, MTU, and PCI function, if any."""
    networks = {
        entry["ifname"]: [f"{a['local']}/{a['prefixlen']}" for a in entry["addr_info"] if a.get("family") == "inet"]
        for entry in json.loads(program("ip", "-j", "addr"))
    }
    folders = sorted(path for path in (root / "sys/class/net").iterdir() if path.name != "lo" and path.is_dir())
    return [
        {
            "name": folder.name,
            "addresses": networks.get(folder.name, []),
            "mtu": int(content(folder / "mtu") or 0),
            "up": content(folder / "operstate") in ("up", "unknown"),
            "carrier": content(folder / "carrier") == "1",
            "bridge": (folder / "bridge").exists(),
            "wireless": (folder / "wireless").exists() or (folder / "phy80211").exists(),
            "pci": (folder / "device").resolve().name if (folder / "device").exists() else "",
            "driver": (folder / "device/driver").resolve().name if (folder / "device/driver").exists() else "",
        }
        for folder in folders
    ]


def rdma(root: Path) -> list[dict[str, Any]]:
    """Return every RDMA device with the state of its first port and the interface that it belongs to."""
    folder = root / "sys/class/infiniband"
    return [
        {
            "name": device.name,
            "interface": next((net.name for net in sorted((device / "device/net").iterdir())), ""),
            "state": content(device / "ports/1/state").partition(":")[2].strip(),
        }
        for device in (sorted(folder.iterdir()) if folder.is_dir() else ())
    ]


def content(file: Path) -> str:
    """Return a small file's text; empty if it cannot be read, such as the carrier of an interface that is down."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def memory(root: Path) -> dict[str, int]:
    """Return MemTotal, MemFree and MemAvailable in bytes."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
    return {name: int(sizes[name]) * 1024 for name in ("MemTotal", "MemFree", "MemAvailable")}


def driver() -> str:
    """Return the version of the first GPU's driver."""
    return program("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0].strip()


def is_taken(port: int) -> bool:
    """Return whether another program listens on a TCP port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def fingerprint(folder: Path) -> str:
    """Return a hash of the names, sizes and both ends of a model's files, to avoid reading all 65 GB.

    Raises ValueError for a folder without such files.
    """
    digest = hashlib.sha256()
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in COMPARED)
    if not files:
        raise ValueError(f"{folder} holds no safetensors and no json")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(EDGE))
            opened.seek(max(0, size - EDGE))
            digest.update(opened.read(EDGE))
    return digest.hexdigest()


def listen(options: dict[str, Any]) -> dict[str, Any]:
    """Answer connections and packets for at most `duration` seconds, or until a packet does not have ECHO_BYTES."""
    opened: list[socket.socket] = []
    for port in options["ports"]:
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):  # UDP first: once connected, a peer sends packets
            server = socket.socket(socket.AF_INET, kind)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((options["address"], port))
            except OSError:  # another program listens on the port, and answers
                continue
            if kind == socket.SOCK_STREAM:
                server.listen()
            opened.append(server)
    end = time.monotonic() + options["duration"]
    while opened and (left := end - time.monotonic()) > 0:
        for server in select.select(opened, [], [], left)[0]:
            if server.type == socket.SOCK_STREAM:
                server.accept()[0].close()
            else:
                packet, sender = server.recvfrom(1 << 16)
                server.sendto(packet[:ECHO_BYTES], sender)
                if len(packet) != ECHO_BYTES:  # only the sender's last packet has another size
                    return {}
    return {}


def reach(options: dict[str, Any]) -> dict[str, Any]:
    """Return the blocked ports with reasons, the results of `echoes`, and the reason if a full packet does not pass."""
    deadline = time.monotonic() + 2 * CONNECT_SECONDS
    blocked = {}
    for port in options["ports"]:
        if why := connect(options["source"], options["address"], port, deadline):
            blocked[str(port)] = why
    small, packet = echoes(options), ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.bind((options["source"], 0))
            sender.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
            sender.settimeout(CONNECT_SECONDS)
            sender.connect((options["address"], options["ports"][0]))
            sender.send(b"x" * (options["mtu"] - HEADERS))
            sender.recv(64)
        except OSError as error:
            for _ in range(FAREWELLS):
                with suppress(OSError):
                    sender.send(b"x")
            packet = str(error.strerror or error)
    return {"blocked": blocked, **small, "packet": packet}


def connect(source: str, address: str, port: int, deadline: float) -> str:
    """Return the reason if a TCP connection fails, else "". A refused connection is retried until the deadline."""
    while True:
        try:
            socket.create_connection((address, port), CONNECT_SECONDS, (source, 0)).close()
        except ConnectionRefusedError as error:  # the other side may not listen yet
            if time.monotonic() > deadline:
                return str(error.strerror)
            time.sleep(0.1)
        except OSError as error:
            return str(error.strerror or error)
        else:
            return ""


def echoes(options: dict[str, Any]) -> dict[str, Any]:
    """Return the number of small packets `sent` and `lost`, and the seconds of the `fastest` round trip (or None)."""
    sent: dict[int, float] = {}
    seconds: dict[int, float] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:

        def receive(end: float) -> None:
            """Wait for the answers to all packets that were sent."""
            while len(seconds) < len(sent) and (left := end - time.monotonic()) > 0:
                sender.settimeout(left)
                with suppress(TimeoutError, socket.timeout):  # before Python 3.10 they differ
                    number = int.from_bytes(sender.recv(64), "big")
                    seconds.setdefault(number, time.monotonic() - sent[number])

        try:
            sender.bind((options["source"], 0))
            sender.connect((options["address"], options["ports"][0]))
            for number in range(ECHOES):  # one at a time, because a burst would measure the machine's scheduling
                sent[number] = time.monotonic()
                sender.send(number.to_bytes(ECHO_BYTES, "big"))
                receive(time.monotonic() + ECHO_SECONDS / ECHOES)
            receive(time.monotonic() + ECHO_SECONDS)
        except (OSError, KeyError):  # no connection, or a packet that is not ours
            pass
    return {"sent": ECHOES, "lost": ECHOES - len(seconds), "fastest": min(seconds.values(), default=None)}


MODES = {"facts": facts, "listen": listen, "reach": reach}


def main(argument: str) -> None:
    """Print the answer to one argument as JSON; an OSError is printed as an answer with the key `error`."""
    options = json.loads(argument)
    try:
        answer = MODES[options["mode"]](options)
    except OSError as error:
        answer = {"error": " ".join(str(error).split())}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
