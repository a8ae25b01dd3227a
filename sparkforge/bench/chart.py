"""Places the points of line charts: axes from 0, a label at every point, each series with its name beside its colour.

The template macro `line_chart` draws a `Chart` as inline SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sparkforge.bench.page import PER_GPU
from sparkforge.bench.schema import Metrics, Result

COLOURS = 5  # classes s0 to s4 of page.css


@dataclass(frozen=True)
class Point:
    """A measured point and its label."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Series:
    """Points that belong together, in the order in which they are joined."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Tick:
    """A label of an axis and its position, in pixels."""

    label: str
    position: float


@dataclass(frozen=True)
class Marker:
    """A point and where it is drawn, in pixels."""

    point: Point
    x: float
    y: float


@dataclass(frozen=True)
class ChartLine:
    """A series as it is drawn; `colour` is a class of page.css."""

    name: str
    colour: str
    markers: list[Marker]


@dataclass(frozen=True)
class Chart:
    """A chart as it is drawn; positions in pixels from the top left."""

    width: ClassVar[int] = 480
    height: ClassVar[int] = 320
    left: ClassVar[int] = 58  # of the plot; ticks and titles are outside it
    right: ClassVar[int] = 462
    top: ClassVar[int] = 28
    bottom: ClassVar[int] = 276

    title: str
    x_title: str
    y_title: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[ChartLine]


def line_chart(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> Chart | None:
    """Return the chart of `series`; None if there is no point."""
    points = [point for line in series for point in line.points]
    if not points:
        return None
    x_end, x_values = ticks(max(point.x for point in points))
    y_end, y_values = ticks(max(point.y for point in points))

    def x(value: float) -> float:
        """Return pixels from the left."""
        return round(Chart.left + value / x_end * (Chart.right - Chart.left), 1)

    def y(value: float) -> float:
        """Return pixels from the top."""
        return round(Chart.bottom - value / y_end * (Chart.bottom - Chart.top), 1)

    return Chart(
        title,
        x_title,
        y_title,
        [Tick(_tick_label(value), x(value)) for value in x_values],
        [Tick(_tick_label(value), y(value)) for value in y_values],
        [
            ChartLine(
                line.name, f"s{number % COLOURS}", [Marker(point, x(point.x), y(point.y)) for point in line.points]
            )
            for number, line in enumerate(series)
        ],
    )


def speed_chart(results: Iterable[tuple[str, Result]]) -> Chart | None:
    """Return a GPU's throughput over the speed that one user sees; results are named by their line."""
    points = _by_line(results, lambda metrics: (metrics.interactivity, metrics.tput_per_gpu))
    title = "Throughput of a GPU against the speed that one user sees"
    return line_chart(title, "output tok/s/user", PER_GPU, points)


def latency_chart(results: Iterable[tuple[str, Result]]) -> Chart | None:
    """Return output throughput over latency; results are named by their line."""
    points = _by_line(results, lambda metrics: (metrics.e2el_ms.median, metrics.output_throughput))
    return line_chart("Output throughput against latency", "median E2E, ms", "output tok/s", points)


def _by_line(
    results: Iterable[tuple[str, Result]], position: Callable[[Metrics], tuple[float | None, float]]
) -> list[Series]:
    """Group results that have figures into lines, each by concurrency; a result without an x is left out."""
    lines: dict[str, list[Point]] = {}
    for name, result in sorted(results, key=lambda named: named[1].config.conc):
        if result.metrics:
            points = lines.setdefault(name, [])
            x, y = position(result.metrics)
            if x:
                points.append(Point(x, y, f"c{result.config.conc}"))
    return [Series(name, points) for name, points in lines.items()]


def ticks(largest: float, wanted: int = 4) -> tuple[float, list[float]]:
    """Return the axis's end and its ticks from 0, in steps of 1, 2 or 5 times a power of ten."""
    rough = max(largest, 1e-9) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    count = math.ceil(largest / step) or 1
    return count * step, [number * step for number in range(count + 1)]


def _tick_label(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"
