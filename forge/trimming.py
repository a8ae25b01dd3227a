"""What an image leaves out of the wheels that it is made from: the table deploy/trim.toml, and doing it."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sparkforge.errors import ImageTreeError
from sparkforge.paths import ROOT

TABLE = ROOT / "deploy/trim.toml"


@dataclass(frozen=True)
class Cut:
    """What is left out of an image: paths below site-packages, and why."""

    name: str
    paths: tuple[str, ...]
    why: str


def cuts(device: str, table: Path | None = None) -> list[Cut]:
    """Return what the table, deploy/trim.toml unless another is named, leaves out of the device's image."""
    entries: dict[str, dict[str, Any]] = tomllib.loads((table or TABLE).read_text(encoding="utf-8")).get(device, {})
    return [Cut(name, tuple(entry["paths"]), entry["why"]) for name, entry in entries.items()]


def trim(packages: Path, chosen: Sequence[Cut]) -> dict[str, int]:
    """Remove what `chosen` names; return the bytes that each freed. Raises ImageTreeError if a path matches nothing.

    A name that no longer exists means that upstream moved something, and with it perhaps the reason.
    """
    freed = {}
    for cut in chosen:
        freed[cut.name] = 0
        for pattern in cut.paths:
            found = sorted(packages.glob(pattern))
            if not found:
                why = f"{pattern} of [{cut.name}] matches nothing under {packages}"
                raise ImageTreeError(
                    "the trimming table is out of date", why, "look where upstream moved it; edit deploy/trim.toml"
                )
            freed[cut.name] += sum(_remove(path) for path in found)
    return freed


def _remove(path: Path) -> int:
    """Remove a file, link or folder; return its bytes on disk."""
    if path.is_symlink() or not path.is_dir():
        size = 0 if path.is_symlink() else path.stat().st_size
        path.unlink()
        return size
    size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    shutil.rmtree(path)
    return size


def is_cut(path: str, chosen: Sequence[Cut]) -> bool:
    """Tell whether `path`, below site-packages, is one that `chosen` leaves out."""
    whole = PurePosixPath("/", path)  # absolute: a relative pattern would match the end of any path
    return any(each.match(f"/{pattern}") for cut in chosen for pattern in cut.paths for each in (whole, *whole.parents))
