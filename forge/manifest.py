"""A stage: reads artifacts, writes one artifact (a file or a folder) and a JSON manifest beside it.

The manifest is written last and removed first, so that an artifact without one is a half-made one. A stage whose
inputs are those in its manifest does nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sparkforge
from sparkforge.files import fsync_directory, locked, write_json

SCHEMA = 1
SUFFIX = ".manifest.json"


@dataclass(frozen=True)
class Made:
    """What a stage made: its outputs (name → hash), the tools it used (name → version), and facts for later stages."""

    outputs: Mapping[str, str]
    tools: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The record of one artifact; hashes are hex, `seconds` is how long the stage took."""

    stage: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    tools: Mapping[str, str]
    facts: Mapping[str, Any]
    seconds: float
    schema: int = SCHEMA


def beside(place: Path) -> Path:
    """Return where the manifest of the artifact at `place` lies."""
    return place.with_name(place.name + SUFFIX)


def load(place: Path) -> Manifest | None:
    """Return the manifest of the artifact at `place`; None if there is none that this Sparkforge understands."""
    try:
        manifest = Manifest(**json.loads(beside(place).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return manifest if manifest.schema == SCHEMA else None


def current(place: Path, stage: str, inputs: Mapping[str, str]) -> Manifest | None:
    """Return the manifest of `place` if that artifact stands and came from exactly these inputs."""
    manifest = load(place)
    fits = manifest is not None and (manifest.stage, dict(manifest.inputs)) == (stage, dict(inputs))
    return manifest if fits and place.exists() else None


def once(place: Path, stage: str, inputs: Mapping[str, str], make: Callable[[Path], Made]) -> tuple[Manifest, bool]:
    """Have `make` write the artifact unless it stands; return its manifest and whether it was made now.

    `make` gets a path beside `place` that it must create; it appears as `place` only when all of it is on the disk.
    Raises what `make` raises, and BusyError while another process makes the same artifact; nothing is left then.
    """
    if manifest := current(place, stage, inputs):
        return manifest, False
    with locked(place.with_name(f".{place.name}.lock"), f"make {place.name}"):
        if manifest := current(place, stage, inputs):
            return manifest, False
        beside(place).unlink(missing_ok=True)
        for stale in (place, *place.parent.glob(f".{place.name}.*.tmp")):
            remove(stale)
        return _make(place, stage, inputs, make), True


def remove(path: Path) -> None:
    """Remove a file or a folder, or do nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make(place: Path, stage: str, inputs: Mapping[str, str], make: Callable[[Path], Made]) -> Manifest:
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    begun = time.monotonic()
    try:
        made = make(temporary)
        os.sync()  # thousands of files at once: one call instead of an fsync each
        temporary.rename(place)
        fsync_directory(place.parent)
    finally:
        with suppress(FileNotFoundError):
            remove(temporary)
    tools = {"sparkforge": sparkforge.__version__, "python": sys.version.split()[0], **made.tools}
    manifest = Manifest(stage, inputs, made.outputs, tools, made.facts, round(time.monotonic() - begun, 3))
    write_json(beside(place), asdict(manifest))
    return manifest
