"""`./inv cluster.setup` and `cluster.restore`: the link's addresses, MTU, kernel settings and ssh key on all nodes.

What a node needs is computed here from all nodes' facts; change.py makes it so on each, and keeps a record there of how
it was. Files are our own, with two exceptions of one line each: the other nodes' authorized_keys.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

from pydantic import Field

from sparkforge.core.console import confirmed, echo, say
from sparkforge.core.errors import NetworkError, ProcessError, RefusalError, ServerError, SparkforgeError, UsageError
from sparkforge.core.tables import Record
from sparkforge.serve.cluster import change, facts, remote
from sparkforge.serve.cluster.checks import FULL_MTU
from sparkforge.serve.cluster.config import ClusterNode
from sparkforge.serve.cluster.facts import NetworkInterface, NodeFacts

NETPLAN_FILE = "/etc/netplan/90-sparkforge-cluster.yaml"
KERNEL_FILE = "/etc/sysctl.d/90-sparkforge-cluster.conf"
CONNECTIONS = "/etc/NetworkManager/system-connections"
KEY = ".ssh/sparkforge_cluster"  # below the home of who logs in
HOSTS = ".ssh/sparkforge_cluster_hosts"
SUBNETS = "192.168.100.0/24,192.168.101.0/24"  # of NVIDIA's playbook Connect Two Sparks
FIRST_HOST = 10  # there too
LINK_LOCAL = IPv4Network("169.254.0.0/16")
HEAD_LINE = "# Written by ./inv cluster.setup; ./inv cluster.restore takes it away.\n"
# Both halves of a port are in one Ethernet segment: each may answer for its own address only, and asks from it
# (Documentation/networking/ip-sysctl.rst of Linux, arp_ignore and arp_announce).
HALVES = {"arp_ignore": "1", "arp_announce": "2"}
AS_ROOT = 'if [ "$(id -u)" = 0 ]; then exec python3 - "$1"; else exec sudo -n python3 - "$1"; fi'
CHANGE_SECONDS, SETTLE_SECONDS = 180.0, 20.0
GUIDE = "docs/guide/two-machines.md, The link"


class NodeLook(Record):
    """What change.py's `look` says. `elsewhere` are netplan's files of others by the interface that they name."""

    user: str
    home: str
    manager: str
    host_key: str
    public_key: str
    elsewhere: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    recorded: bool


@dataclass(frozen=True)
class LinkEnd:
    """One interface of a node at the link: its address there, and whether a file of others sets it already."""

    interface: str
    address: IPv4Interface
    elsewhere: bool = False


@dataclass
class NodePlan:
    """How a node is to be; change.py's argument."""

    manager: str
    files: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, str]] = field(default_factory=list)
    kernel: dict[str, str] = field(default_factory=dict)
    interfaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    connections: list[str] = field(default_factory=list)
    key: str = ""


def ends(facts: NodeFacts, node: ClusterNode) -> list[NetworkInterface]:
    """Return the interfaces of a node's one port with a cable, by PCI address; cluster.toml's without a ConnectX.

    Raises RefusalError for no port with a cable, and for two: which cable leads where cannot be seen from one end.
    """
    cards = [entry for entry in facts.interfaces or () if entry.port]
    if not cards:
        if entry := facts.interface(node.interface):
            return [entry]
        why = f"it has no ConnectX, and no interface {node.interface} either"
        raise _refused(f"{node.name} has no link", why, "name the interface in cluster.toml")
    ports = sorted({entry.port for entry in cards if entry.carrier})
    if len(ports) != 1:
        why = f"{len(ports)} of its ports have a cable, and this command configures one"
        fix = "connect a cable" if not ports else "a mesh or a ring gets its addresses by hand"
        raise _refused(f"{node.name}: the link is not plain to see", why, f"{fix} ({GUIDE})")
    return sorted((entry for entry in cards if entry.port == ports[0]), key=lambda entry: (entry.pci, entry.name))


def addresses(
    nodes: Sequence[ClusterNode], known: Mapping[str, NodeFacts], looks: Mapping[str, NodeLook], subnets: str
) -> dict[str, list[LinkEnd]]:
    """Return each node's ends of the link. Addresses that fit already stay; else the subnets give new ones.

    Raises UsageError for subnets that are none, RefusalError where they are taken or others' files are in the way.
    """
    interfaces = {node.name: ends(known[node.name], node) for node in nodes}
    count = {len(entries) for entries in interfaces.values()}
    if len(count) > 1:
        why = ", ".join(f"{name} has {len(entries)}" for name, entries in interfaces.items())
        raise _refused("the nodes' ports have different numbers of halves", why, "connect the same ports")
    elsewhere = {name: set(looks[name].elsewhere) for name in interfaces}
    if present := _fitting(interfaces):
        return {
            name: [
                LinkEnd(entry.name, address, entry.name in elsewhere[name])
                for entry, address in zip(entries, present[name], strict=True)
            ]
            for name, entries in interfaces.items()
        }
    for name, entries in interfaces.items():
        if taken := [entry.name for entry in entries if entry.name in elsewhere[name]]:
            files = ", ".join(sorted({file for entry in taken for file in looks[name].elsewhere[entry]}))
            why = (
                f"{files} in /etc/netplan configures {', '.join(taken)}, and not with an address on a subnet of its own"
            )
            fix = f"take {', '.join(taken)} out of that file on {name}, or correct it; then the same command again"
            raise _refused(f"{name} has another configuration of the link", why, fix)
    networks = _networks(subnets, next(iter(count)), len(nodes))
    for name, entries in interfaces.items():
        own = {entry.name for entry in entries}
        others = [entry for entry in known[name].interfaces or () if entry.name not in own]
        for entry in others:
            if used := [network for network in networks for other in entry.networks if network.overlaps(other)]:
                why = f"{entry.name} of {name} is in {used[0]} already"
                raise _refused("a subnet for the link is taken", why, f"--subnets {SUBNETS.replace('168', '177')}")
    return {
        node.name: [
            LinkEnd(entry.name, IPv4Interface((network[FIRST_HOST + rank], network.prefixlen)))
            for entry, network in zip(interfaces[node.name], networks, strict=False)
        ]
        for rank, node in enumerate(nodes)
    }


def _fitting(interfaces: Mapping[str, list[NetworkInterface]]) -> dict[str, list[IPv4Interface]]:
    """Return the addresses that are there, if the nodes' halves share subnets in pairs; else nothing."""
    present = {
        name: [
            next((a for text in entry.addresses if (a := IPv4Interface(text)) not in LINK_LOCAL), None)
            for entry in entries
        ]
        for name, entries in interfaces.items()
    }
    kept: dict[str, list[IPv4Interface]] = {}
    for name, chosen in present.items():
        kept[name] = [address for address in chosen if address is not None]
        if len(kept[name]) < len(chosen):
            return {}
    networks = [[address.network for address in chosen] for chosen in kept.values()]
    same = all(chosen == networks[0] for chosen in networks) and len(set(networks[0])) == len(networks[0])
    every = [address for chosen in kept.values() for address in chosen]
    return kept if same and len(set(every)) == len(every) else {}


def _networks(subnets: str, halves: int, nodes: int) -> list[IPv4Network]:
    try:
        networks = [IPv4Network(text.strip()) for text in subnets.split(",")]
    except ValueError as error:
        networks, why = [], str(error)
    else:
        why = f"{halves} subnets are needed, which do not overlap"
    apart = not any(a.overlaps(b) for a in networks for b in networks if a is not b)
    if len(networks) >= halves and apart:
        if all(network.is_private and network.num_addresses > FIRST_HOST + nodes for network in networks):
            return networks[:halves]
        why = "each is private and has room for all nodes from its tenth address on, as a /24 has"
    raise UsageError(f"--subnets {subnets[:200]} has no meaning", why, f"--subnets {SUBNETS}")


def wanted(
    nodes: Sequence[ClusterNode], looks: Mapping[str, NodeLook], links: Mapping[str, list[LinkEnd]]
) -> dict[str, NodePlan]:
    """Return how each node is to be. Raises RefusalError for one whose network nothing configures that we know."""
    head = nodes[0].name
    result = {}
    for node in nodes:
        sight = looks[node.name]
        if not sight.manager:
            why = "it has neither netplan with /etc/netplan nor NetworkManager's nmcli"
            fix = f"configure the link by hand ({GUIDE})"
            raise _refused(f"nothing configures the network of {node.name} that Sparkforge knows", why, fix)
        plan = NodePlan(sight.manager)
        for end in links[node.name]:
            plan.interfaces[end.interface] = {"addresses": [str(end.address)], "mtu": FULL_MTU}
            if len(links[node.name]) > 1:
                plan.kernel |= {f"net/ipv4/conf/{end.interface}/{name}": value for name, value in HALVES.items()}
        if sight.manager == change.NETPLAN:
            plan.files.append(_file(NETPLAN_FILE, netplan(links[node.name]), 0o600))
        else:
            for end in links[node.name]:
                name = f"sparkforge-cluster-{end.interface}"
                plan.files.append(_file(f"{CONNECTIONS}/{name}.nmconnection", connection(name, end), 0o600))
                plan.connections.append(name)
        if plan.kernel:
            text = HEAD_LINE + "".join(f"{name} = {value}\n" for name, value in plan.kernel.items())
            plan.files.append(_file(KERNEL_FILE, text, 0o644))
        if node.name == head:
            plan.key = f"{sight.home}/{KEY}"
            known = [host for other in nodes[1:] for host in _known(looks[other.name], links[other.name])]
            plan.files.append(_file(f"{sight.home}/{HOSTS}", HEAD_LINE + "".join(known), 0o600))
        elif public := looks[head].public_key:
            origin = ",".join(str(end.address.ip) for end in links[head])
            line = f'restrict,from="{origin}" {public}'
            plan.lines.append({"path": f"{sight.home}/.ssh/authorized_keys", "line": line})
        result[node.name] = plan
    return result


def _file(path: str, text: str, mode: int) -> dict[str, Any]:
    return {"path": path, "text": text, "mode": mode}


def netplan(link: Sequence[LinkEnd]) -> str:
    """Return netplan's file for the link. Where a file of others has the address, netplan would list it twice."""
    lines = ["network:\n  version: 2\n  ethernets:\n"]
    for end in link:
        lines.append(f"    {end.interface}:\n")
        if not end.elsewhere:
            lines.append(f"      addresses: [{end.address}]\n      dhcp4: false\n      optional: true\n")
        lines.append(f"      mtu: {FULL_MTU}\n")
    return HEAD_LINE + "".join(lines)


def connection(name: str, end: LinkEnd) -> str:
    """Return NetworkManager's keyfile for an interface; its priority is above that of a connection that it made."""
    return (
        f"{HEAD_LINE}[connection]\nid={name}\ntype=ethernet\ninterface-name={end.interface}\nautoconnect-priority=100\n"
        f"\n[ethernet]\nmtu={FULL_MTU}\n\n[ipv4]\nmethod=manual\naddress1={end.address}\nnever-default=true\n"
        "\n[ipv6]\nmethod=link-local\n"
    )


def _known(sight: NodeLook, link: Sequence[LinkEnd]) -> Iterator[str]:
    """Yield known_hosts' lines: the host key came over a connection that ssh had verified."""
    if sight.host_key:
        kind, key = sight.host_key.split()[:2]
        yield from (f"{end.address.ip} {kind} {key}\n" for end in link)


def setup(nodes: Sequence[ClusterNode], subnets: str, *, dry_run: bool, yes: bool) -> None:
    """Show what every node lacks, ask, and change it; a second time there is nothing to change.

    Raises the first node's error. A node that failed, or was killed, goes on with the same command.
    """
    known = _facts(nodes)
    names = {node.name: [entry.name for entry in ends(known[node.name], node)] for node in nodes}

    def look(node: ClusterNode) -> NodeLook:
        """Ask one node."""
        own = {"own": Path(NETPLAN_FILE).name, "key": KEY, "names": names[node.name]}
        return NodeLook.model_validate(_ask(node, {"mode": "look", **own}))

    looks = all_of(nodes, look)
    links = addresses(nodes, known, looks, subnets)
    plans = wanted(nodes, looks, links)
    changes = all_of(nodes, lambda node: list(_ask(node, {"mode": "differ", **vars(plans[node.name])})["changes"]))
    show(changes, nodes, looks)
    if not any(changes.values()) and looks[nodes[0].name].public_key:
        say("nothing to change")
        return
    if dry_run:
        return
    question = "change this? Networks of these machines can be interrupted for a moment"
    if not (yes or confirmed(question, "cluster.setup asks first", "./inv cluster.setup --yes")):
        return
    head = nodes[0]
    _ask(head, {"mode": "apply", **vars(plans[head.name])})
    looks = {**looks, head.name: look(head)}  # with the key that it has now
    plans = wanted(nodes, looks, links)
    all_of(nodes[1:], lambda node: _ask(node, {"mode": "apply", **vars(plans[node.name])}))
    _settle(nodes, plans)
    say("the link is configured; next: ./inv cluster.discover, then ./inv cluster.check")


def show(
    changes: Mapping[str, Sequence[Mapping[str, Any]]], nodes: Sequence[ClusterNode], looks: Mapping[str, NodeLook]
) -> None:
    """Print every change, files with their text."""
    for name, wants in changes.items():
        for item in wants:
            for index, line in enumerate(describe(item)):
                echo(f"{name}: {line}" if not index else f"    {line}")
    if not looks[nodes[0].name].public_key:
        for node in nodes[1:]:
            path = f"{looks[node.name].home}/.ssh/authorized_keys"
            echo(f"{node.name}: one line more in {path}: the new key, for the head's addresses at the link only")


def describe(item: Mapping[str, Any]) -> list[str]:
    """Return a change in lines for people."""
    match item["kind"]:
        case "file":
            verb = "replace" if item["replaces"] else "write"
            return [f"{verb} {item['path']} (mode {item['mode']:o})", *item["text"].splitlines()]
        case "line":
            return [f"one line more in {item['path']}:", item["line"]]
        case "key":
            return [f"make the key pair {item['path']}, without a passphrase"]
        case "kernel":
            return [f"{item['name']} = {item['value']} (now {item['before'] or 'unknown'})"]
        case _:
            now = f"{', '.join(item['before']['addresses']) or 'no address'}, MTU {item['before']['mtu']}"
            return [f"{item['name']} gets {', '.join(item['addresses'])}, MTU {item['mtu']} (now {now})"]


def restore(nodes: Sequence[ClusterNode], *, dry_run: bool, yes: bool) -> None:
    """Undo on every node what `setup` changed there, by the node's record.

    Raises ServerError where a file was changed by somebody else since; that one stays, with its entry in the record.
    """
    answers = all_of(nodes, lambda node: _ask(node, {"mode": "restore", "show": True}))
    for name, answer in answers.items():
        for path in answer["undone"]:
            echo(f"{name}: {path} as it was")
    if not any(answer["undone"] or answer["kept"] for answer in answers.values()):
        say("nothing to undo: no node has a record of cluster.setup")
        return
    if dry_run:
        return
    question = "undo this? The nodes lose the link's addresses"
    if not (yes or confirmed(question, "cluster.restore asks first", "./inv cluster.restore --yes")):
        return
    answers = all_of(nodes[::-1], lambda node: _ask(node, {"mode": "restore"}))  # the head's key last
    if kept := [f"{path} on {name}" for name, answer in answers.items() for path in answer["kept"]]:
        why = "somebody has changed it since cluster.setup wrote it"
        fix = "remove it by hand if it is not needed, then ./inv cluster.restore"
        raise ServerError(f"{', '.join(kept)} stays", why, fix, code="server.cluster")
    say("every node is as it was before cluster.setup")


def all_of(nodes: Sequence[ClusterNode], call: Any) -> dict[str, Any]:
    """Call a function with all nodes at the same time. Raises the first one's error, after all have ended."""
    answers = remote.on_all(nodes, call)
    for answer in answers.values():
        if isinstance(answer, SparkforgeError):
            raise answer
    return answers


def _facts(nodes: Sequence[ClusterNode]) -> dict[str, NodeFacts]:
    return all_of(nodes, lambda node: facts.ask(node, {}))


def _ask(node: ClusterNode, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run change.py on a node as root. Raises ProcessError, with who may mend it, and what `remote.document` raises."""
    source = Path(change.__file__).read_text(encoding="utf-8")
    argv = ["sh", "-c", AS_ROOT, "sh", json.dumps(options)]
    try:
        answer = remote.document(node, argv, seconds=CHANGE_SECONDS, stdin=source)
    except ProcessError as error:
        if "sudo" not in error.why:
            raise
        fix = "sudo -v   # then the same command again" if not node.ssh else f"ssh -t {node.ssh} sudo visudo"
        why = f"{error.why}: the link's settings are root's, and sudo must not ask for a password here"
        raise ProcessError(f"no rights of root on {node.name}", why, fix, code="process.failed") from error
    if problem := answer.get("error"):
        failure = f"{node.name} could not be {'changed' if options['mode'] == 'apply' else 'asked'}"
        fix = "mend that, then the same command again; ./inv cluster.restore undoes what was changed"
        raise ProcessError(failure, problem, fix, code="process.failed")
    return dict(answer)


def _settle(nodes: Sequence[ClusterNode], plans: Mapping[str, NodePlan]) -> None:
    """Wait until every interface has its address and MTU. Raises NetworkError with what is missing."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        left = all_of(
            nodes, lambda node: _ask(node, {"mode": "differ", "interfaces": plans[node.name].interfaces})["changes"]
        )
        missing = [f"{name}: {describe(item)[0]}" for name, items in left.items() for item in items]
        if not missing:
            return
        if time.monotonic() > deadline:
            fix = "netplan get; networkctl or nmcli device on that node; ./inv cluster.restore undoes the changes"
            why = "; ".join(missing)
            raise NetworkError("the link is written down, but not as it is to be", why, fix, code="network.node")
        time.sleep(1)


def _refused(failure: str, why: str, fix: str) -> RefusalError:
    return RefusalError(failure, why, fix, code="validation.cluster")
