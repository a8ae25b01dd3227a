"""The command `./inv plan`: from its options to tables in a terminal, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.table import Column, Table

from sparkforge.core.console import console, echo_json, say
from sparkforge.plan import choose, cluster, planner
from sparkforge.plan.choose import ProfileRow
from sparkforge.plan.cited import NAMES, CitedRow
from sparkforge.plan.cluster import ClusterPlan
from sparkforge.plan.devices import GIB
from sparkforge.plan.document import Plan
from sparkforge.plan.planner import KnownModel, PlanRequest

UNKNOWN = "-"
QUANTITIES = {"interactivity": "each", "output_throughput": "all", "prefill": "prefill"}


def report(
    request: PlanRequest,
    known: Mapping[str, KnownModel],
    serve_profiles: Mapping[str, ProfileRow],
    figures: Sequence[CitedRow],
    *,
    gpu: str = "",
    as_json: bool,
) -> None:
    """Compute the plan and print it.

    `known` are the models of sparkforge/models/models.toml, `figures` those of sparkforge/bench/baselines.toml, and
    `gpu` is the name of this machine's GPU, for the device `this`. Raises InputError and UsageError; RefusalError,
    after the plan was printed, if it does not fit.
    """
    subject = planner.read_subject(request.model, known)
    device = planner.read_device(request.device, request.resident, gpu)
    profiles = choose.read_profiles(serve_profiles)
    load = planner.read_load(request, subject.model, device, profiles)
    nodes = cluster.read_nodes(request.nodes) if request.nodes else 0
    plan = planner.make_plan(subject, request.device, device, load, profiles, figures, nodes)
    if as_json:
        echo_json(plan.model_dump(mode="json"))
    else:
        print_tables(plan)
    planner.require_fit(plan)


def print_tables(plan: Plan) -> None:  # noqa: C901 - a table after the other
    """Print every table."""
    say(f"computed, not measured · {plan.model.name} on {plan.device.described.about}")
    say(f"model: {plan.model.source}")
    for table in (_weights(plan), _memory(plan)):
        console().print(table)
    fit, asked = plan.fit, plan.asked
    verdict = "fits" if fit.fits else f"does not fit: {_gib(fit.missing_bytes)} GiB are missing"
    say(f"{verdict}: a share of {fit.needed_share:.2f} is needed, {fit.most_share:.2f} can be had")
    say(f"at {asked.context} tokens each: at most {fit.most_sequences} sequences")
    say(f"with {asked.concurrency} sequences: at most {fit.most_tokens} tokens each")
    console().print(_decode(plan))
    say("experts: by even routing; best: all tok/s if every token chose the same; GB, ms: of a step")
    console().print(_prefill(plan))
    console().print(_formats(plan))
    say("GB: of a token; GiB, KV tokens: memory that is free then, and what it holds of a KV cache")
    for packed in plan.formats[1:]:
        if packed.profiles:
            say(f"{packed.attention}/{packed.head}: {', '.join(packed.profiles)}")
    console().print(_caches(plan))
    if plan.for_users:
        console().print(_for_users(plan))
        say("fewer bits cost accuracy: ./inv bench.bakeoff --profiles A,B measures both and ranks what passes the gate")
    if plan.loading:
        console().print(_loading(plan))
    if plan.profiles:
        console().print(_profiles(plan))
    if plan.cluster:
        _print_cluster(plan.cluster)
    if plan.cited:
        console().print(_cited(plan))
    if any(figure.share > 1 for figure in plan.cited):
        say("over 100 %: those requests shared more experts than even routing has them share")
    for row in plan.measured:
        say(f"measured · {row.told}" + (f". Likely: {row.causes}. Next: ./inv doctor" if row.causes else ""))
    say(f"{'serve' if plan.recommended else 'next'}: {plan.advice}")


def _weights(plan: Plan) -> Table:
    unit, size = ("GB", 1e9) if plan.model.computed >= 1e9 else ("MB", 1e6)
    table = Table("weights", "format", _right(unit), title="weights · computed", box=SIMPLE)
    for row in plan.weights:
        table.add_row(row.name, row.form, f"{row.bytes / size:.3f}")
    table.add_row("sum", "", f"{plan.model.computed / size:.3f}")
    if plan.model.on_disk:
        off = plan.model.computed / plan.model.on_disk - 1
        table.add_row("the checkpoint has", f"{off:+.2%}", f"{plan.model.on_disk / size:.3f}")
    return table


def _memory(plan: Plan) -> Table:
    title = f"memory · computed · {plan.asked.concurrency} x {plan.asked.context} tokens, KV in {plan.asked.kv}"
    table = Table("use", _right("GiB"), "share", "from", title=title, box=SIMPLE)
    for row in plan.budget:
        table.add_row(row.name, _gib(row.bytes), "yes" if row.share else "", row.how)
    table.add_row("left, and page cache", _gib(plan.left_bytes), "", "")
    table.add_row("memory", _gib(plan.memory_bytes), "", plan.device.described.memory.origin)
    return table


def _decode(plan: Plan) -> Table:
    columns = ("at once", "experts", "GB", "ms", "tok/s", "all", "best", "FLOP/B")
    title = f"decode ceiling · computed · {plan.asked.context} tokens behind each"
    table = Table(*(_right(name) for name in columns), "bound", title=title, box=SIMPLE)
    for row in plan.decode:
        table.add_row(
            str(row.batch),
            f"{row.experts:.1f}",
            f"{row.bytes / 1e9:.2f}",
            _ms(row.seconds),
            _speed(row.each),
            _speed(row.total),
            _speed(row.best_total),
            f"{row.intensity:.1f}",
            row.bound,
        )
    return table


def _prefill(plan: Plan) -> Table:
    columns = ("prompt", "ms to first token", "tok/s", "FLOP/B")
    title = f"prefill ceiling · computed · one prompt, {plan.prefill[0].chunk} tokens a step"
    table = Table(*(_right(name) for name in columns), "bound", title=title, box=SIMPLE)
    for row in plan.prefill:
        speed = _speed(row.rate)
        table.add_row(str(row.prompt), _ms(row.seconds), speed, f"{row.intensity:.0f}", row.bound)
    return table


def _formats(plan: Plan) -> Table:
    columns = ("GB", *(str(count) for count in plan.formats[0].users), "GiB", "KV tokens")
    title = f"by format of attention/LM head · computed · tok/s a user for so many, {plan.asked.context} tokens behind"
    table = Table("format", *(_right(name) for name in columns), title=title, box=SIMPLE)
    for row in plan.formats:
        speeds, won = (_speed(rate) for rate in row.each), f"{row.kv_tokens:,}" if row.kv_tokens else ""
        form = f"{row.attention}/{row.head}"
        table.add_row(form, f"{row.bytes / 1e9:.2f}", *speeds, _gib(row.freed_bytes) if won else "", won)
    return table


def _caches(plan: Plan) -> Table:
    title = f"KV cache by type · computed · sequences of {plan.asked.context} tokens that fit"
    columns = ("bytes a token", "sequences", "tokens")
    table = Table("type", *(_right(name) for name in columns), title=title, box=SIMPLE)
    for row in plan.caches:
        table.add_row(row.kv, f"{row.token_bytes:,}", str(row.sequences), f"{row.tokens:,}")
    return table


def _for_users(plan: Plan) -> Table:
    title = f"profile by users · computed · {plan.asked.context} tokens behind each, tok/s a user at most"
    table = Table(_right("users"), "first that fits", _right("tok/s"), "highest bound", _right("tok/s"), title=title)
    table.box = SIMPLE
    for row in plan.for_users:
        cautious, fastest = row.cautious or "none", row.fastest if row.fastest != row.cautious else "the same"
        table.add_row(str(row.users), cautious, _speed(row.cautious_each), fastest, _speed(row.fastest_each))
    return table


def _loading(plan: Plan) -> Table:
    title = "loading the weights · by published rates (cited), none measured by us"
    table = Table("format", _right("GB/s"), _right("s"), "", title=title, box=SIMPLE)
    for row in plan.loading:
        rate = UNKNOWN if row.rate is None else f"{row.rate:g}"
        table.add_row(row.name, rate, UNKNOWN if row.seconds is None else f"{row.seconds:.0f}", row.note)
    return table


def _profiles(plan: Plan) -> Table:
    table = Table("profile", _right("share"), _right("needs"), "", title="serve profiles · computed", box=SIMPLE)
    for row in plan.profiles:
        mark = "recommended" if row.name == plan.recommended else "fits"
        table.add_row(row.name, f"{row.share:.2f}", f"{row.needed:.2f}", "; ".join(row.against) or mark)
    return table


def _cited(plan: Plan) -> Table:
    columns = (Column("whose", max_width=18), "in/out", "", _right("cited"), _right("computed"), _right("share"))
    title = "others' tok/s (cited), and the bound for their formats (computed)"
    table = Table(*columns, "formats", title=title, box=SIMPLE)
    for row, before in zip(plan.cited, (None, *plan.cited), strict=False):
        name = "" if before and before.whose == row.whose else row.whose.removeprefix(f"{NAMES}, ")
        figures = (f"{row.cited:.1f}", _speed(row.computed), f"{row.share:.0%}")
        table.add_row(name, row.shape, QUANTITIES[row.quantity], *figures, f"{row.dense} {row.kv}")
    return table


def _print_cluster(plan: ClusterPlan) -> None:
    """Print how several machines serve the model, beside published figures."""
    console().print(_ways(plan))
    for row in plan.ways:
        for objection in row.against:
            say(f"{row.way}: {objection}")
    console().print(_together(plan))
    say(f"a server works on {plan.sequences} users at once (--max-num-seqs); the others wait")
    crossover = "no number of users" if plan.crossover is None else f"{plan.crossover} users on"
    say(f"servers of their own have more tokens a second in all from {crossover}")
    if plan.cited:
        console().print(_cited_cluster(plan))
        say(f"cited: {plan.cited_source}")
    say(f"{plan.nodes} machines: {plan.recommended}, because {plan.why}")


def _ways(plan: ClusterPlan) -> Table:
    columns = (_right("weights GiB"), _right("KV GiB"), _right("share"), "", _right("kB a token"), _right("ms a step"))
    title = f"{plan.nodes} machines · computed · of one machine; over the link for one user"
    table = Table("way", *columns, title=title, box=SIMPLE)
    for row in plan.ways:
        verdict = "impossible" if row.against else "fits" if row.fits else "does not fit"
        sizes = (_gib(row.weights_bytes), _gib(row.kv_bytes), f"{row.share:.2f}", verdict)
        table.add_row(row.way, *sizes, f"{row.link_bytes / 1e3:.0f}", _ms(row.link_seconds))
    return table


def _together(plan: ClusterPlan) -> Table:
    title = "tok/s of all users · computed"
    table = Table(
        _right("users"), _right("one machine"), *(_right(way) for way in cluster.WAYS), title=title, box=SIMPLE
    )
    for row in plan.speeds:
        table.add_row(str(row.users), _speed(row.single), *(_speed(row.ways[way]) for way in cluster.WAYS))
    return table


def _cited_cluster(plan: ClusterPlan) -> Table:
    columns = (_right("users"), _right("cited gain"), _right("computed gain"), "cited winner", "computed winner")
    table = Table(*columns, title="tensor against one machine (gain), and against two servers (winner)", box=SIMPLE)
    for row in plan.cited:
        gains = (f"{row.cited_gain:.2f}", f"{row.computed_gain:.2f}")
        table.add_row(str(row.users), *gains, row.cited_winner, row.computed_winner)
    return table


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def _ms(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1000:.1f}"


def _speed(rate: float | None) -> str:
    return UNKNOWN if rate is None else f"{rate:.1f}" if rate < 1000 else f"{rate:.0f}"
