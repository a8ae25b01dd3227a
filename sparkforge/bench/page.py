"""Renders the report pages from Jinja templates: each page is one HTML file that loads nothing.

Text from servers and files is escaped, so it cannot become markup; URLs lose their passwords, because pages are handed
on. The style and the script are part of the page and are allowed by their hash in a Content-Security-Policy.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sparkforge.core.urls import without_passwords

TEMPLATES = Path(__file__).parent / "templates"
Cell = str | float | bool | None
PER_GPU = "in+out tok/s/GPU"  # tput_per_gpu: unlike output tok/s it counts the prompts' tokens


@dataclass(frozen=True)
class SortableTable:
    """A table of a page. A cell that is a boolean is shown as a verdict, None as a gap."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def is_numeric(self, column: int) -> bool:
        """Tell whether a column holds numbers."""
        return any(isinstance(row[column], float | int) and not isinstance(row[column], bool) for row in self.rows)


def render(template: str, title: str, **values: Any) -> str:
    """Return the page that a template of `templates/` makes of `values`."""
    files = (TEMPLATES / "page.css", TEMPLATES / "page.js")  # of this package, so they need no escape
    style, script = (Markup(file.read_text(encoding="utf-8")) for file in files)  # noqa: S704
    return _environment().get_template(template).render(title=title, style=style, script=script, **values)


def format_optional(value: float | None) -> str:
    """Return a figure as `format_figure` does, or `-` where there is none."""
    return "-" if value is None else format_figure(value)


def format_figure(value: float) -> str:
    """Return a figure with about four significant digits."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_passwords,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(figure=format_figure, csp_hash=_csp_hash)
    return environment


def _without_passwords(value: object) -> object:
    """Hide passwords in every text that a template inserts; what a macro returns has been through this already."""
    return without_passwords(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
