"""The ranking of a bake-off: a geometric mean for each serve profile that passed, the reason for each that did not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.table import Table

from sparkforge.bench import page
from sparkforge.bench.schema import Result
from sparkforge.core.console import console, say
from sparkforge.core.errors import BenchmarkError
from sparkforge.core.files import write_json
from sparkforge.core.tables import Record


class Standing(Record):
    """How one profile did."""

    name: str
    score: float | None = Field(description="geometric mean of tput_per_gpu over all configurations; None if it failed")
    results: list[Result]
    why: str = ""

    @property
    def bits_per_byte(self) -> float | None:
        """The gate's figure; None if nothing was measured."""
        return self.results[0].gate.bits_per_byte if self.results else None


def ranked(standings: Sequence[Standing]) -> list[Standing]:
    """Return them with the fastest first and those that failed last, in the order that they came."""
    return sorted(standings, key=lambda standing: -(standing.score or 0.0))


def show(standings: Sequence[Standing], output: Path) -> None:
    """Print the ranking and write it below `output` as JSON."""
    write_json(output / "bakeoff.json", [standing.model_dump(mode="json") for standing in standings])
    table = Table("rank", "profile", page.PER_GPU, "bits/byte", "", title="bakeoff: geometric mean over all loads")
    for rank, standing in enumerate(standings, 1):
        passed = standing.score is not None
        score, bits = page.format_optional(standing.score), page.format_optional(standing.bits_per_byte)
        table.add_row(str(rank) if passed else "-", standing.name, score, bits, standing.why[:200])
    console().print(table)
    say(f"results: {output / 'bakeoff.json'}")


def nobody_passed(standings: Sequence[Standing], fix: str) -> BenchmarkError:
    """Return the error for a bake-off without a winner."""
    why = "\n        ".join(f"{standing.name}: {standing.why}" for standing in standings)
    return BenchmarkError("no profile passed", why, fix, code="benchmark.bakeoff")


def standing(name: str, results: Sequence[Result]) -> Standing:
    """Return how a profile with these results did."""
    reasons = [reason for result in results for reason in result.reasons]
    score = None if reasons else mean_throughput(results)
    return Standing(name=name, score=score, results=list(results), why="; ".join(reasons))


def mean_throughput(results: Sequence[Result]) -> float | None:
    """Return the geometric mean of tput_per_gpu; None without a figure."""
    figures = [result.metrics.tput_per_gpu for result in results if result.metrics]
    return math.exp(sum(map(math.log, figures)) / len(figures)) if figures and min(figures) > 0 else None
