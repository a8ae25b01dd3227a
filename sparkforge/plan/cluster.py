"""One model on several machines: memory of each, bytes over the link, best speed, and when replicas are faster.

There are four ways to use N machines with one GPU each: `tensor` splits every layer, `expert` splits attention and
gives each machine whole experts, `pipeline` gives each machine some of the layers, `replicas` are N separate servers
that share the users. The figures come from the roofline of a plan for one machine and the link's cited latencies.
Experts are assumed to be spread evenly over the machines.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sparkforge.core.errors import UsageError
from sparkforge.core.tables import Figure, Record
from sparkforge.plan import budget, roofline
from sparkforge.plan.architecture import BLOCK, Architecture, DenseFormat
from sparkforge.plan.budget import Workload
from sparkforge.plan.devices import Device, Interconnect
from sparkforge.plan.roofline import Work

USERS = (1, 4, 8, 16, 32, 64)
MOST_NODES = 128
MOST_USERS = 1024  # the search for a crossover ends here
HIDDEN_BYTES = 2  # a hidden state's element, bf16
Way = Literal["tensor", "expert", "pipeline", "replicas"]
SPLIT: tuple[Way, ...] = ("tensor", "expert", "pipeline")
WAYS: tuple[Way, ...] = (*SPLIT, "replicas")


class ClusterSpeed(Record):
    """Upper bounds of the tokens per second of all users: on one machine, and with each way. None: not known."""

    users: int
    single: float | None
    ways: dict[Way, float | None]


class WayRow(Record):
    """A way to use the machines. Bytes are per machine; `link_bytes` are sent by one machine for a token of one user.

    `against` has the reasons why the model cannot be split this way; empty if it can. `share` is of the device's
    memory.
    """

    way: Way
    weights_bytes: int
    kv_bytes: int
    share: float
    fits: bool
    link_bytes: float
    link_seconds: float | None
    against: tuple[str, ...]


class ClusterPlan(Record):
    """The part of a plan that `./inv plan --nodes N` adds.

    `crossover` is the least number of users for which replicas are fastest; None: there is none.
    """

    nodes: int
    link: Figure
    sequences: int
    ways: list[WayRow]
    speeds: list[ClusterSpeed]
    crossover: int | None
    recommended: Way
    why: str


def make(model: Architecture, device: Device, asked: Workload, nodes: int) -> ClusterPlan:
    """Return the plan for `nodes` machines. Raises UsageError for a device without a link."""
    if device.link is None:
        fix = "--device spark"
        raise UsageError(f"{device.about} has no link in devices.toml", "its network is not known", fix)
    ways = [_way(model, device, asked, nodes, way) for way in WAYS]
    crossover = None
    for users in range(1, MOST_USERS + 1):
        alone = total(model, device, asked, nodes, users, "replicas")
        split_speeds = [speed for way in SPLIT if (speed := total(model, device, asked, nodes, users, way))]
        if alone and (not split_speeds or alone > max(split_speeds)):
            crossover = users
            break
    recommended, why = _recommend(ways, asked, crossover)
    return ClusterPlan(
        nodes=nodes,
        link=device.link.bandwidth,
        sequences=asked.sequences,
        ways=ways,
        speeds=[speeds(model, device, asked, nodes, users) for users in USERS],
        crossover=crossover,
        recommended=recommended,
        why=why,
    )


def objections(model: Architecture, nodes: int, way: Way) -> tuple[str, ...]:
    """Return the reasons why vLLM cannot split the model this way; empty if it can."""
    split_attention, width = way in ("tensor", "expert"), model.intermediate or model.active
    against = {
        f"{model.heads} heads are not a multiple of {nodes}": split_attention and model.heads % nodes,
        f"neither {model.kv_heads} KV heads nor {nodes} machines are a multiple of the other": split_attention
        and model.kv_heads % nodes
        and nodes % model.kv_heads,
        f"{model.experts} experts are not a multiple of {nodes}": way == "expert" and model.experts % nodes,
        f"{model.layers} layers are fewer than {nodes}": way == "pipeline" and model.layers < nodes,
        # vLLM 0.32.0 (models/gpt_oss.py:390) compares with the number of all processes, also in a pipeline.
        f"an intermediate size of {width} is not a multiple of {nodes}": way != "replicas" and width % nodes,
    }
    return tuple(objection for objection, applies in against.items() if applies)


def reduce_seconds(link: Interconnect, size: float, nodes: int) -> float:
    """Seconds of one all-reduce of `size` bytes: the cited latency, plus bandwidth time beyond the largest cited size.

    The latencies were measured with two machines. A ring of N takes N - 1 times the steps, each with 2/N of the bytes.
    """
    piece, last = size * 2 / nodes, link.latency.points[-1].at
    beyond = max(0.0, piece - last) / (link.bandwidth.value * 1e9)
    return (nodes - 1) * (link.latency.at(piece) * 1e-6 + beyond)


def link_bytes(model: Architecture, nodes: int, way: Way) -> float:
    """Bytes that one machine sends for a token of one user.

    `tensor` and `expert`: all-reduces of the hidden state (after the embedding, and after attention and experts of each
    layer), each of which sends 2(N-1)/N of the hidden state, and the machine's part of the logits. `pipeline`: one
    hidden state and its residual.
    """
    hidden = HIDDEN_BYTES * model.hidden
    if way == "replicas":
        return 0.0
    if way == "pipeline":
        return 2.0 * hidden
    return (2 * model.layers + 1) * hidden * 2 * (nodes - 1) / nodes + HIDDEN_BYTES * model.vocab / nodes


def link_seconds(model: Architecture, link: Interconnect, batch: int, nodes: int, way: Way) -> float:
    """Seconds that the link adds to a step of `batch` tokens."""
    hidden = batch * HIDDEN_BYTES * model.hidden
    if way == "replicas":
        return 0.0
    if way == "pipeline":
        return nodes * (link.latency.at(0) * 1e-6 / 2 + 2 * hidden / (link.bandwidth.value * 1e9))
    logits = batch * HIDDEN_BYTES * model.vocab / nodes
    return (2 * model.layers + 1) * reduce_seconds(link, hidden, nodes) + reduce_seconds(link, logits, nodes)


def speeds(model: Architecture, device: Device, load: Workload, nodes: int, users: int) -> ClusterSpeed:
    """Return the tokens a second of all `users` together; a server works on `load.sequences` of them at once."""
    ways = {way: total(model, device, load, nodes, users, way) for way in WAYS}
    return ClusterSpeed(users=users, single=total(model, device, load, 1, users, "tensor"), ways=ways)


def total(model: Architecture, device: Device, load: Workload, nodes: int, users: int, way: Way) -> float | None:
    """Return the tokens a second of all `users` together with one way; None if it is impossible or not known."""
    if device.link is None or objections(model, nodes, way):
        return None
    if way == "replicas":
        shares = [users // nodes + (rank < users % nodes) for rank in range(nodes)]
        parts = [total(model, device, load, 1, share, "tensor") for share in shares]
        return None if None in parts else sum(part or 0.0 for part in parts)
    batch = min(users, load.sequences)
    # The machines of a pipeline work on N groups of the users at the same time.
    group, parties = (-(-batch // nodes), 1) if way == "pipeline" else (batch, nodes)
    seconds = roofline.time(split(model, load, group, parties), device).seconds
    return batch / (seconds + link_seconds(model, device.link, group, nodes, way)) if seconds else None


def split(model: Architecture, load: Workload, batch: int, nodes: int) -> Work:
    """Return one machine's work in a decode step that `nodes` machines split; each has all routers and norms."""
    work, whole = roofline.decode(model, batch, load), _replicated_bytes(model, load.dense)
    shared = (work.expert_flops / nodes, work.dense_flops / nodes, work.expert_bytes / nodes)
    return Work((work.bytes - whole) / nodes + whole, *shared, tokens=batch)


def _replicated_bytes(model: Architecture, dense: DenseFormat) -> int:
    return sum(part.bytes for part in model.parts(dense) if part.name in ("router", "norms"))


def _way(model: Architecture, device: Device, load: Workload, nodes: int, way: Way) -> WayRow:
    lines = {line.name: line.bytes for line in budget.share_lines(model, device, load)}
    weights, cache, padding = lines.pop("weights"), lines.pop("KV cache"), lines.pop("padding of experts")
    if way == "replicas":
        cache = budget.kv_bytes(model, replace(load, concurrency=-(-load.concurrency // nodes)))
    elif way == "pipeline":
        most = -(-model.layers // nodes)  # layers of one machine
        weights, cache, padding = (-(-size * most // model.layers) for size in (weights, cache, padding))
    else:
        whole = _replicated_bytes(model, load.dense)
        copies = 1 if model.latent else min(nodes, model.kv_heads)  # every machine has all latent vectors
        weights, cache = (weights - whole) // nodes + whole, cache // copies
        narrow = replace(model, intermediate=-(-model.intermediate // nodes // BLOCK) * BLOCK)
        padding = narrow.padding_bytes(device.align) if way == "tensor" else padding // nodes
    share = (weights + cache + padding + sum(lines.values())) / device.memory_bytes
    against = objections(model, nodes, way)
    return WayRow(
        way=way,
        weights_bytes=weights + padding,
        kv_bytes=cache,
        share=share,
        fits=not against and share <= budget.most_share(device),
        link_bytes=link_bytes(model, nodes, way),
        link_seconds=link_seconds(model, device.link, 1, nodes, way) if device.link else None,
        against=against,
    )


def _recommend(ways: Sequence[WayRow], load: Workload, crossover: int | None) -> tuple[Way, str]:
    fitting = {row.way for row in ways if row.fits}
    split: list[Way] = [way for way in SPLIT if way in fitting]
    if not fitting:
        possible = [row for row in ways if not row.against] or list(ways)
        return min(possible, key=lambda row: row.share).way, "no way fits; this one needs the least memory per machine"
    if "replicas" not in fitting:
        return split[0], "one machine cannot hold the model"
    if crossover is not None and load.concurrency >= crossover:
        return "replicas", f"from {crossover} users on, replicas have more tokens a second in total"
    if not split:
        return "replicas", "the model cannot be split"
    return split[0], f"{load.concurrency} users get more tokens a second than with replicas"
