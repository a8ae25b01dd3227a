"""A plan as tables in a terminal, and the verb's whole way from words to tables or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.table import Column, Table

from sparkforge.console import console, say
from validate import plan as plans
from validate.choose import Profile
from validate.devices import GIB
from validate.plan import CITED_NAMES
from validate.plan_document import Plan

UNKNOWN = "-"
QUANTITIES = {"interactivity": "each", "output_throughput": "all", "prefill": "prefill"}


def show(words: Mapping[str, str], known: Mapping[str, Any], profiles: Mapping[str, Any], *, as_json: bool) -> None:
    """Plan as the words say (model, device, context, concurrency, kv_dtype, resident) and show it.

    `known` and `profiles` come from serve: its stored configurations and its serve profiles. Raises PlanInputError,
    UsageError, PlanTableError; ModelTooLargeError after the plan was shown.
    """
    of = plans.subject(words["model"], known)
    on = plans.device(words["device"], words["resident"])
    flags = {
        name: Profile(about=each.about, words=each.words(), variables=each.variables())
        for name, each in profiles.items()
    }
    made = plans.make(of, words["device"], on, plans.asked(words, of.model, on, flags), flags)
    if as_json:
        print(made.model_dump_json(indent=2), flush=True)
    else:
        tables(made)
    plans.require_fit(made)


def tables(made: Plan) -> None:
    """Print every table."""
    say(f"computed, not measured · {made.model.name} on {made.device.described.about}")
    say(f"model: {made.model.source}")
    for table in (weights(made), memory(made)):
        console().print(table)
    fitting(made)
    console().print(decoding(made))
    say("experts: by even routing; best: all tok/s if every token chose the same; GB, ms: of a step")
    for table in (reading(made), *_judged(made)):
        console().print(table)
    if any(each.share > 1 for each in made.cited):
        say("over 100 %: those requests shared more experts than even routing has them share")
    for row in made.measured:
        say(f"measured · {row.told}" + (f". Likely: {row.causes}. Next: ./inv doctor" if row.causes else ""))
    say(f"{'serve' if made.recommended else 'next'}: {made.advice}")


def weights(made: Plan) -> Table:
    """Weights by part, and the sum against the checkpoint's real size."""
    unit, size = ("GB", 1e9) if made.model.computed >= 1e9 else ("MB", 1e6)
    table = Table("weights", "format", _right(unit), title="weights · computed", box=SIMPLE)
    for row in made.weights:
        table.add_row(row.name, row.form, f"{row.bytes / size:.3f}")
    table.add_row("sum", "", f"{made.model.computed / size:.3f}")
    if made.model.on_disk:
        off = made.model.computed / made.model.on_disk - 1
        table.add_row("the checkpoint has", f"{off:+.2%}", f"{made.model.on_disk / size:.3f}")
    return table


def memory(made: Plan) -> Table:
    """The budget, line by line, to the whole memory."""
    title = f"memory · computed · {made.asked.concurrency} x {made.asked.context} tokens, KV in {made.asked.kv}"
    table = Table("use", _right("GiB"), "share", "from", title=title, box=SIMPLE)
    for row in made.budget:
        table.add_row(row.name, _gib(row.bytes), "yes" if row.share else "", row.how)
    table.add_row("left, and page cache", _gib(made.left_bytes), "", "")
    table.add_row("memory", _gib(made.memory_bytes), "", made.device.described.memory.origin)
    return table


def fitting(made: Plan) -> None:
    """Say what fits."""
    fit, asked = made.fit, made.asked
    verdict = "fits" if fit.fits else f"does not fit: {_gib(fit.missing_bytes)} GiB are missing"
    say(f"{verdict}: a share of {fit.needed_share:.2f} is needed, {fit.most_share:.2f} can be had")
    say(f"at {asked.context} tokens each: at most {fit.most_sequences} sequences")
    say(f"with {asked.concurrency} sequences: at most {fit.most_tokens} tokens each")


def decoding(made: Plan) -> Table:
    """Decode ceilings by batch."""
    columns = ("at once", "experts", "GB", "ms", "tok/s", "all", "best", "FLOP/B")
    title = f"decode ceiling · computed · {made.asked.context} tokens behind each"
    table = Table(*(_right(name) for name in columns), "bound", title=title, box=SIMPLE)
    for row in made.decode:
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


def reading(made: Plan) -> Table:
    """Prefill ceilings by prompt."""
    columns = ("prompt", "ms to first token", "tok/s", "FLOP/B")
    title = f"prefill ceiling · computed · one prompt, {made.prefill[0].chunk} tokens a step"
    table = Table(*(_right(name) for name in columns), "bound", title=title, box=SIMPLE)
    for row in made.prefill:
        speed = _speed(row.rate)
        table.add_row(str(row.prompt), _ms(row.seconds), speed, f"{row.intensity:.0f}", row.bound)
    return table


def _judged(made: Plan) -> list[Table]:
    found = []
    if made.profiles:
        table = Table("profile", _right("share"), _right("needs"), "", title="serve profiles · computed", box=SIMPLE)
        for row in made.profiles:
            mark = "recommended" if row.name == made.recommended else "fits"
            table.add_row(row.name, f"{row.share:.2f}", f"{row.needed:.2f}", "; ".join(row.against) or mark)
        found.append(table)
    if made.cited:
        whose = Column("whose", max_width=18)
        columns = (whose, "in/out", "", _right("cited"), _right("computed"), _right("share"), "formats")
        table = Table(*columns, title="others' tok/s (cited), and the bound for their formats (computed)", box=SIMPLE)
        for each, before in zip(made.cited, (None, *made.cited), strict=False):
            name = "" if before and before.whose == each.whose else each.whose.removeprefix(f"{CITED_NAMES}, ")
            figures = (f"{each.cited:.1f}", _speed(each.computed), f"{each.share:.0%}")
            table.add_row(name, each.shape, QUANTITIES[each.quantity], *figures, f"{each.dense} {each.kv}")
        found.append(table)
    return found


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def _ms(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1000:.1f}"


def _speed(rate: float | None) -> str:
    return UNKNOWN if rate is None else f"{rate:.1f}" if rate < 1000 else f"{rate:.0f}"
