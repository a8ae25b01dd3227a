"""Results as tables in a terminal, and how figures are written there and in reports."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sparkforge.bench.schema import Result
from sparkforge.core.console import console
from sparkforge.plan.cited import CitedFigure

PER_GPU = "in+out tok/s/GPU"  # tput_per_gpu: unlike output tok/s it counts the prompts' tokens
COLUMNS = ("shape", "", "out\ntok/s", "in+out\ntok/s\n/GPU", "out\ntok/s\n/user", "TTFT", "TPOT", "ITL", "E2E")


def format_figure(value: float | None) -> str:
    """Return a figure with about four significant digits; `-` where there is none."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"


def print_results(results: Sequence[Result], figures: Sequence[CitedFigure], missing: Sequence[str] = ()) -> None:
    """Print measured figures, ratios, and in a table of their own what others published.

    `missing` are sentences about figures that nobody has published.
    """
    measured = Table(*COLUMNS, title="measured · ms: median, below it p99", box=SIMPLE)
    ratios = Table("isl/osl conc", "quantity", "ours / theirs", "", "theirs", title="ratios")
    for result in results:
        measured.add_row(result.config.shape, "✓" if result.passed else "✗", *_figures(result))
        for r in result.ratios:
            better = "better" if r.better else "worse"
            ratios.add_row(result.config.shape, r.quantity, f"{r.ratio:.3f}", better, f"{r.figure}, {r.date}")
    tables: list[RenderableType] = [measured, *([ratios] if ratios.row_count else []), *map(Text, missing)]
    if figures:
        cited = Table("published by", "shape", "figures", "source", "date", title="cited, not measured here")
        for published in figures:
            values = ", ".join(f"{name} {value:g}" for name, value in published.values.items())
            cited.add_row(published.name, published.shape_text, values, published.source, published.date)
        tables.append(cited)
    console().print(*tables)


def _figures(result: Result) -> list[str]:
    metrics = result.metrics
    if metrics is None:
        return ["; ".join(result.reasons)[:120]]
    speeds = (metrics.output_throughput, metrics.tput_per_gpu, metrics.interactivity)
    latencies = (metrics.ttft_ms, metrics.tpot_ms, metrics.itl_ms, metrics.e2el_ms)
    medians = [f"{format_figure(value.median)}\n{format_figure(value.p99)}" if value else "-" for value in latencies]
    return [*map(format_figure, speeds), *medians]
