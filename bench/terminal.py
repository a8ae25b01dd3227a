"""Results as tables in a terminal, and a load as llama-benchy shows it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from bench.baselines import Figure
from bench.page import figure
from bench.schema import Result, Spread
from sparkforge.console import console

COLUMNS = ("shape", "", "out tok/s", "/GPU", "/user", "TTFT", "TPOT", "ITL", "E2E")


@dataclass(frozen=True)
class Row:
    """One line of a pp/tg table: tokens a second of all requests together and of each, mean and standard deviation."""

    test: str
    total: float | None
    each: float
    deviation: float
    first_ms: float | None = None


def show(results: Sequence[Result], figures: Sequence[Figure]) -> None:
    """Print measured figures, the pp/tg table, and apart from them what others published."""
    measured = Table(*COLUMNS, title="measured · ms: median, below it p99", box=SIMPLE)
    for result in results:
        measured.add_row(*cells(result))
    console().print(measured)
    if rows := [row for result in results for row in benchy(result)]:
        console().print(benchy_table(rows))
    if any(result.ratios for result in results):
        console().print(ratio_table(results))
    if figures:
        console().print(cited_table(figures))


def cells(result: Result) -> list[str]:
    """Return a result's line of the table."""
    c, m = result.config, result.metrics
    begin = [f"{c.isl}/{c.osl} c{c.conc}", "✓" if result.passed else "✗"]
    if m is None:
        return [*begin, "; ".join(result.reasons)[:120]]
    speeds = [figure(speed) if speed else "-" for speed in (m.output_throughput, m.tput_per_gpu, m.interactivity)]
    return [*begin, *speeds, *(pair(value) for value in (m.ttft_ms, m.tpot_ms, m.itl_ms, m.e2el_ms))]


def pair(value: Spread | None) -> str:
    """Return median and, below it, 99th percentile."""
    return f"{figure(value.median)}\n{figure(value.p99)}" if value else "-"


def benchy(result: Result) -> list[Row]:
    """Return prompt processing and token generation as llama-benchy names them (ppN, tgN), from the same requests.

    pp of a request is its prompt's tokens over its time to the first token, so it holds the time in the server's queue;
    the pure speed is the one at concurrency 1. tg is (tokens - 1) over the time behind the first token.
    """
    c, m, done = result.config, result.metrics, result.requests
    if m is None or not result.passed:
        return []
    prefill = [r.prompt_tokens / r.ttft_ms * 1000 for r in done if r.ttft_ms > 0]
    decode = [1000 / r.tpot_ms for r in done if r.tpot_ms]
    rows = []
    if prefill:
        first = statistics.fmean(r.ttft_ms for r in done)
        rows.append(Row(f"pp{c.isl} (c{c.conc})", None, *mean_and_deviation(prefill), first_ms=first))
    if decode:
        rows.append(Row(f"tg{c.osl} (c{c.conc})", m.output_throughput, *mean_and_deviation(decode)))
    return rows


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def benchy_table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table("test", "t/s (total)", "t/s (req)", "ttfr ms", title="llama-benchy style")
    for row in rows:
        total = "" if row.total is None else f"{row.total:.2f}"
        first = "" if row.first_ms is None else f"{row.first_ms:.2f}"
        table.add_row(row.test, total, f"{row.each:.2f} ± {row.deviation:.2f}", first)
    return table


def ratio_table(results: Sequence[Result]) -> Table:
    """Return ours over theirs, where the shape is the very same."""
    table = Table("isl/osl conc", "quantity", "ours / theirs", "", "theirs", title="ratios")
    for result in results:
        c = result.config
        for r in result.ratios:
            better = "better" if r.better else "worse"
            table.add_row(f"{c.isl}/{c.osl} c{c.conc}", r.quantity, f"{r.ratio:.3f}", better, f"{r.figure}, {r.date}")
    return table


def cited_table(figures: Sequence[Figure]) -> Table:
    """Return what others published; none of it was measured here."""
    table = Table("whose", "shape", "figures", "source", "date", title="cited, not measured here")
    for each in figures:
        values = ", ".join(f"{name} {value:g}" for name, value in each.values.items())
        table.add_row(each.name, each.told_shape, values, each.source, each.date)
    return table
