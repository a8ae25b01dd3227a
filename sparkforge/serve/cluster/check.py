"""Ask all nodes, try what comes from one to another, and judge: `./inv cluster.discover`, `./inv cluster.check`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from sparkforge.core.console import say
from sparkforge.core.errors import InputError, RefusalError, SparkforgeError, UsageError
from sparkforge.models import table as models
from sparkforge.pins import locks
from sparkforge.plan import architecture, choose
from sparkforge.plan.architecture import Architecture
from sparkforge.serve import profiles, settings
from sparkforge.serve.cluster import checks, discover, facts, remote
from sparkforge.serve.cluster.checks import ClusterFacts
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.cluster.facts import NodeFacts, Reach
from validate.checks.finding import Finding, Status
from validate.report import one_line

# Gloo and vLLM's message queues listen on ports that the kernel chooses: a firewall that lets only named ones through
# stops them. One such port stands for all.
CHOSEN_PORT = 47_113


def find_nodes(destinations: Sequence[str], device: str, folder: str) -> ClusterConfig:
    """Ask machines by their names for ssh, the head first, and return a configuration; `local` is this machine.

    Raises UsageError for fewer than two, a malformed name, or one machine named twice; the first node's error if one
    does not answer; RefusalError if they share no network.
    """
    refused = "these machines make no cluster.toml"
    fix = "./inv cluster.discover --nodes local,spark-2   # each machine once; --folder takes an absolute path"
    try:
        asked = [
            ClusterNode(
                name=re.sub(r"[^A-Za-z0-9_.-]", "-", destination.rpartition("@")[2]),
                ssh="" if destination == "local" else destination,
                address=f"0.0.0.{index}",  # not known yet, as the interface
                interface="unknown",
            )
            for index, destination in enumerate(destinations)
        ]
    except ValueError as error:
        why = "--nodes takes names for ssh, such as nvidia@spark-2, and local"
        raise UsageError(f"--nodes {','.join(destinations)} has no meaning", why, fix) from error
    names = [node.name for node in asked]
    if len(set(names)) < max(2, len(names)):
        twice = [name for name in names if names.count(name) > 1]
        why = f"--nodes names {twice[0]} twice" if twice else "a cluster has two nodes or more; local is this machine"
        raise UsageError(refused, why, fix)
    known = remote.on_every(asked, facts.ask)
    for line in (*discover.describe(known), *discover.link_commands(known)):
        say(line)
    try:
        return discover.propose(known, {node.name: node.ssh for node in asked}, device, folder)
    except ValidationError as error:  # such as two names of one machine
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'nodes'}: {first['msg']}"
        raise UsageError(refused, why, fix) from error


def look(config: ClusterConfig) -> ClusterFacts:
    """Return what there is to judge: facts of all nodes, and what comes from one to another."""
    image = f"sparkforge/vllm:{config.stack}" if config.in_containers else ""
    answers = remote.on_all(
        config.nodes, lambda node: facts.ask(node, ports=config.ports(node), model=config.model, image=image)
    )
    known = {name: answer for name, answer in answers.items() if isinstance(answer, NodeFacts)}
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, SparkforgeError)}
    lock = locks.lock_path(config.stack).read_text(encoding="utf-8")
    nccl = re.search(r"^nvidia-nccl-cu\d+==(\S+)", lock, re.MULTILINE)
    return ClusterFacts(
        config,
        known,
        errors,
        dict(_reaches(config, known)),
        nccl=nccl[1] if nccl else "",
        model=_model(config),
        head=_head_format(config),
    )


def _reaches(
    config: ClusterConfig, known: Mapping[str, NodeFacts]
) -> Iterator[tuple[tuple[str, str], Reach | SparkforgeError]]:
    """Yield what comes through, both ways between the head and each worker, then on every other subnet of two nodes."""
    head, nodes = config.head, {node.name: node for node in config.nodes}
    ways: list[tuple[ClusterNode, ClusterNode, str, str, tuple[int, ...]]] = []
    for worker in config.workers:
        if config.mode == "replicas":
            ways.append((head, worker, head.address, worker.address, (config.replica_port,)))
            continue
        ways.append((worker, head, worker.address, head.address, (config.master_port, config.watch_port)))
        ways.append((head, worker, head.address, worker.address, (CHOSEN_PORT,)))
    control = {node.address for node in config.nodes}
    for first, own, second, other in discover.pairs(config, known):
        if not {own, other} <= control:
            ways.append((nodes[first], nodes[second], own, other, (CHOSEN_PORT,)))
    for sender, receiver, own, other, ports in ways:
        if sender.name not in known or receiver.name not in known:
            continue
        mtu = max((e.mtu for e in known[sender.name].interfaces or () if own in e.hosts), default=1500)
        try:
            answer: Reach | SparkforgeError = facts.reach(sender, receiver, ports, mtu, (own, other))
        except SparkforgeError as error:
            answer = error
        yield (f"{sender.name} {own}", f"{receiver.name} {other}"), answer


def _model(config: ClusterConfig) -> Architecture | None:
    """Return the sizes of the model; None if its folder is not on this machine and its name is not known."""
    known = models.load()
    served = "gpt-oss-120b" if config.has_gpus else settings.TINY_ID
    name = Path(config.model).name if config.model else served
    try:
        return architecture.parse(known[name].config, name) if name in known else architecture.read(Path(config.model))
    except InputError:
        return None


def _head_format(config: ClusterConfig) -> str:
    rows = choose.read_profiles(profiles.load(stack=config.stack))
    name = config.profile or settings.DEFAULTS["spark" if config.has_gpus else "embedded"][0]
    if name not in rows:
        profiles.named(name, stack=config.stack)
    return rows[name].dense.head


def require_fine(findings: Sequence[Finding]) -> None:
    """Raise RefusalError, with the first finding's fix, if a check failed."""
    refusing = [finding for finding in findings if finding.status is Status.FAIL]
    if refusing:
        names = ", ".join(finding.check for finding in refusing)
        why = f"{refusing[0].check}: {one_line(refusing[0].evidence)}"
        raise RefusalError(f"the cluster is refused by {names}", why, refusing[0].fix, code="validation.cluster")


def checked(config: ClusterConfig) -> list[Finding]:
    """Return the findings about a cluster as it is now."""
    return checks.evaluate_all(look(config))
