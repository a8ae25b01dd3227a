"""The one console, logger and progress display. Everything meant for people goes to stderr; results go to stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from rich import progress as bars
from rich.console import Console

from sparkforge.errors import SparkforgeError


@cache
def console() -> Console:
    """Return the console on stderr; plain text where stderr is no terminal or NO_COLOR is set."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """Print one line for people, without interpreting markup."""
    console().print(message, markup=False)


def show_error(error: SparkforgeError) -> None:
    """Print an error as its three parts: what failed, why, the next command."""
    out = console()
    out.print(f"✗ {error.what}", style="bold red", markup=False)
    out.print(f"  why:  {error.why}", markup=False)
    out.print(f"  next: {error.fix}", style="bold", markup=False)


class Steps:
    """A numbered list of steps, each timed; `seconds` maps a step's name to its duration."""

    def __init__(self, total: int) -> None:
        self.total, self.seconds = total, dict[str, float]()

    @contextmanager
    def step(self, name: str, detail: str = "") -> Iterator[Callable[[str], None]]:
        """Show a running step; yields a function that replaces its detail text. Ends with ✓ or ✗ and seconds."""
        label = f"[{len(self.seconds) + 1}/{self.total}] {name}"
        begun, last = time.monotonic(), [detail]

        def update(text: str) -> None:
            """The last detail stands in the finished step's line too."""
            last[0] = text
            status.update(f"{label} · {text}")

        mark = "✗"
        try:
            with console().status(f"{label} · {detail}" if detail else label) as status:
                yield update
            mark = "✓"
        finally:
            self.seconds[name] = round(time.monotonic() - begun, 3)
            told = " · ".join(part for part in (label, last[0]) if part)
            console().print(f"{mark} {told} ({self.seconds[name]:.1f} s)", markup=False)


@contextmanager
def download_bar(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a transfer of `total` bytes; yields a function that takes the number of bytes that came in."""
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
    )
    with bars.Progress(*columns, console=console(), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(name, total=total)
        yield lambda count: progress.update(task, advance=count)
