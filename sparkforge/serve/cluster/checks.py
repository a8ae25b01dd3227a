"""Checks of all nodes and of the network between them, before a cluster starts.

Each check is for a failure that users reported. `CHECKS` has all checks in the order of the report;
docs/reference/cluster.md explains each check.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Interface
from pathlib import Path

from sparkforge.core.errors import InputError, RefusalError, SparkforgeError
from sparkforge.models import recipes as models
from sparkforge.plan import architecture
from sparkforge.plan import cluster as plan
from sparkforge.plan.architecture import Architecture
from sparkforge.plan.devices import GIB
from sparkforge.serve import profiles, settings
from sparkforge.serve.cluster import discover, remote
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.cluster.remote import NetworkInterface, NodeFacts, Reach
from validate.checks.finding import (
    CheckList,
    CheckResult,
    Finding,
    Status,
    evaluate,
    failed,
    judged,
    passed,
    skipped,
    warned,
)
from validate.gate import one_line

FULL_MTU = 9000  # RDMA packets of 4096 bytes need more than 4200; 1500 leaves 1024
# Registering NCCL's buffers fails with ENOMEM while the page cache takes all memory. Our own bound.
LEAST_FREE = 4 * GIB
# Gloo and vLLM's message queues listen on ports that the kernel chooses. A firewall that allows only certain ports
# blocks them. This port stands for all of them.
CHOSEN_PORT = 47_113
# Our own bound. A round trip over a Spark's cable takes tens of microseconds, over WiFi milliseconds. Every layer waits
# for two all-reduces, so 1 ms each would be 72 ms a token of gpt-oss-120b.
ROUND_TRIP_SECONDS = 1e-3
# Marlin needs a multiple of this many columns. Half of gpt-oss's LM head has 100,544 columns, which is not a multiple
# (eugr/spark-vllm-docker issue 136).
MARLIN_TILE = 128


@dataclass(frozen=True)
class ClusterFacts:
    """The facts of a cluster: the configuration, facts or error of every node, and the network between nodes.

    `model` has the sizes of the model to serve, and `head` is the format of its LM head.
    """

    config: ClusterConfig
    facts: Mapping[str, NodeFacts]
    errors: Mapping[str, SparkforgeError] = field(default_factory=dict)
    reaches: Mapping[tuple[str, str], Reach | SparkforgeError] = field(default_factory=dict)
    model: Architecture | None = None
    head: str = "bf16"

    def nodes(self) -> Iterator[tuple[ClusterNode, NodeFacts]]:
        """Yield the nodes that answered."""
        for node in self.config.nodes:
            if node.name in self.facts:
                yield node, self.facts[node.name]

    def used(self) -> Iterator[tuple[ClusterNode, NetworkInterface]]:
        """Yield the interfaces that carry the model: those of the RDMA devices, and the control network's."""
        for node, facts in self.nodes():
            names = {node.interface} | {device.interface for name in node.hcas if (device := facts.device(name))}
            yield from ((node, entry) for entry in facts.interfaces or () if entry.name in names)

    def unknown(self, name: str) -> str:
        """Return the nodes on which a fact is not known, each with the reason; empty if there are none."""
        return "; ".join(
            f"{node.name}: {facts.errors.get(name, 'not asked')}"
            for node, facts in self.nodes()
            if getattr(facts, name) is None
        )


CHECKS = CheckList[ClusterFacts]("docs/reference/cluster.md")
GPUS = ("gpus",)  # a check that needs them is skipped on a device without them


def evaluate_all(cluster: ClusterFacts) -> list[Finding]:
    """Return the finding of every check."""
    reason = f"the device {cluster.config.device} has no GPUs"
    skips = not cluster.config.has_gpus
    findings = [skipped(check, reason) if skips and check.needs else evaluate(check, cluster) for check in CHECKS]
    return [replace(f, required=False, fix="") if f.status is Status.SKIPPED else f for f in findings]


@CHECKS.add(fix="ssh NODE true   # then ssh-copy-id NODE")
def _nodes(cluster: ClusterFacts) -> CheckResult:
    """Every node answers over ssh without a prompt."""
    if silent := cluster.errors:
        first = next(iter(silent.values()))
        return failed("; ".join(f"{name}: {error.why}" for name, error in silent.items()), first.fix)
    return judged(len(cluster.facts) == len(cluster.config.nodes), f"{len(cluster.facts)} nodes answer")


def _add_same(name: str, subject: str, fact: str, fix: str, needs: tuple[str, ...] = ()) -> None:
    @CHECKS.add(name=name, meaning=f"All nodes have the same {subject}.", needs=needs, fix=fix)
    def _same(cluster: ClusterFacts) -> CheckResult:
        if fact == "image" and not cluster.config.in_containers:
            return CheckResult(Status.SKIPPED, "the embedded device has none")
        if fact == "model" and not cluster.config.model:
            return CheckResult(Status.SKIPPED, "cluster.toml names no model")
        if unknown := cluster.unknown(fact):
            return failed(f"the {fact} is not known: {unknown}")
        values = {node.name: str(getattr(facts, fact))[:80] for node, facts in cluster.nodes()}
        if len(set(values.values())) > 1:
            return failed(f"the {fact} differs: " + ", ".join(f"{node} has {value}" for node, value in values.items()))
        return passed(f"{next(iter(values.values()), 'no node')} on {len(values)} nodes")


_add_same("machines", "processor architecture", "machine", "one kind of machine for all nodes of a cluster")
UPGRADE = "sudo apt update && sudo apt full-upgrade && sudo reboot   # on each"
_add_same("drivers", "GPU driver", "driver", UPGRADE, GPUS)
_add_same("images", "image, by its id", "image", "./inv image.pull REGISTRY/NAME@sha256:DIGEST   # on each node")
_add_same("models", "model, by a hash", "model", "./inv cluster.sync   # and remove files that only one node has")


@CHECKS.add(fix="ip -br addr; ibdev2netdev; check the cable")
def _link(cluster: ClusterFacts) -> CheckResult:
    """Each node's control interface is up, has a cable, and has its address."""
    problems = []
    for node, facts in cluster.nodes():
        interface = facts.interface(node.interface)
        if interface is None:
            problems.append(f"{node.name} has no interface {node.interface}")
        elif not (interface.up and interface.carrier):
            problems.append(f"{node.interface} of {node.name} is down")
        elif node.address not in interface.hosts:
            has = ", ".join(interface.hosts) or "no address"
            problems.append(f"{node.interface} of {node.name} has {has}, not {node.address}")
    return judged(not problems, "; ".join(problems) or "up on every node")


@CHECKS.add(fix="./inv cluster.discover   # then name a wired interface in cluster.toml")
def _control_network(cluster: ClusterFacts) -> CheckResult:
    """The control network is one subnet and not WiFi."""
    subnets, radio = set(), []
    for node, facts in cluster.nodes():
        interface = facts.interface(node.interface)
        if interface and interface.wireless:
            radio.append(f"{node.interface} of {node.name}")
        addresses = [
            entry for entry in (interface.addresses if interface else ()) if entry.startswith(f"{node.address}/")
        ]
        subnets |= {IPv4Interface(address).network for address in addresses}
    if radio:
        return failed(f"WiFi carries the control network: {', '.join(radio)}")
    return judged(len(subnets) == 1, f"{len(subnets)} subnets: {', '.join(map(str, sorted(subnets)))}")


@CHECKS.add(needs=GPUS, fix="ibdev2netdev   # then name the active devices in hcas of cluster.toml")
def _rdma(cluster: ClusterFacts) -> CheckResult:
    """Every RDMA device that cluster.toml names exists and is active."""
    problems = []
    for node, facts in cluster.nodes():
        if not node.hcas:
            problems.append(f"{node.name} names no hcas, so NCCL uses TCP, with which two machines are slower than one")
        for name in node.hcas:
            device = facts.device(name)
            if device is None:
                problems.append(f"{node.name} has no {name}")
            elif device.state != "ACTIVE":
                problems.append(f"{name} of {node.name} is {device.state or 'unknown'}")
        if not any(entry.startswith("uverbs") for entry in facts.infiniband or ()):
            problems.append(f"{node.name} has no /dev/infiniband/uverbs*")
    return judged(not problems, "; ".join(problems) or "active on every node")


@CHECKS.add(
    needs=GPUS,
    fix="./inv cluster.discover   # name both RDMA devices of the port in hcas, and give each half a subnet of its own",
)
def _port_halves(cluster: ClusterFacts) -> CheckResult:
    """Both halves of each port are used, and are on different subnets."""
    problems = []
    for node, facts in cluster.nodes():
        used = {device.interface: device.name for name in node.hcas if (device := facts.device(name))}
        for port in sorted({entry.port for entry in facts.interfaces or () if entry.name in used and entry.port}):
            halves = [entry for entry in facts.interfaces or () if entry.port == port]
            unused = [entry.name for entry in halves if entry.name not in used]
            if unused:
                problems.append(f"{node.name} does not use {', '.join(unused)}, half of port {port}")
            elif len({network for entry in halves for network in entry.networks}) < len(halves):
                networks = ", ".join(f"{entry.name} {' '.join(entry.addresses) or 'no address'}" for entry in halves)
                problems.append(f"the halves of port {port} of {node.name} are not on two subnets: {networks}")
    return judged(not problems, "; ".join(problems) or "both halves, on their own subnets")


@CHECKS.add(fix="sudo ip link set INTERFACE mtu 9000   # on each node")
def _mtu(cluster: ClusterFacts) -> CheckResult:
    """Every interface that carries the model has the same MTU, 9000."""
    sizes = {f"{node.name} {entry.name}": entry.mtu for node, entry in cluster.used()}
    text = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if len(set(sizes.values())) > 1:
        return failed(f"they differ: {text}")
    if any(size < FULL_MTU for size in sizes.values()):
        return warned(f"smaller than {FULL_MTU}, so the link is slower than it could be: {text}")
    return judged(bool(sizes), text or "no interface is known")


def _add_reach(name: str, meaning: str, problem: Callable[[Reach], str], fix: str) -> None:
    """Add a check of the network from one node to another; `problem` returns the fault of a connection, or ""."""

    @CHECKS.add(name=name, meaning=meaning, fix=fix)
    def _reached(cluster: ClusterFacts) -> CheckResult:
        if not cluster.reaches:
            return failed("not tried: fewer than two nodes answered")
        problems = []
        for (sender, receiver), reach in cluster.reaches.items():
            if why := reach.why if isinstance(reach, SparkforgeError) else problem(reach):
                problems.append(f"from {sender} to {receiver}: {why}")
        return judged(not problems, "; ".join(problems) or f"{len(cluster.reaches)} connections between nodes")


def _slow(reach: Reach) -> str:
    if reach.lost or not reach.sent:
        return f"{reach.lost} of {reach.sent} packets are lost"
    slow = reach.fastest is None or reach.fastest > ROUND_TRIP_SECONDS
    return f"the fastest packet took {(reach.fastest or 0) * 1e3:.1f} ms there and back" if slow else ""


_add_reach(
    "packets",
    "A packet of the whole MTU passes between the nodes, on every subnet that they share.",
    lambda reach: reach.packet and f"a full packet does not pass: {reach.packet}",
    "set the same MTU on both ends and on the switch",
)
_add_reach(
    "round-trip",
    "Small packets between the nodes all come back, the fastest within 1 ms.",
    _slow,
    "reseat or change the cable, and keep WiFi, tunnels and other traffic off the path between the nodes",
)
_add_reach(
    "firewall",
    "The nodes reach each other's ports.",
    lambda reach: ", ".join(f"port {port}: {why}" for port, why in reach.blocked.items()),
    "sudo ufw allow from OTHER-ADDRESS   # on both nodes",
)


@CHECKS.add(fix="./inv cluster.down   # or choose other ports in cluster.toml")
def _ports(cluster: ClusterFacts) -> CheckResult:
    """The ports of cluster.toml are free."""
    taken = {node.name: facts.ports_taken for node, facts in cluster.nodes() if facts.ports_taken}
    problems = [f"{name}: {', '.join(map(str, ports))}" for name, ports in taken.items()]
    return judged(not problems, "; ".join(problems) or "free on every node")


@CHECKS.add(needs=GPUS, fix="sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'   # on that node")
def _free_memory(cluster: ClusterFacts) -> CheckResult:
    """Enough memory is free, not only available, for RDMA buffers."""
    if unknown := cluster.unknown("memory"):
        return failed(f"not known: {unknown}")
    free = {node.name: (facts.memory or {}).get("MemFree", 0) for node, facts in cluster.nodes()}
    text = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in free.items())
    return judged(all(size >= LEAST_FREE for size in free.values()), f"MemFree: {text}")


@CHECKS.add(fix="./inv plan --help   # its --nodes shows how to set tensor and pipeline in cluster.toml")
def _split(cluster: ClusterFacts) -> CheckResult:
    """The model can be split as cluster.toml says."""
    config, model = cluster.config, cluster.model
    if model is None:
        return failed("the model's sizes are not known")
    layers: plan.Way = "expert" if config.expert else "tensor"
    ways: list[tuple[int, plan.Way]] = [(config.tensor, layers), (config.pipeline, "pipeline")]
    problems = [objection for count, way in ways if count > 1 for objection in plan.objections(model, count, way)]
    if min(config.tensor, config.pipeline) > 1 and model.intermediate % len(config.nodes):
        problems.append(f"an intermediate size of {model.intermediate} is not a multiple of {len(config.nodes)}")
    # vLLM's CPU build does not make the second node's buffers (gpu_model_runner.py:5801).
    if config.pipeline > 1 and not config.has_gpus:
        problems.append("vLLM's CPU build does not support a pipeline")
    if cluster.head != "bf16" and config.tensor > 1 and model.vocab // config.tensor % MARLIN_TILE:
        columns = model.vocab // config.tensor
        problems.append(f"an LM head in {cluster.head} has {columns} columns per node, not a multiple of {MARLIN_TILE}")
    return judged(not problems, "; ".join(problems) or f"tensor {config.tensor}, pipeline {config.pipeline}")


def look(config: ClusterConfig) -> ClusterFacts:
    """Return the facts of all nodes, and of the network between them. Raises UsageError for an unknown profile."""
    image = f"sparkforge/vllm:{config.stack}" if config.in_containers else ""
    ports = {config.head.name: (config.port, config.master_port, config.watch_port)}
    answers = remote.on_all(
        config.nodes, lambda node: remote.ask(node, ports=ports.get(node.name, ()), model=config.model, image=image)
    )
    rows = profiles.load_options(stack=config.stack)
    name = config.profile or settings.DEFAULTS["spark" if config.has_gpus else "embedded"][0]
    if name not in rows:
        profiles.named(name, stack=config.stack)  # raises UsageError
    known = {node: answer for node, answer in answers.items() if isinstance(answer, NodeFacts)}
    errors = {node: answer for node, answer in answers.items() if isinstance(answer, SparkforgeError)}
    recipes, model = models.load(), None
    served = Path(settings.DEFAULTS["spark"][1]).name if config.has_gpus else settings.TINY_ID
    title = Path(config.model).name if config.model else served
    with suppress(InputError):  # the folder is not on this machine, and the name is not known
        own = title in recipes
        model = architecture.parse(recipes[title].config, title) if own else architecture.read(Path(config.model))
    return ClusterFacts(config, known, errors, _reaches(config, known), model=model, head=rows[name].dense.head)


def _reaches(config: ClusterConfig, known: Mapping[str, NodeFacts]) -> dict[tuple[str, str], Reach | SparkforgeError]:
    """Try the connections, both ways between the head and each worker, and on every other subnet of two nodes.

    They are tried one after another, because two of them may need the same port.
    """
    head, nodes, chosen = config.head, {node.name: node for node in config.nodes}, (CHOSEN_PORT,)
    ways: list[tuple[ClusterNode, ClusterNode, str, str, tuple[int, ...]]] = []
    for worker in config.workers:
        ways.append((worker, head, worker.address, head.address, (config.master_port, config.watch_port)))
        ways.append((head, worker, head.address, worker.address, chosen))
    control = {node.address for node in config.nodes}
    pairs = [pair for pair in discover.pairs(known) if not {pair[1], pair[3]} <= control]
    ways += [(nodes[first], nodes[second], own, other, chosen) for first, own, second, other in pairs]
    reaches: dict[tuple[str, str], Reach | SparkforgeError] = {}
    for sender, receiver, own, other, ports in ways:
        if {sender.name, receiver.name} <= known.keys():
            mtu = max((e.mtu for e in known[sender.name].interfaces or () if own in e.hosts), default=1500)
            try:
                reach: Reach | SparkforgeError = remote.reach(sender, receiver, ports, mtu, (own, other))
            except SparkforgeError as error:
                reach = error
            reaches[f"{sender.name} {own}", f"{receiver.name} {other}"] = reach
    return reaches


def require_fine(findings: Sequence[Finding]) -> None:
    """Raise RefusalError, with the fix of the first failed check, if a check failed."""
    if refusing := [finding for finding in findings if finding.status is Status.FAIL]:
        names = ", ".join(finding.check for finding in refusing)
        why = f"{refusing[0].check}: {one_line(refusing[0].evidence)}"
        raise RefusalError(f"the cluster is refused by {names}", why, refusing[0].fix, code="validation.cluster")
