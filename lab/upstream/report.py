"""The report of `lab.upstream check`: as a table for a terminal, as JSON, and as a table of the documentation."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lab.upstream.effect import Column, Effect, Observation
from sparkforge.core.console import echo

PARTS = ("patches", "git dependencies", "kernel calls", "flags and variables", "experts")
WIDTH, WIDEST = 120, 180  # columns of the table if stdout is no terminal, and at most


@dataclass(frozen=True)
class ReleaseReport:
    """One row: a release, the release of the other upstream that its calls were checked with, and its columns."""

    name: str
    archive: str
    sha256: str
    is_pinned: bool
    checked_with: str
    requires: Mapping[str, str]
    columns: Mapping[str, Column]

    @property
    def can_move(self) -> bool:
        """Whether nothing breaks and nothing is undetermined."""
        return all(column.effect.allows_move for column in self.columns.values())

    def document(self) -> dict[str, Any]:
        """Return the row for the JSON report."""
        columns = {
            part: {
                "effect": column.effect.value,
                "summary": column.summary,
                "observations": [{"effect": entry.effect.value, "text": entry.text} for entry in column.observations],
            }
            for part, column in self.columns.items()
        }
        return {**asdict(self), "can_move": self.can_move, "columns": columns}


@dataclass(frozen=True)
class CheckReport:
    """The whole report of a stack on one day."""

    stack: str
    date: str
    releases: tuple[ReleaseReport, ...]

    @property
    def can_move(self) -> bool:
        """Whether the stack can move to every release of the report."""
        return all(release.can_move for release in self.releases)

    def document(self) -> dict[str, Any]:
        """Return the JSON report."""
        return {
            "schema": 1,
            "stack": self.stack,
            "date": self.date,
            "can_move": self.can_move,
            "releases": [release.document() for release in self.releases],
        }

    def text(self) -> str:
        """Return the table, and below it each observation that is not harmless."""
        columns = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDEST)
        table = Table(title=f"stack {self.stack}, {self.date}", box=SIMPLE)
        table.add_column("release", min_width=max((len(release.name) for release in self.releases), default=0))
        for part in PARTS:
            table.add_column(part)
        lines = []
        for release in self.releases:
            table.add_row(release.name, *map(str, release.columns.values()))
            lines.append(f"{release.name}: {'can move' if release.can_move else 'cannot move'}")
            lines += [
                f"  {entry.effect.mark} {part}: {entry.text}"
                for part, column in release.columns.items()
                for entry in column.observations
                if entry.effect is not Effect.NONE
            ]
        output = io.StringIO()
        Console(file=output, width=columns, highlight=False, markup=False, emoji=False).print(table)
        return "\n".join([output.getvalue().rstrip(), "", *lines])


def markdown(document: Mapping[str, Any]) -> str:
    """Return the table of a JSON report for the documentation, and below it the reasons against a move, by release."""
    lines = [f"| release | {' | '.join(PARTS)} |", f"|{' --- |' * (len(PARTS) + 1)}"]
    reasons = []
    for release in document["releases"]:
        columns = {
            part: Column(
                entry["summary"],
                tuple(Observation(Effect(item["effect"]), item["text"]) for item in entry["observations"]),
            )
            for part, entry in release["columns"].items()
        }
        lines.append(f"| {release['name']} | {' | '.join(map(str, columns.values()))} |")
        reasons += [
            f"- {release['name']}, {part}: {text}" for part, column in columns.items() for text in column.reasons
        ]
    return "\n".join([*lines, "", *reasons]) + "\n"


if __name__ == "__main__":
    echo(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
