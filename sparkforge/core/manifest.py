"""A stage reads artifacts, and writes one artifact (a file or a folder) with a JSON manifest beside it.

A stage whose inputs are those in its manifest does nothing. Otherwise the new artifact is completed under a temporary
name; then the old artifact is moved aside with its manifest, and removed only when the new ones are in place. The next
run repairs the state after a kill; an artifact never has the manifest of another one.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sparkforge
from sparkforge.core.files import fsync_directory, locked, read_json, sha256_file, write_json

SCHEMA = 1
SUFFIX = ".manifest.json"


@dataclass(frozen=True)
class Made:
    """A stage's outputs (name → hash), the tools that it used (name → version), and facts for later stages."""

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


def beside(path: Path) -> Path:
    """Return the path of the manifest of the artifact at `path`."""
    return path.with_name(path.name + SUFFIX)


def load(path: Path) -> Manifest | None:
    """Return the manifest of the artifact at `path`; None if it is missing or has another schema."""
    try:
        manifest = Manifest(**read_json(beside(path)))
    except (OSError, ValueError, TypeError):
        return None
    tables = (manifest.inputs, manifest.outputs, manifest.tools, manifest.facts)
    return manifest if manifest.schema == SCHEMA and all(isinstance(table, dict) for table in tables) else None


def current(path: Path, stage: str, inputs: Mapping[str, str]) -> Manifest | None:
    """Return the manifest of `path` if that artifact exists and came from exactly these inputs."""
    manifest = load(path)
    fits = manifest is not None and (manifest.stage, dict(manifest.inputs)) == (stage, dict(inputs))
    return manifest if fits and path.exists() else None


def is_intact(manifest: Manifest, folder: Path) -> bool:
    """Tell whether every output of a manifest can be read in `folder` and has its hash."""
    try:
        return all(sha256_file(folder / name) == sha256 for name, sha256 in manifest.outputs.items())
    except OSError:
        return False


def once(path: Path, stage: str, inputs: Mapping[str, str], make: Callable[[Path], Made]) -> tuple[Manifest, bool]:
    """Have `make` write the artifact unless it is current; return its manifest and whether it was made now.

    `make` gets a path beside `path` and must create it; the result is renamed when all of it is on the disk. Raises the
    errors of `make`, with nothing left, and StorageError while another process makes the same artifact.
    """
    if (manifest := current(path, stage, inputs)) and not os.path.lexists(_aside(path)):
        return manifest, False
    with locked(path.with_name(f".{path.name}.lock"), f"make {path.name}"):
        _recover(path)
        if manifest := current(path, stage, inputs):
            return manifest, False
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        started = time.monotonic()
        try:
            stage_output = make(temporary)
            os.sync()  # thousands of files at once: one call instead of an fsync each
            tools = {"sparkforge": sparkforge.__version__, "python": sys.version.split()[0], **stage_output.tools}
            manifest = Manifest(
                stage, inputs, stage_output.outputs, tools, stage_output.facts, round(time.monotonic() - started, 3)
            )
            write_json(beside(temporary), asdict(manifest))
            for old, aside in ((beside(path), beside(_aside(path))), (path, _aside(path))):
                remove(aside)  # left by an earlier run
                with suppress(FileNotFoundError):
                    old.rename(aside)
            temporary.rename(path)
            fsync_directory(path.parent)
            beside(temporary).rename(beside(path))
            fsync_directory(path.parent)
        except BaseException:
            _recover(path)
            raise
        _remove_aside(path)
        return manifest, True


def remove(path: Path) -> None:
    """Remove a file or a folder, or do nothing if there is none."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old.tmp")


def _recover(path: Path) -> None:
    """Repair the state after a killed or failed run: put the old artifact back, or complete the new one."""
    aside, name = _aside(path), re.escape(path.name)
    for manifest in _matching(path.parent, rf"\.{name}\.\d+\.tmp{re.escape(SUFFIX)}"):
        temporary = manifest.with_name(manifest.name.removesuffix(SUFFIX))
        if path.exists() and not temporary.exists() and not beside(path).exists():
            manifest.rename(beside(path))  # the new artifact is in place, and on the disk
    if not os.path.lexists(beside(path)):
        for stored, original in ((aside, path), (beside(aside), beside(path))):
            if os.path.lexists(stored) and not os.path.lexists(original):
                stored.rename(original)
    # `make` writes under a name with its process id; `files.atomic_file` adds eight characters of its own.
    process_id, suffix = r"\d+(\.parts)?\.tmp", re.escape(SUFFIX)
    written = rf"(\.\d+\.tmp({suffix})?|\.sha256|{suffix})\.[a-z0-9_]{{8}}\.tmp"
    litter = _matching(path.parent, rf"\.{name}\.{process_id}({suffix})?|\.{{1,2}}{name}{written}")
    # Manifests first: a manifest must not outlive its artifact.
    for stale in sorted(litter, key=lambda path: not path.name.endswith(SUFFIX)):
        remove(stale)
    if beside(path).exists():
        _remove_aside(path)


def _remove_aside(path: Path) -> None:
    beside(_aside(path)).unlink(missing_ok=True)
    remove(_aside(path))  # last, because `once` looks for it


def _matching(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.iterdir() if re.fullmatch(pattern, path.name)]
