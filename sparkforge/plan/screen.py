"""The command `./inv plan`: compute a plan from its options, and print tables or JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.box import SIMPLE
from rich.table import Column, Table

from sparkforge.core.console import console, echo_json, say
from sparkforge.plan import cluster, planner
from sparkforge.plan.choose import ServerOptions
from sparkforge.plan.cluster import ClusterPlan
from sparkforge.plan.devices import GIB
from sparkforge.plan.document import Plan, Speculation
from sparkforge.plan.planner import PlanRequest, Subject
from sparkforge.plan.speed import NAMES, CitedFigure

UNKNOWN = "-"
QUANTITIES = {"interactivity": "each", "output_throughput": "all", "prefill": "prefill"}


def report(
    request: PlanRequest,
    subject: Subject,
    profiles: Mapping[str, ServerOptions],
    figures: Sequence[CitedFigure],
    *,
    gpu: str = "",
    as_json: bool,
) -> None:
    """Compute the plan and print it.

    `figures` are those of sparkforge/bench/baselines.toml, and `gpu` is the name of this machine's GPU, for the device
    `this`. Raises InputError and UsageError. Raises RefusalError after printing if the workload does not fit, or if
    the last measured speed is far too low.
    """
    device = planner.read_device(request.device, request.resident, gpu)
    load = planner.read_load(request, subject.model, device, profiles)
    load = replace(load, draft=planner.read_draft(request.draft, subject))
    plan = planner.make_plan(subject, device, load, profiles, request, figures)
    if as_json:
        echo_json(plan.model_dump(mode="json"))
    else:
        _print_plan(plan)
    planner.require_fit(plan)
    planner.require_speed(plan)


def _print_plan(plan: Plan) -> None:
    say(f"computed, not measured · {plan.model.name} on {plan.device.described.about}")
    say(f"model: {plan.model.source}")
    _print_memory(plan)
    _print_speed(plan)
    _print_formats(plan)
    rows = list[tuple[str, ...]]()
    for profile in plan.profiles:
        verdict = "; ".join(profile.against) or ("recommended" if profile.name == plan.recommended else "fits")
        rows.append((profile.name, f"{profile.share:.2f}", f"{profile.needed:.2f}", verdict))
    _print("serve profiles · computed", ("profile", ">share", ">needs", ""), rows)
    if plan.speculation:
        _print_speculation(plan.speculation)
    if plan.cluster:
        _print_cluster(plan.cluster)
    _print_cited(plan)
    for row in plan.measured:
        say(f"measured · {row.told}" + (f". Likely: {row.causes}. Next: ./inv doctor" if row.causes else ""))
    say(f"{'serve' if plan.recommended else 'next'}: {plan.advice}")


def _print_memory(plan: Plan) -> None:
    fit, asked, model = plan.fit, plan.asked, plan.model
    unit, size = ("GB", 1e9) if model.computed >= 1e9 else ("MB", 1e6)
    weights = [(row.name, row.form, f"{row.bytes / size:.3f}") for row in plan.weights]
    weights.append(("sum", "", f"{model.computed / size:.3f}"))
    if model.on_disk:
        off = model.computed / model.on_disk - 1
        weights.append(("the checkpoint has", f"{off:+.2%}", f"{model.on_disk / size:.3f}"))
    _print("weights · computed", ("weights", "format", f">{unit}"), weights)
    uses = [(row.name, _gib(row.bytes), "yes" if row.share else "", row.how) for row in plan.budget]
    uses.append(("left, and page cache", _gib(plan.left_bytes), "", ""))
    uses.append(("memory", _gib(plan.memory_bytes), "", plan.device.described.memory.origin))
    title = f"memory · computed · {asked.concurrency} x {asked.context} tokens, KV in {asked.kv}"
    _print(title, ("use", ">GiB", "share", "from"), uses)
    verdict = "fits" if fit.fits else f"does not fit: {_gib(fit.missing_bytes)} GiB are missing"
    say(f"{verdict}: it needs a share of {fit.needed_share:.2f}, {fit.most_share:.2f} is available")
    say(f"at {asked.context} tokens each: at most {fit.most_sequences} sequences")
    say(f"with {asked.concurrency} sequences: at most {fit.most_tokens} tokens each")


def _print_speed(plan: Plan) -> None:
    rows = list[tuple[str, ...]]()
    for row in plan.decode:
        work = (str(row.batch), f"{row.experts:.1f}", f"{row.bytes / 1e9:.2f}", _ms(row.seconds))
        rows.append((*work, *map(_speed, (row.each, row.total, row.best_total)), row.bound))
    columns = (">at once", ">experts", ">GB", ">ms", ">tok/s", ">all", ">best", "bound")
    _print(f"decode ceiling · computed · {plan.asked.context} tokens of context each", columns, rows)
    say("experts: with even routing; best: tok/s of all if every token chose the same experts; GB, ms: per step")
    _print(
        f"prefill ceiling · computed · one prompt, {plan.prefill[0].chunk} tokens a step",
        (">prompt", ">ms to first token", ">tok/s", "bound", ">ours, ms (forecast)"),
        [(str(row.prompt), _ms(row.seconds), _speed(row.rate), row.bound, _ms(row.forecast)) for row in plan.prefill],
    )
    if plan.few_tokens:
        say(f"experts: our kernels (spark-mxfp4) read each weight once in steps of up to {plan.few_tokens:,} tokens,")
        say("CUTLASS's (safe, fast) do so in every step: use ours for decoding · computed, not run on 12.1")


def _print_formats(plan: Plan) -> None:
    context, users = plan.asked.context, [f">{count}" for count in plan.formats[0].users]
    rows, forecasts = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for row in plan.formats:
        name, freed = f"{row.attention}/{row.head}", (_gib(row.freed_bytes), f"{row.kv_tokens:,}")
        rows.append((name, f"{row.bytes / 1e9:.2f}", *map(_speed, row.each), *(freed if row.kv_tokens else ("", ""))))
        if steps := list(filter(None, row.forecasts)):
            parts = map(_ms, (steps[0].seconds, steps[0].experts, steps[0].dense, steps[0].rest))
            forecasts.append((name, *(_speed(1 / step.seconds) for step in steps), *parts))
    title = f"formats of attention/LM head · computed · tok/s per user by users, {context} tokens of context"
    _print(title, ("format", ">GB", *users, ">GiB", ">KV tokens"), rows)
    say("GB: read for a token; GiB, KV tokens: memory that the format frees, and the KV cache that fits there")
    if (kernels := plan.device.described.kernels) and plan.formats[0].forecasts[0]:
        title = f"the same with our kernels · forecast · {context} tokens of context; ms of a step for one user"
        _print(title, ("format", *users, ">ms", ">experts", ">dense", ">rest"), forecasts)
        experts, rest = kernels.experts.points, kernels.rest.points
        shares = f"{experts[0].value:.1%} of it, {experts[-1].value:.0%} from {experts[-1].at:g} tokens per expert on"
        say(f"assumed, mostly from an H100: {kernels.read.value:g} GB/s; experts at {shares},")
        gap, dense = f"{kernels.gap.value:g} µs between layers", f"dense at {kernels.dense.value:.0%}"
        say(f"{gap}; {dense}; rest {rest[0].value:g} to {rest[-1].value:g} µs a layer (--json: sources)")
    for packed in plan.formats[1:]:
        if packed.profiles:
            say(f"{packed.attention}/{packed.head}: {', '.join(packed.profiles)}")
    rows = [(row.kv, f"{row.token_bytes:,}", str(row.sequences), f"{row.tokens:,}") for row in plan.caches]
    title = f"KV cache by type · computed · sequences of {context} tokens that fit"
    _print(title, ("type", ">bytes a token", ">sequences", ">tokens"), rows)
    if plan.formats[1:]:
        say("fewer bits cost accuracy: ./inv bench.bakeoff --profiles A,B measures both and ranks those that pass")


def _print_cited(plan: Plan) -> None:
    rows, before = list[tuple[str, ...]](), ""
    for row in plan.cited:
        whose = row.whose.removeprefix(NAMES[0]) if before != row.whose else ""
        speeds = (f"{row.cited:.1f}", _speed(row.computed), f"{row.share:.0%}", _speed(row.forecast))
        rows.append((whose, row.shape, QUANTITIES[row.quantity], *speeds, f"{row.dense} {row.kv}"))
        before = row.whose
    title = "others' tok/s (cited), the bound in their formats (computed), our kernels in these (forecast)"
    _print(title, ("whose", "in/out", "", ">cited", ">bound", ">share", ">ours", "formats"), rows)
    if any(figure.share > 1 for figure in plan.cited):
        say("over 100 %: those requests shared more experts than with even routing")


def _print_speculation(speculation: Speculation) -> None:
    """Print the tokens that a step must gain for a speedup, and the speedup for several numbers of tokens."""
    draft = speculation.draft
    rows = list[tuple[str, ...]]()
    for row in speculation.rows:
        rows.append((row.dense, str(row.batch), *(_number(gain, ".2f") for gain in (row.break_even, *row.gains))))
    title = f"speculation · computed · {draft.method}, {draft.tokens} tokens · speedup by tokens gained per step"
    columns = ("format", ">at once", ">break-even", *(f">{tokens}" for tokens in speculation.accepted))
    _print(title, columns, rows)
    say(f"draft: {draft.repository or draft.method} · {draft.source}")
    say(f"off by default; try it: ./inv up … -- {draft.flag()}")


def _print_cluster(plan: ClusterPlan) -> None:
    rows = list[tuple[str, ...]]()
    for row in plan.ways:
        verdict = "impossible" if row.against else "fits" if row.fits else "does not fit"
        memory = (_gib(row.weights_bytes), _gib(row.kv_bytes), f"{row.share:.2f}")
        rows.append((row.way, *memory, verdict, f"{row.link_bytes / 1e3:.0f}", _ms(row.link_seconds)))
    columns = ("way", ">weights GiB", ">KV GiB", ">share", "", ">kB a token", ">ms a step")
    _print(f"{plan.nodes} machines · computed · memory of one machine; link traffic of one user", columns, rows)
    for row in plan.ways:
        for objection in row.against:
            say(f"{row.way}: {objection}")
    rows = [(str(row.users), *map(_speed, (row.single, *map(row.ways.get, cluster.WAYS)))) for row in plan.speeds]
    _print("tok/s of all users · computed", (">users", ">one machine", *(f">{way}" for way in cluster.WAYS)), rows)
    say(f"a server works on {plan.sequences} users at once (--max-num-seqs); the others wait")
    crossover = "no number of users" if plan.crossover is None else f"{plan.crossover} users on"
    say(f"replicas have more tokens a second in total from {crossover}")
    say(f"{plan.nodes} machines: {plan.recommended}, because {plan.why}")


def _print(title: str, columns: Iterable[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, unless it has no rows; a column whose name begins with `>` is aligned right."""
    if rows:
        headings = [Column(name.removeprefix(">"), justify="right" if name[:1] == ">" else "left") for name in columns]
        table = Table(*headings, title=title, box=SIMPLE)
        for row in rows:
            table.add_row(*row)
        console().print(table)


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def _ms(seconds: float | None) -> str:
    return _number(seconds and seconds * 1000, ".1f")


def _speed(rate: float | None) -> str:
    return _number(rate, ".1f" if (rate or 0.0) < 1000 else ".0f")


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
