"""Decide whether one measurement is faster than another, or the difference is noise.

Each side is one or more results of the same shape. Intervals are bootstrapped: runs are drawn with replacement, and
requests within runs. Throughput is compared as tokens over the sum of latencies. At equal concurrency this ratio is
proportional to throughput (Little's law), and a single run shows its spread. A single run does not show the spread
between runs, so a difference under FLOOR is not reported.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from sparkforge.bench import schema
from sparkforge.bench.schema import Request, Result
from sparkforge.core.console import console, say
from sparkforge.core.errors import UsageError

ROUNDS = 1000
FLOOR = 0.02
EXAMPLE = "./inv bench.compare A.json B.json"
Statistic = Callable[[Sequence[Request]], float]


def throughput(requests: Sequence[Request]) -> float:
    """Return the tokens per second of one slot: generated tokens over the sum of latencies."""
    seconds = sum(request.e2el_ms for request in requests) / 1000
    return sum(request.output_tokens for request in requests) / seconds if seconds > 0 else 0.0


def median(values: Iterable[float | None]) -> float:
    """Return the median of the known values; 0 if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


# Quantity → statistic, and whether more is better.
QUANTITIES: dict[str, tuple[Statistic, bool]] = {
    "throughput": (throughput, True),
    "median E2E": (lambda requests: median(request.e2el_ms for request in requests), False),
    "median TTFT": (lambda requests: median(request.ttft_ms for request in requests), False),
    "median TPOT": (lambda requests: median(request.tpot_ms for request in requests), False),
}


@dataclass(frozen=True)
class Difference:
    """A quantity's ratio B / A and its 95 % interval; `change` is better, worse or no difference seen."""

    quantity: str
    ratio: float
    low: float
    high: float
    change: str


def differences(before: Sequence[Result], after: Sequence[Result]) -> list[Difference]:
    """Return the difference of each quantity that both sides have. Raises UsageError for sides that do not compare."""
    shapes = {f"{r.config.isl}/{r.config.osl} c{r.config.conc} by {r.client.name}" for r in (*before, *after)}
    if len(shapes) > 1:
        problem = "results of different shapes or clients cannot be compared"
        raise UsageError(problem, ", ".join(sorted(shapes)), EXAMPLE)
    if failed := [r for r in (*before, *after) if not r.passed or not r.requests]:
        why = "; ".join(failed[0].reasons) or "it holds no request"
        raise UsageError("a failed result cannot be compared", why, "--help   # compare results that passed")
    floor = 0.0 if min(len(before), len(after)) >= 3 else FLOOR
    compared = []
    for name, (statistic, more_is_better) in QUANTITIES.items():
        a, b = (statistic([r for result in side for r in result.requests]) for side in (before, after))
        if a > 0 and b > 0:
            low, high = interval(before, after, statistic)
            change = "no difference seen"
            if low > 1 + floor or high < 1 - floor:
                change = "better" if (low > 1) == more_is_better else "worse"
            compared.append(Difference(name, b / a, low, high, change))
    return compared


def interval(before: Sequence[Result], after: Sequence[Result], statistic: Statistic) -> tuple[float, float]:
    """Return the ends of the 95 % interval of B / A. The random seed is fixed, so the result is deterministic."""
    rng, ratios = random.Random(0), list[float]()  # noqa: S311 (a bootstrap)

    def draw(results: Sequence[Result]) -> float:
        drawn = rng.choices(results, k=len(results))
        return statistic([request for r in drawn for request in rng.choices(r.requests, k=len(r.requests))])

    for _ in range(ROUNDS):
        a, b = draw(before), draw(after)
        if a > 0:
            ratios.append(b / a)
    cuts = statistics.quantiles(ratios, n=40, method="inclusive")
    return cuts[0], cuts[-1]


def print_comparison(before: str, after: str) -> None:
    """Compare two sides and print the table. A side is one result file, or several separated by commas.

    Raises UsageError for sides that cannot be compared, InputError for a file that is not a result.
    """
    a, b = ([schema.read(Path(name)) for name in side.split(",") if name] for side in (before, after))
    if not a or not b:
        raise UsageError("two sides are needed", "one of them names no file", EXAMPLE)
    table = Table("quantity", "B / A", "95 % interval", "", title=f"{len(a)} against {len(b)} results")
    for d in differences(a, b):
        table.add_row(d.quantity, f"{d.ratio:.3f}", f"{d.low:.3f} to {d.high:.3f}", d.change)
    console().print(table)
    if min(len(a), len(b)) < 3:
        say(f"fewer than three runs a side: differences under {FLOOR:.0%} may be noise and are not reported")
