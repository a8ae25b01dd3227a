"""Run a program on a node: with OpenSSH's client, or directly for the node that the commands run on.

OpenSSH reads the user's ~/.ssh/config, known hosts, keys and agent. It must not prompt: an unknown host or a missing
key is an error with the command that fixes it.
"""

import ipaddress
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from sparkforge.core import paths
from sparkforge.core.errors import InputError, NetworkError, ProcessError, SparkforgeError
from sparkforge.core.files import DocumentError
from sparkforge.core.process import run_unchecked
from sparkforge.core.tables import Record, parse_record
from sparkforge.serve.cluster import probe
from sparkforge.serve.cluster.config import ClusterNode

CONNECT_SECONDS = 10
SSH_FAILED = 255  # ssh(1): the connection failed, not the program
# BatchMode: ssh does not prompt. ServerAlive: a node without power is noticed within 15 s.
OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=3")
SSH = ("ssh", *(word for option in OPTIONS for word in ("-o", option)))
Result = TypeVar("Result")
Answer = TypeVar("Answer", bound=Record)


def command_line(node: ClusterNode, argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` on a node, in the node's checkout if `folder` is set."""
    program = [*(["env", f"SPARKFORGE_STATE={node.state}"] if node.state else []), *argv]
    if not node.ssh:
        return program
    script = shlex.join(program)
    if node.folder:
        script = f"cd {shlex.quote(node.folder)} && exec {script}"
    return [*SSH, "--", node.ssh, script]


def output(node: ClusterNode, argv: Sequence[str], *, seconds: float, stdin: str | None = None) -> str:
    """Return a program's output on a node. Raises NetworkError if ssh fails, ProcessError if the program fails."""
    command = command_line(node, argv)
    result = run_unchecked(command, cwd=None if node.ssh else paths.ROOT, stdin=stdin, seconds=seconds)
    if not result.returncode:
        return result.stdout
    why = result.stderr.strip() or result.stdout.strip() or f"it ended with code {result.returncode}"
    if node.ssh and result.returncode == SSH_FAILED:
        last = why.splitlines()[-1]
        raise NetworkError(f"{node.name} cannot be reached by ssh", last, f"ssh {node.ssh} true", code="network.node")
    by_hand = shlex.join(command_line(node, argv[:3]))
    raise ProcessError(f"{argv[0]} failed on {node.name}", why, by_hand, code="process.failed")


def document(
    node: ClusterNode, argv: Sequence[str], shape: type[Answer], *, seconds: float, stdin: str | None = None
) -> Answer:
    """Return the JSON object that a program prints on a node. Raises InputError, and the errors of `output`."""
    text = output(node, argv, seconds=seconds, stdin=stdin)
    try:
        return parse_record(text, node.name, shape)
    except DocumentError as error:
        fix = f"{shlex.join(command_line(node, ['true']))}   # must print nothing; and git pull on every node"
        raise InputError(f"cannot read the answer of {node.name}", error.why, fix, code="input.facts") from error


def ask_probe(node: ClusterNode, mode: str, shape: type[Answer], *, seconds: float, **options: Any) -> Answer:
    """Run probe.py on a node, which needs python3 but not Sparkforge. Raises the errors of `document`."""
    source = Path(probe.__file__).read_text(encoding="utf-8")
    argv = ["python3", "-", json.dumps({"mode": mode, **options})]
    return document(node, argv, shape, seconds=seconds, stdin=source)


def on_every(nodes: Sequence[ClusterNode], call: Callable[[ClusterNode], Result]) -> dict[str, Result]:
    """Call a function for all nodes at once; return results by name. Raises the first error, after all calls ended."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return dict(zip((node.name for node in nodes), pool.map(call, nodes), strict=True))


def on_all(nodes: Sequence[ClusterNode], call: Callable[[ClusterNode], Result]) -> dict[str, Result | SparkforgeError]:
    """Like `on_every`, but the result of a failed node is its error, so that the other results are kept."""

    def attempt(node: ClusterNode) -> Result | SparkforgeError:
        try:
            return call(node)
        except SparkforgeError as error:
            return error

    return on_every(nodes, attempt)


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
        """Its physical port; the halves of a port differ in the PCI domain only. Empty for other than ConnectX."""
        return self.pci.rpartition(".")[2] if self.driver == CONNECTX else ""


class RdmaDevice(Record):
    """An RDMA device, the interface that it belongs to, and its state, such as ACTIVE or DOWN."""

    name: str
    interface: str
    state: str


class NodeFacts(Record):
    """The facts that a node reports. None: not known; `errors` has the reasons by the facts' names."""

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

    `lost` of the `sent` small packets did not come back; `fastest` is the shortest round trip in seconds.
    """

    blocked: Mapping[str, str] = Field(default_factory=dict)
    packet: str = ""
    sent: int = 0
    lost: int = 0
    fastest: float | None = None


def ask(node: ClusterNode, **options: Any) -> NodeFacts:
    """Return a node's facts. Raises the errors of `ask_probe`."""
    return ask_probe(node, "facts", NodeFacts, seconds=FACTS_SECONDS, **options)


def reach(
    sender: ClusterNode, receiver: ClusterNode, ports: Sequence[int], mtu: int, addresses: tuple[str, str]
) -> Reach:
    """Try ports and a packet of `mtu` bytes from one node to another, with probe.py at both ends.

    `addresses` are the sender's and the receiver's. Raises the errors of `ask_probe`.
    """
    where: dict[str, Any] = {"address": addresses[1], "ports": list(ports)}
    with ThreadPoolExecutor(1) as pool:
        seconds, duration = 2 * LISTEN_SECONDS, LISTEN_SECONDS / 2
        pool.submit(lambda: ask_probe(receiver, "listen", Reach, seconds=seconds, duration=duration, **where))
        return ask_probe(sender, "reach", Reach, seconds=seconds, source=addresses[0], mtu=mtu, **where)
