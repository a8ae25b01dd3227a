"""The patch verbs on trees: apply and reverse a stack's queues where its sources lie, or in a tree that is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forge import patch, pins, sources, status
from forge.pins import Pins
from forge.series import Queue
from sparkforge.console import say
from sparkforge.errors import UsageError


def show_apply(stack: str = "spark", tree: str = "", upstream: str = "", *, dry_run: bool = False) -> None:
    """Apply every queue of a stack to its unpacked source, or the queue for `upstream` (default vllm) to `tree`.

    Raises UsageError where the sources are not there yet, and the errors of `patch.apply`.
    """
    for root, queue in _places(pins.load(), stack, tree, upstream):
        told = f"{queue.upstream}-{queue.version} in {root}: {patch.apply(root, queue, dry_run=dry_run)}"
        say(told + (" (dry run: nothing was written)" if dry_run else ""))


def show_reverse(stack: str = "spark", tree: str = "", upstream: str = "", *, dry_run: bool = False) -> None:
    """Put a stack's unpacked sources, or `tree` (all of it, or one `upstream`), back to upstream's bytes.

    Raises the errors of `patch.reverse`.
    """
    named = [(Path(tree), upstream or None)] if tree else [
        (root, queue.upstream) for root, queue in _places(pins.load(), stack, tree, upstream)
    ]  # fmt: skip
    for root, name in named:
        done = patch.reverse(root, name, dry_run=dry_run)
        say(f"{root}: {done}" + (" (dry run: nothing was written)" if dry_run else ""))


def _places(table: Pins, stack: str, tree: str, upstream: str) -> Iterator[tuple[Path, Queue]]:
    """Yield each tree with its queue. Raises UsageError where there is none."""
    if tree:
        _, queue, _ = status.chosen(table, stack, f"{upstream or 'vllm'}-0")
        yield Path(tree), queue
        return
    unpacked = {name: place for name, place in sources.unpacked(stack, table=table) if place.is_dir()}
    folders = {component.patches: unpacked[name] for name, component in table.stacks[stack].components.items()
               if name in unpacked}  # fmt: skip
    for component, queue in status.queues(table, stack):
        if upstream not in ("", queue.upstream):
            continue
        if component.patches not in folders:
            raise UsageError(
                f"there is no source of {component.package} {component.version} to patch", "it was not brought yet",
                f"./inv sources --stack {stack}, or name a tree: --tree DIR",
            )  # fmt: skip
        yield folders[component.patches], queue
