"""Line charts as inline SVG: axes from 0, a label at every point, a series told by name and not by colour alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from bench.page import element, figure

WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 28, 44  # room for ticks and titles
COLOURS = 5  # classes s0 to s4 of page.css


@dataclass(frozen=True)
class Point:
    """A measured point and the word at it."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Series:
    """Points that belong together, in the order in which they are joined."""

    name: str
    points: Sequence[Point]


def lines(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> Element | None:
    """Return a chart with its caption; None if there is no point."""
    points = [point for each in series for point in each.points]
    if not points:
        return None
    x_top, x_ticks = ticks(max(point.x for point in points))
    y_top, y_ticks = ticks(max(point.y for point in points))
    svg = element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{title}: {y_title} over {x_title}")
    svg.extend(_axes(x_title, y_title, [(t, t / x_top) for t in x_ticks], [(t, t / y_top) for t in y_ticks]))
    for number, each in enumerate(series):
        svg.extend(_series(each, f"s{number % COLOURS}", x_top, y_top, number))
    return element("figure", svg, element("figcaption", title))


def ticks(largest: float, wanted: int = 4) -> tuple[float, list[float]]:
    """Return the axis's end and its ticks from 0, in steps of 1, 2 or 5 times a power of ten."""
    rough = max(largest, 1e-9) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    count = math.ceil(largest / step) or 1
    return count * step, [number * step for number in range(count + 1)]


def _x(share: float) -> str:
    return f"{LEFT + share * (WIDTH - LEFT - RIGHT):.1f}"


def _y(share: float) -> str:
    return f"{HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM):.1f}"


def _axes(
    x_title: str, y_title: str, x_ticks: list[tuple[float, float]], y_ticks: list[tuple[float, float]]
) -> list[Element]:
    made = []
    for value, share in y_ticks:
        made.append(element("line", class_="axis", x1=_x(0), x2=_x(1), y1=_y(share), y2=_y(share)))
        made.append(_text(_tick(value), f"{LEFT - 6}", f"{float(_y(share)) + 4:.1f}", "end"))
    for value, share in x_ticks:
        made.append(_text(_tick(value), _x(share), f"{HEIGHT - BOTTOM + 18}", "middle"))
    made.append(_text(x_title, _x(0.5), f"{HEIGHT - 6}", "middle"))
    made.append(_text(y_title, "4", "14", "start"))
    return made


def _series(series: Series, colour: str, x_top: float, y_top: float, number: int) -> list[Element]:
    places = [(_x(p.x / x_top), _y(p.y / y_top), p) for p in series.points]
    path = " ".join(f"{x},{y}" for x, y, _ in places)
    made = [element("polyline", class_=colour, points=path)] if len(places) > 1 else []
    for x, y, point in places:
        told = element("title", f"{series.name} {point.label}: {figure(point.x)}, {figure(point.y)}")
        made.append(element("circle", told, class_=colour, cx=x, cy=y, r="4"))
        right = float(x) > WIDTH * 0.85
        place = float(x) + (-8 if right else 8)
        made.append(_text(point.label, f"{place:.1f}", f"{float(y) - 6:.1f}", "end" if right else "start"))
    made.append(_text(series.name, _x(1), f"{14 + 15 * number}", "end", colour))
    return made


def _text(words: str, x: str, y: str, anchor: str, colour: str = "tick") -> Element:
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=colour)


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"
