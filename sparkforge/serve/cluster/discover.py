"""Propose a cluster.toml from the facts that nodes report: cables, subnets, halves of ports."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network

from pydantic import ValidationError

from sparkforge.core.console import say
from sparkforge.core.errors import RefusalError, UsageError
from sparkforge.serve.cluster import remote
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.cluster.remote import NetworkInterface, NodeFacts

GUIDE = "docs/guide/two-machines.md, The link"


def find_nodes(destinations: Sequence[str], device: str, folder: str) -> ClusterConfig:
    """Query machines by their ssh destinations, the head first, and return a configuration; `local` is this machine.

    Raises UsageError for fewer than two machines, a malformed name, or a machine named twice; RefusalError if the
    machines share no network; the error of the first node that does not answer.
    """
    refused = "cannot make a cluster.toml of these machines"
    fix = "./inv cluster.discover --nodes local,spark-2   # each machine once; --folder takes an absolute path"
    try:
        asked = [
            ClusterNode(
                name=re.sub(r"[^A-Za-z0-9_.-]", "-", destination.rpartition("@")[2]),
                ssh="" if destination == "local" else destination,
                address=f"0.0.0.{index}",  # address and interface are not known yet
                interface="unknown",
            )
            for index, destination in enumerate(destinations)
        ]
    except ValueError as error:
        why = "--nodes takes ssh destinations, such as nvidia@spark-2, and local"
        raise UsageError(f"--nodes {','.join(destinations)} has no meaning", why, fix) from error
    names = [node.name for node in asked]
    if len(set(names)) < max(2, len(names)):
        twice = [name for name in names if names.count(name) > 1]
        why = f"--nodes names {twice[0]} twice" if twice else "a cluster has two nodes or more; local is this machine"
        raise UsageError(refused, why, fix)
    known = remote.on_every(asked, remote.ask)
    for line in (*describe(known), *link_commands(known)):
        say(line)
    try:
        return propose(known, {node.name: node.ssh for node in asked}, device, folder)
    except ValidationError as error:  # such as two names of one machine
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'nodes'}: {first['msg']}"
        raise UsageError(refused, why, fix) from error


def propose(
    facts: Mapping[str, NodeFacts], destinations: Mapping[str, str], device: str = "docker", folder: str = ""
) -> ClusterConfig:
    """Return the configuration for these nodes, the head first; `destinations` are their ssh destinations.

    Raises RefusalError if two of them share no network that can carry a model.
    """
    fast = {name: _networks(node) for name, node in facts.items()}
    common = set.intersection(*map(set, fast.values()))
    if not common:
        two = itertools.combinations(facts, 2)
        apart = [f"{first} and {second}" for first, second in two if not fast[first].keys() & fast[second].keys()]
        raise RefusalError(
            f"{len(facts)} nodes share no network that can carry a model",
            f"their wired interfaces that are up have no common subnet: {', '.join(apart[:4]) or 'all nodes together'}",
            f"again   # first connect the cable, and give both halves of the port addresses ({GUIDE})",
            code="validation.cluster",
        )
    network = min(common, key=lambda network: _order(fast[next(iter(facts))][network][0]))
    nodes = []
    for name, networks in fast.items():
        interface, address = networks[network]
        own = {"address": address, "interface": interface.name, "hcas": tuple(_hcas(facts[name]))}
        nodes.append({"name": name, "ssh": destinations[name], "folder": folder, **own})
    # Powers of two divide a model's heads.
    split = {"tensor": len(nodes)} if len(nodes).bit_count() == 1 else {"tensor": 1, "pipeline": len(nodes)}
    return ClusterConfig.model_validate({"schema": 1, "device": device, **split, "nodes": nodes})


def _networks(node: NodeFacts) -> dict[IPv4Network, tuple[NetworkInterface, str]]:
    """Return subnet → interface, address, for a node's ConnectX interfaces that are up.

    A node without ConnectX gets those of all its wired interfaces.
    """
    wired = [entry for entry in node.interfaces or () if not entry.wireless and not entry.bridge]
    usable = [entry for entry in wired if entry.up and entry.carrier]
    fast = [entry for entry in usable if entry.port] if any(entry.port for entry in wired) else usable
    entries = sorted(fast, key=_order, reverse=True)
    return {net: (entry, host) for entry in entries for net, host in zip(entry.networks, entry.hosts, strict=True)}


def _order(interface: NetworkInterface) -> tuple[str, str]:
    return interface.pci, interface.name


def _hcas(facts: NodeFacts) -> Iterator[str]:
    """Yield the RDMA devices of both halves of every port that has a cable, in the order of their PCI addresses."""
    ports = {entry.name: entry for entry in facts.interfaces or () if entry.port and entry.carrier}
    active = [device for device in facts.rdma or () if device.state == "ACTIVE" and device.interface in ports]
    for device in sorted(active, key=lambda device: _order(ports[device.interface])):
        yield device.name


def describe(facts: Mapping[str, NodeFacts]) -> Iterator[str]:
    """Yield lines of text about each node's ConnectX interfaces."""
    for name, node in facts.items():
        ports = [entry for entry in node.interfaces or () if entry.port]
        yield f"{name}: {node.hostname}, {node.machine}" + ("" if ports else ", no ConnectX")
        for entry in sorted(ports, key=_order):
            state = "up" if entry.up and entry.carrier else "no cable"
            rdma = next((device.name for device in node.rdma or () if device.interface == entry.name), "no RDMA device")
            addresses = ", ".join(entry.addresses) or "no address"
            yield f"  port {entry.port}: {entry.name} ({rdma}), {state}, MTU {entry.mtu}, {addresses}"


def link_commands(facts: Mapping[str, NodeFacts]) -> Iterator[str]:
    """Yield the commands that configure each port that has a cable, unless each half has a subnet of its own.

    The addresses are those of NVIDIA's playbook Connect Two Sparks; the MTU is our choice. Each half answers ARP
    requests for its own address only (Linux, Documentation/networking/ip-sysctl.rst: arp_ignore and arp_announce).
    """
    for rank, (name, node) in enumerate(facts.items()):
        halves = sorted((entry for entry in node.interfaces or () if entry.port and entry.carrier), key=_order)
        if len({network for entry in halves for network in entry.networks}) >= len(halves):
            continue
        yield f"{name}: {' and '.join(entry.name for entry in halves)} need subnets of their own. Run there:"
        yield "sudo tee /etc/netplan/40-cx7.yaml <<'EOF'"
        yield "network:\n  version: 2\n  ethernets:"
        for number, entry in enumerate(halves):
            yield f"    {entry.name}: {{addresses: [192.168.{100 + number}.{10 + rank}/24], dhcp4: no, mtu: 9000}}"
        yield "EOF\nsudo tee /etc/sysctl.d/40-cx7.conf <<'EOF'"
        for entry in halves:
            yield f"net.ipv4.conf.{entry.name}.arp_ignore = 1\nnet.ipv4.conf.{entry.name}.arp_announce = 2"
        yield "EOF\nsudo chmod 600 /etc/netplan/40-cx7.yaml && sudo netplan apply && sudo sysctl --system"


def pairs(facts: Mapping[str, NodeFacts]) -> Iterator[tuple[str, str, str, str]]:
    """Yield (node, its address, other node, its address) for every subnet that two nodes share."""
    for first, second in itertools.combinations(facts, 2):
        other = _networks(facts[second])
        for network, (_, address) in _networks(facts[first]).items():
            if network in other:
                yield first, address, second, other[network][1]
