"""One self-contained HTML page out of elements. ElementTree escapes text: a server's words cannot become markup.

Nothing is loaded from anywhere: style and script are inside, allowed by their hash in a Content-Security-Policy.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

HERE = Path(__file__).parent
Cell = str | float | int | None | Element
EMPTY = "-"


def element(tag: str, *children: str | Element | None, **attributes: str) -> Element:
    """Return an element; a trailing underscore of an attribute's name is dropped, others become hyphens."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif child is not None:
            _add_text(made, child)
    return made


def _add_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str) -> Element:
    """Return a sortable table in a box that scrolls sideways by itself. Figures keep their value beside their text."""
    head = element("tr", *(_head(name, [row[at] for row in rows]) for at, name in enumerate(heads)))
    body = [element("tr", *(_cell(value) for value in row)) for row in rows]
    made = element(
        "table", element("caption", caption), element("thead", head), element("tbody", *body), class_="sortable"
    )
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _head(name: str, column: Sequence[Cell]) -> Element:
    button = element("button", name, type="button")
    figures = any(isinstance(value, float | int) for value in column)
    return element("th", button, scope="col", class_="n") if figures else element("th", button, scope="col")


def _cell(value: Cell) -> Element:
    if isinstance(value, Element):
        return element("td", value)
    if value is None:
        return element("td", EMPTY, class_="n")
    if isinstance(value, str):
        return element("td", value)
    return element("td", figure(value), class_="n", data_value=repr(value))


def figure(value: float) -> str:
    """Return a figure for people: four digits that count."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"


def mark(passed: bool) -> Element:
    """Return a verdict that does not depend on colour."""
    return element("span", "✓ passed" if passed else "✗ failed", class_="good" if passed else "bad")


def section(title: str, *children: Element | None) -> Element:
    """Return a part of the page with its heading."""
    return element("section", element("h2", title), *children)


def document(title: str, *children: Element) -> str:
    """Return the whole page."""
    style, script = (HERE / "page.css").read_text(encoding="utf-8"), (HERE / "page.js").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", style),
    )
    body = element("body", element("main", element("h1", title), *children), element("script", script))
    page = element("html", head, body, lang="en")
    return "<!doctype html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
