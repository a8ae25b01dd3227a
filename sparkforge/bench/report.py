"""Results as tables, in the terminal and on an HTML page. Rich renders both.

A page loads nothing and runs no script. Text from servers and files cannot become markup or control a terminal, and
passwords in URLs are removed, because users share pages. Measured and cited figures are never in the same table.
"""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from sparkforge.bench.schema import Result
from sparkforge.core.console import console, safe, without_passwords
from sparkforge.core.files import write_atomic

PER_GPU = "in+out tok/s/GPU"  # tput_per_gpu: unlike output tok/s it counts the prompts' tokens
COLUMNS = ("shape", "", "out\ntok/s", "in+out\ntok/s\n/GPU", "out\ntok/s\n/user", "TTFT", "TPOT", "ITL", "E2E")
WIDTH = 160  # characters of a line of the page


def format_figure(value: float | None) -> str:
    """Return a figure with about four significant digits; `-` where there is none."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"


def write_page(path: Path, contents: Iterable[RenderableType]) -> None:
    """Write an HTML page of texts and of tables; a table without rows is left out."""
    page = Console(record=True, file=io.StringIO(), width=WIDTH, highlight=False, markup=False, emoji=False)
    for content in contents:
        if not isinstance(content, Table) or content.row_count:
            page.print(_text(content) if isinstance(content, str) else content)
    write_atomic(path, page.export_html(inline_styles=True))


def print_results(results: Sequence[Result]) -> None:
    """Print measured figures, and their ratios to cited ones in a table of their own."""
    measured, ratios = list[list[str]](), list[list[str]]()
    for result in results:
        metrics, cells = result.metrics, [result.config.shape, "✓" if result.passed else "✗"]
        if metrics is None:
            cells.append("; ".join(result.reasons)[:120])
        else:
            cells += map(format_figure, (metrics.output_throughput, metrics.tput_per_gpu, metrics.interactivity))
            for latency in (metrics.ttft_ms, metrics.tpot_ms, metrics.itl_ms, metrics.e2el_ms):
                cells.append(f"{format_figure(latency.median)}\n{format_figure(latency.p99)}" if latency else "-")
        measured.append([*cells, *[""] * (len(COLUMNS) - len(cells))])
        for r in result.ratios:
            better = "better" if r.better else "worse"
            ratios.append([result.config.shape, r.quantity, f"{r.ratio:.3f}", better, f"{r.figure}, {r.date}"])
    console().print(make_table("measured · ms: median, below it p99", COLUMNS, measured))
    if ratios:
        columns = ("isl/osl conc", "quantity", "ours / theirs", "", "theirs")
        console().print(make_table("ratios", columns, ratios))


def make_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table of texts; nothing in them is read as markup."""
    table = Table(*(Column(_text(name)) for name in columns), title=title, box=SIMPLE, title_justify="left")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(value: object) -> Text:
    return Text(safe(without_passwords(str(value))))
