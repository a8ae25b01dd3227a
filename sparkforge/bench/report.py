"""The report of a run: one HTML page with everything in it, readable on a phone and from file://.

It loads nothing. Text from servers and files is escaped, so it cannot become markup; URLs lose their passwords, because
pages are handed on. Style and script are part of the page and allowed by their hash in a Content-Security-Policy.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sparkforge.bench.baselines import Baselines, missing_figures
from sparkforge.bench.schema import Result, ServedModel
from sparkforge.bench.terminal import PER_GPU, format_figure
from sparkforge.core.console import safe
from sparkforge.core.files import write_atomic
from sparkforge.core.urls import without_passwords

TEMPLATES = Path(__file__).parent / "templates"
GATE = ("check", "verdict", "value", "limit", "detail")
MEASURED = (
    *("isl/osl", "conc", "verdict", "output tok/s", PER_GPU, "output tok/s/user"),
    *("TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99", "E2E ms", "p99", "requests"),
)
RATIOS = ("shape", "quantity", "ours / theirs", "", "theirs", "source", "date")
CITED = ("published by", "shape", "quantity", "cited", "source", "date")
Cell = str | float | bool | None


@dataclass(frozen=True)
class SortableTable:
    """A table of a page. A cell that is a boolean is shown as a verdict, None as a gap."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def is_numeric(self, column: int) -> bool:
        """Tell whether a column holds numbers."""
        return any(isinstance(row[column], float | int) and not isinstance(row[column], bool) for row in self.rows)


def write(path: Path, results: Sequence[Result], baselines: Baselines) -> None:
    """Write the page for one run's results."""
    write_atomic(path, render(results, baselines))


def render(results: Sequence[Result], baselines: Baselines) -> str:
    """Return the page. Measured and cited figures never share a table."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_presentable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(figure=format_figure, csp_hash=_csp_hash)
    files = (TEMPLATES / "page.css", TEMPLATES / "page.js")  # of this package, so they need no escape
    style, script = (Markup(file.read_text(encoding="utf-8")) for file in files)  # noqa: S704
    first = results[0]
    checks = [[check.label, check.ok, check.value, check.limit, check.told] for check in first.gate.checks]
    ratios: list[list[Cell]] = [
        [
            *(result.config.shape, ratio.quantity, ratio.ratio, "better" if ratio.better else "worse"),
            *(ratio.figure, ratio.source, ratio.date),
        ]
        for result in results
        for ratio in result.ratios
    ]
    cited: list[list[Cell]] = [
        [figure.name, figure.shape_text, quantity, value, figure.source, figure.date]
        for figure in baselines.figures
        for quantity, value in figure.values.items()
    ]
    return environment.get_template("report.html.jinja").render(
        style=style,
        script=script,
        first=first,
        machine=" · ".join(filter(None, (first.server.device, str(first.machine.get("processor", ""))))),
        results=results,
        passed=sum(result.passed for result in results),
        gate_checks=SortableTable("run before anything was timed", GATE, checks),
        measured=SortableTable("latencies: median, then 99th percentile", MEASURED, list(map(_measured, results))),
        ratios=SortableTable("of the very same shape only", RATIOS, ratios),
        missing=missing_figures(results, baselines),
        cited=SortableTable("none of this was measured here", CITED, cited),
        server_tables=_server_tables(first.server),
        provenance=_provenance(first),
    )


def _measured(result: Result) -> list[Cell]:
    config, metrics = result.config, result.metrics
    cells: list[Cell] = [f"{config.isl}/{config.osl}", config.conc, result.passed]
    if metrics is None:
        return [*cells, *[None] * (len(MEASURED) - len(cells))]
    cells += [metrics.output_throughput, metrics.tput_per_gpu, metrics.interactivity]
    for latency in (metrics.ttft_ms, metrics.tpot_ms, metrics.itl_ms, metrics.e2el_ms):
        cells += [latency.median, latency.p99] if latency else [None, None]
    return [*cells, metrics.completed]


def _server_tables(server: ServedModel) -> dict[str, SortableTable]:
    """Return startup, memory and the validator's findings; without rows where the server is not this checkout's."""
    keys = list(dict.fromkeys(key for finding in server.findings for key, value in finding.items() if value))
    findings = [[str(finding.get(key, "")) for key in keys] for finding in server.findings]
    sizes: list[list[Cell]] = [[name.upper(), size / 1e9] for name, size in server.memory_bytes.items()]
    steps: list[list[Cell]] = [list(step) for step in server.startup_seconds.items()]
    return {
        "Startup": SortableTable("the last ./inv up, step by step", ("step", "seconds"), steps),
        "Memory": SortableTable("all processes of the server, after the load", ("", "GB"), sizes),
        "Validator": SortableTable("findings of the startup gate", keys, findings),
    }


def _provenance(result: Result) -> SortableTable:
    """Return what made these figures: settings, programs, machine, inputs."""
    parts = {
        "configuration": result.config.model_dump(),
        "server": {"server version": result.server.version, **result.server.records},
        "machine": result.machine,
    }
    rows = [[part, name, str(value)] for part, values in parts.items() for name, value in values.items() if str(value)]
    return SortableTable("of the first configuration", ("", "name", "value"), rows)


def _presentable(value: object) -> object:
    """Remove control sequences and passwords of URLs from a text; a macro's output has been through this already."""
    return safe(without_passwords(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
