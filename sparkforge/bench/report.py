"""The report of a run: one HTML page with everything in it, readable on a phone and from file://."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparkforge.bench import page
from sparkforge.bench.baselines import Baselines, missing_figures
from sparkforge.bench.page import Cell, SortableTable
from sparkforge.bench.schema import Result, ServedModel
from sparkforge.core.files import write_atomic
from sparkforge.plan.cited import CitedFigure

GATE = ("check", "verdict", "value", "limit", "detail")
MEASURED = (
    *("isl/osl", "conc", "verdict", "output tok/s", page.PER_GPU, "output tok/s/user"),
    *("TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99", "E2E ms", "p99", "requests"),
)
RATIOS = ("shape", "quantity", "ours / theirs", "", "theirs", "source", "date")
CITED = ("published by", "shape", "quantity", "cited", "source", "date")


def write(path: Path, results: Sequence[Result], baselines: Baselines) -> None:
    """Write the page for one run's results."""
    write_atomic(path, render(results, baselines))


def render(results: Sequence[Result], baselines: Baselines) -> str:
    """Return the page. Measured and cited figures never share a table."""
    first = results[0]
    return page.render(
        "report.html.jinja",
        f"{first.config.model}: benchmark",
        first=first,
        machine=" · ".join(filter(None, (first.server.device, str(first.machine.get("processor", ""))))),
        results=results,
        passed=sum(result.passed for result in results),
        gate_checks=SortableTable(
            "run before anything was timed",
            GATE,
            [[check.label, check.ok, check.value, check.limit, check.told] for check in first.gate.checks],
        ),
        measured=SortableTable(
            "latencies: median, then 99th percentile", MEASURED, [_measured(result) for result in results]
        ),
        ratios=_ratios(results),
        missing=missing_figures(results, baselines),
        cited=_cited(baselines.figures),
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


def _ratios(results: Sequence[Result]) -> SortableTable:
    rows: list[list[Cell]] = [
        [
            *(result.config.shape, ratio.quantity, ratio.ratio, "better" if ratio.better else "worse"),
            *(ratio.figure, ratio.source, ratio.date),
        ]
        for result in results
        for ratio in result.ratios
    ]
    return SortableTable("of the very same shape only", RATIOS, rows)


def _cited(figures: Sequence[CitedFigure]) -> SortableTable:
    rows: list[list[Cell]] = [
        [figure.name, figure.shape_text, quantity, value, figure.source, figure.date]
        for figure in figures
        for quantity, value in figure.values.items()
    ]
    return SortableTable("none of this was measured here", CITED, rows)


def _server_tables(server: ServedModel) -> dict[str, SortableTable]:
    """Return startup, memory and the validator's findings; without rows where the server is not this checkout's."""
    steps: list[list[Cell]] = [[step, seconds] for step, seconds in server.startup_seconds.items()]
    sizes: list[list[Cell]] = [[name.upper(), size / 1e9] for name, size in server.memory_bytes.items()]
    keys = list(dict.fromkeys(key for finding in server.findings for key, value in finding.items() if value))
    findings: list[list[Cell]] = [[str(finding.get(key, "")) for key in keys] for finding in server.findings]
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
