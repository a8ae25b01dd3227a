"""Facts of all nodes: asked at the same time over ssh by probe.py, or read from recorded sheets."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from sparkforge.core.documents import read_json
from sparkforge.core.errors import InputError, SparkforgeError
from sparkforge.core.tables import Record
from sparkforge.serve.cluster import probe, remote
from sparkforge.serve.cluster.config import ClusterNode

FACTS_SECONDS = 60.0
LISTEN_SECONDS = 30.0
CONNECTX = "mlx5_core"  # the driver of ConnectX-4 and later


class NetworkInterface(Record):
    """A network interface of a node; `speed` in Mb/s, -1 if not known; `pci` is domain:bus:device.function."""

    name: str
    addresses: tuple[str, ...] = ()
    mac: str = ""
    mtu: int
    up: bool
    carrier: bool
    speed: int = -1
    wireless: bool = False
    bridge: bool = False
    pci: str = ""
    driver: str = ""

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network, ...]:
        """Its IPv4 subnets."""
        return tuple(ipaddress.IPv4Interface(address).network for address in self.addresses)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Its IPv4 addresses without the subnets."""
        return tuple(address.partition("/")[0] for address in self.addresses)

    @property
    def port(self) -> str:
        """Which physical port it belongs to: halves of one differ in the PCI domain only; empty for no ConnectX."""
        return self.pci.rpartition(".")[2] if self.driver == CONNECTX else ""


class RdmaDevice(Record):
    """An RDMA device, the interface that it belongs to, and its state, such as ACTIVE or DOWN."""

    name: str
    interface: str
    state: str
    rate: str = ""


class NodeFacts(Record):
    """What a node says about itself. None: not known, and `errors` has the reason by the fact's name."""

    hostname: str
    machine: str = ""
    kernel: str = ""
    user: str | None = None
    time: float
    clock_offset: float | None = None  # seconds that its clock is ahead of ours
    clock_error: float = 0.0  # half of the seconds that the question took
    clock_synchronised: bool | None = None
    interfaces: tuple[NetworkInterface, ...] | None = None
    rdma: tuple[RdmaDevice, ...] | None = None
    infiniband: tuple[str, ...] | None = None
    memlock: int | None = None  # bytes, -1: no limit
    memory: Mapping[str, int] | None = None
    remove_ipc: bool | None = None
    gpu: str | None = None
    driver: str | None = None
    ports_taken: tuple[int, ...] | None = None
    image: str | None = None
    model: str | None = None
    errors: Mapping[str, str] = Field(default_factory=dict)

    def interface(self, name: str) -> NetworkInterface | None:
        """Return an interface by its name."""
        return next((entry for entry in self.interfaces or () if entry.name == name), None)

    def device(self, name: str) -> RdmaDevice | None:
        """Return an RDMA device by its name."""
        return next((entry for entry in self.rdma or () if entry.name == name), None)


class Reach(Record):
    """What comes from one node to another: blocked ports with reasons, and why a packet of the whole MTU does not.

    Of `sent` small packets `lost` did not come back; the `fastest` took so many seconds.
    """

    blocked: Mapping[str, str] = Field(default_factory=dict)
    packet: str = ""
    sent: int = 0
    lost: int = 0
    fastest: float | None = None


def ask(node: ClusterNode, options: Mapping[str, Any]) -> NodeFacts:
    """Return a node's facts, and how far its clock is from ours. Raises what `remote.program` raises, InputError."""
    begun = time.time()
    answer = remote.program(node, source(), {"mode": "facts", **options}, seconds=FACTS_SECONDS)
    ended = time.time()
    facts = parse(answer, node.name)
    # The node reads its clock somewhere between; Python's start and the facts before it take most of the time.
    return facts.model_copy(
        update={"clock_offset": facts.time - (begun + ended) / 2, "clock_error": (ended - begun) / 2}
    )


def reach(
    sender: ClusterNode, receiver: ClusterNode, ports: Sequence[int], mtu: int, addresses: tuple[str, str] | None = None
) -> Reach:
    """Try ports and a packet of `mtu` bytes from one node to another, by programs of ours at both ends.

    `addresses` are the sender's and the receiver's, by default those of the control network. Raises what
    `remote.program` raises.
    """
    own, other = addresses or (sender.address, receiver.address)
    listening = {"mode": "listen", "address": other, "ports": list(ports), "seconds": LISTEN_SECONDS / 2}
    asking = {"mode": "reach", "source": own, "address": other, "ports": list(ports), "mtu": mtu}
    questions = {receiver.name: listening, sender.name: asking}

    def put(node: ClusterNode) -> Any:
        """Run this node's side."""
        return remote.program(node, source(), questions[node.name], seconds=2 * LISTEN_SECONDS)

    answer = remote.on_all([receiver, sender], put)[sender.name]
    if isinstance(answer, SparkforgeError):
        raise answer
    return Reach.model_validate(answer)


def source() -> str:
    """Return the probe's source text."""
    return Path(probe.__file__).read_text(encoding="utf-8")


def parse(answer: Any, origin: str) -> NodeFacts:
    """Return an answer as facts. Raises InputError for one of another shape."""
    try:
        return NodeFacts.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
        raise InputError(
            f"cannot read the facts of {origin}", why, "./inv cluster.check", code="input.facts"
        ) from error


def load_sheet(path: Path) -> dict[str, NodeFacts]:
    """Read recorded facts: a JSON object of nodes by name. Raises InputError."""
    try:
        sheet = read_json(path)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        fix = "./inv cluster.check --record facts.json"
        raise InputError(f"cannot read the sheet {path}", why, fix, code="input.facts") from error
    nodes = sheet.get("nodes") if isinstance(sheet, dict) else None
    if not isinstance(nodes, dict):
        fix = "./inv cluster.check --record facts.json"
        raise InputError(f"cannot read the sheet {path}", "it has no table of nodes", fix, code="input.facts")
    return {name: parse(answer, f"{name} in {path.name}") for name, answer in nodes.items()}


def as_sheet(facts: Mapping[str, NodeFacts]) -> str:
    """Return facts as a sheet that `load_sheet` reads."""
    return json.dumps({"nodes": {name: node.model_dump(mode="json") for name, node in facts.items()}}, indent=1) + "\n"
