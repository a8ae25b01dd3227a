"""Unpack the sources of a stack from the cache into a tree."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from robustness.scenario import BUSY, Scenario, pinned_file, write
from robustness.scenarios import archives, patching
from sparkforge.core import manifest
from sparkforge.pins import Pins
from sparkforge.sources import fetch, trees

FILES = {**{name: text.encode() for name, text in patching.BEFORE.items()}, "CMakeLists.txt": b"project(up)\n"}
ARCHIVE = archives.tar("up-1", FILES)


@cache
def table() -> Pins:
    component = {"version": "1", "kind": "sdist", "package": "up", "licence": "MIT", "why": "test",
                 "files": {"up-1.tar.gz": pinned_file(ARCHIVE)}}  # fmt: skip
    value = {"schema": 1, "default": "s", "stacks": {"s": {"summary": "a stack", "components": {"up": component}}}}
    return Pins.model_validate(value)


def _tree() -> Path:
    return trees.tree_folder(table().component("s", "up"), "up-1.tar.gz")


def _prepare(work: Path) -> None:
    write(fetch.cached("up-1.tar.gz", hashlib.sha256(ARCHIVE).hexdigest()), ARCHIVE)
    write(work / "state/sources/mine.txt", "mine")
    write(_tree().parent / "mine-000000000000/a.py", "mine")


def _bring(work: Path) -> None:
    trees.fetch_sources("s", table=table())


def _judge(work: Path) -> None:
    """A tree with a valid manifest has upstream's bytes."""
    if manifest.load(_tree()) and _tree().exists():
        for path, content in FILES.items():
            assert (_tree() / path).read_bytes() == content, path


SCENARIOS = [Scenario("sources", _prepare, _bring, _judge, volatile=("*.manifest.json",), races=(0, BUSY))]
