"""Facts of a node, and what comes from one to another, asked over ssh by probe.py."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from sparkforge.core.errors import SparkforgeError
from sparkforge.core.tables import Record
from sparkforge.serve.cluster import remote
from sparkforge.serve.cluster.config import ClusterNode

FACTS_SECONDS = 60.0
LISTEN_SECONDS = 30.0
CONNECTX = "mlx5_core"  # the driver of ConnectX-4 and later


class NetworkInterface(Record):
    """A network interface of a node; `pci` is domain:bus:device.function."""

    name: str
    addresses: tuple[str, ...] = ()
    mtu: int
    up: bool
    carrier: bool
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


class NodeFacts(Record):
    """The facts that a node reports. None: not known, and `errors` has the reason by the fact's name."""

    hostname: str
    machine: str = ""
    interfaces: tuple[NetworkInterface, ...] | None = None
    rdma: tuple[RdmaDevice, ...] | None = None
    infiniband: tuple[str, ...] | None = None
    memory: Mapping[str, int] | None = None
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
    """The network between two nodes: `blocked` ports with reasons; `packet`: why a packet of the MTU does not arrive.

    Of `sent` small packets `lost` did not come back; `fastest` is the shortest round trip in seconds.
    """

    blocked: Mapping[str, str] = Field(default_factory=dict)
    packet: str = ""
    sent: int = 0
    lost: int = 0
    fastest: float | None = None


def ask(node: ClusterNode, **options: Any) -> NodeFacts:
    """Return a node's facts. Raises what `remote.ask_probe` raises."""
    return remote.ask_probe(node, "facts", NodeFacts, seconds=FACTS_SECONDS, **options)


def reach(
    sender: ClusterNode, receiver: ClusterNode, ports: Sequence[int], mtu: int, addresses: tuple[str, str]
) -> Reach:
    """Try ports and a packet of `mtu` bytes from one node to another, by programs of ours at both ends.

    `addresses` are the sender's and the receiver's. Raises what `remote.ask_probe` raises.
    """
    options: dict[str, dict[str, Any]] = {
        receiver.name: {"mode": "listen", "duration": LISTEN_SECONDS / 2},
        sender.name: {"mode": "reach", "source": addresses[0], "mtu": mtu},
    }

    def put(node: ClusterNode) -> Reach:
        more = {**options[node.name], "address": addresses[1], "ports": list(ports)}
        return remote.ask_probe(node, shape=Reach, seconds=2 * LISTEN_SECONDS, **more)

    answer = remote.on_all([receiver, sender], put)[sender.name]
    if isinstance(answer, SparkforgeError):
        raise answer
    return answer
