"""The report of a run: one HTML page with everything in it, readable on a phone, from file:// as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from bench import page, terminal
from bench.baselines import Baselines, Figure
from bench.chart import Point, Series, lines
from bench.page import Cell, element, section, table
from bench.schema import Gate, Result, Spread
from sparkforge.files import write_atomic

MEASURED = (
    *("isl/osl", "conc", "verdict", "output tok/s", "tok/s/GPU", "tok/s/user"),
    *("TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99", "E2E ms", "p99", "requests"),
)


def write(path: Path, results: Sequence[Result], baselines: Baselines) -> None:
    """Write the page for one run's results."""
    write_atomic(path, build(results, baselines))


def build(results: Sequence[Result], baselines: Baselines) -> str:
    """Return the page."""
    first = results[0]
    parts = [
        intro(results),
        gate_part(first.gate),
        section("Measured", measured(results), reasons(results)),
        section("Throughput against latency", charts(results)),
        section("llama-benchy style", benchy(results)),
        section("Against published figures", ratios(results)),
        section("Cited, not measured here", cited(baselines.figures)),
        *server_parts(first),
        section("Provenance", provenance(first)),
    ]
    return page.document(f"{first.config.model}: benchmark", *[part for part in parts if part is not None])


def intro(results: Sequence[Result]) -> Element:
    """Return the verdict in a few lines."""
    first, passed = results[0], sum(result.passed for result in results)
    where = " · ".join(filter(None, (first.server.device, str(first.machine.get("processor", "")))))
    when = str(first.machine.get("measured_at", ""))
    return element(
        "div",
        element("p", page.mark(passed == len(results)), f" {passed} of {len(results)} configurations passed"),
        element("p", f"{where} · TP {first.config.tp} · load by {first.client.name} {first.client.version}"),
        element("p", when, class_="quiet"),
    )


def gate_part(gate: Gate) -> Element:
    """Return the accuracy gate's checks."""
    rows = [[check.name, page.mark(check.ok), check.value, check.limit, check.told] for check in gate.checks]
    note = "Only a sanity check: no threshold of this very model is known. " if gate.sanity_only else ""
    scored = f"Text {gate.text}, {gate.tokens} tokens scored, chunks by {gate.chunked_by}. Thresholds: {gate.source}"
    checks = table(("check", "verdict", "value", "limit", "told"), rows, "run before anything was timed")
    return section("Accuracy gate", checks, element("p", note + scored, class_="quiet"))


def measured(results: Sequence[Result]) -> Element:
    """Return the table of measured figures; nothing cited is in it."""
    return table(MEASURED, [row(result) for result in results], "latencies: median, then 99th percentile")


def row(result: Result) -> list[Cell]:
    """Return a result's line."""
    c, m = result.config, result.metrics
    begin: list[Cell] = [f"{c.isl}/{c.osl}", c.conc, page.mark(result.passed)]
    if m is None:
        return [*begin, *[None] * (len(MEASURED) - 3)]
    speeds: list[Cell] = [m.output_throughput, m.tput_per_gpu, m.interactivity]
    return [*begin, *speeds, *spreads(m.ttft_ms, m.tpot_ms, m.itl_ms, m.e2el_ms), m.completed]


def spreads(*values: Spread | None) -> Iterable[Cell]:
    """Return median and 99th percentile of each."""
    for value in values:
        yield from (value.median, value.p99) if value else (None, None)


def reasons(results: Sequence[Result]) -> Element | None:
    """Return why configurations failed."""
    failed = [result for result in results if not result.passed]
    items = [element("li", f"CONC={r.config.conc}: {'; '.join(r.reasons)}") for r in failed]
    return element("ul", *items) if items else None


def charts(results: Sequence[Result]) -> Element | None:
    """Return the two curves: a GPU's throughput over one user's speed, and output throughput over latency."""
    speed, wait = list[Series](), list[Series]()
    for shape, passed in by_shape(results).items():
        points = [(r.metrics, f"c{r.config.conc}") for r in passed if r.metrics]
        speed.append(Series(shape, [Point(m.interactivity, m.tput_per_gpu, c) for m, c in points if m.interactivity]))
        wait.append(Series(shape, [Point(m.e2el_ms.median, m.output_throughput, c) for m, c in points]))
    made = [
        lines("Throughput of a GPU against the speed that one user sees", "tok/s/user", "tok/s/GPU", speed),
        lines("Output throughput against latency", "median E2E, ms", "output tok/s", wait),
    ]
    return element("div", *made, class_="charts") if any(chart is not None for chart in made) else None


def by_shape(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the passed results of each shape, by concurrency."""
    passed = sorted((r for r in results if r.passed), key=lambda r: r.config.conc)
    shapes = dict.fromkeys(f"{r.config.isl}/{r.config.osl}" for r in passed)
    return {shape: [r for r in passed if f"{r.config.isl}/{r.config.osl}" == shape] for shape in shapes}


def benchy(results: Sequence[Result]) -> Element | None:
    """Return the pp/tg table."""
    rows = [row for result in results for row in terminal.benchy(result)]
    cells: list[list[Cell]] = [[r.test, r.total, r.each, r.deviation, r.first_ms] for r in rows]
    heads = ("test", "t/s (total)", "t/s (req)", "±", "ttfr ms")
    return table(heads, cells, "pp holds the wait in the queue; see c1") if rows else None


def ratios(results: Sequence[Result]) -> Element:
    """Return ours over theirs; a ratio stands only where the shape is the very same."""
    rows: list[list[Cell]] = [
        [
            *(f"{r.config.isl}/{r.config.osl} c{r.config.conc}", x.quantity, x.ratio),
            *("better" if x.better else "worse", x.figure, x.source, x.date),
        ]
        for r in results
        for x in r.ratios
    ]
    if not rows:
        return element("p", "No published figure has the shape of a configuration that passed.", class_="quiet")
    heads = ("shape", "quantity", "ours / theirs", "", "theirs", "source", "date")
    return table(heads, rows, "of the very same shape only")


def cited(figures: Sequence[Figure]) -> Element:
    """Return what others published, each with source and date."""
    rows: list[list[Cell]] = [
        [figure.name, figure.told_shape, quantity, value, figure.source, figure.date]
        for figure in figures
        for quantity, value in figure.values.items()
    ]
    return table(("whose", "shape", "quantity", "cited", "source", "date"), rows, "none of this was measured here")


def server_parts(result: Result) -> list[Element]:
    """Return startup, memory and the validator's findings; nothing where the server is not this checkout's."""
    server, parts = result.server, list[Element]()
    if server.startup_seconds:
        rows: list[list[Cell]] = [[step, seconds] for step, seconds in server.startup_seconds.items()]
        parts.append(section("Startup", table(("step", "seconds"), rows, "the last ./inv up, step by step")))
    if server.memory_bytes:
        sizes: list[list[Cell]] = [[name.upper(), size / 1e9] for name, size in server.memory_bytes.items()]
        parts.append(section("Memory", table(("", "GB"), sizes, "all processes of the server, after the load")))
    if server.findings:
        heads = list(dict.fromkeys(key for finding in server.findings for key, value in finding.items() if value))
        found: list[list[Cell]] = [[str(finding.get(key, "")) for key in heads] for finding in server.findings]
        parts.append(section("Validator", table(heads, found, "what the startup gate found")))
    return parts


def provenance(result: Result) -> Element:
    """Return what made these figures: settings, programs, machine, inputs."""
    settings = {name: str(value) for name, value in result.config.model_dump().items()}
    server = {"server version": result.server.version, **{k: str(v) for k, v in result.server.records.items()}}
    machine = {name: str(value) for name, value in result.machine.items()}
    rows: list[list[Cell]] = [
        [part, name, value]
        for part, values in (("configuration", settings), ("server", server), ("machine", machine))
        for name, value in values.items()
        if value
    ]
    return table(("", "what", "value"), rows, "of the first configuration")
