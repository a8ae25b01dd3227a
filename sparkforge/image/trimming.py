"""Leave out of an image what its device cannot load: the table deploy/trim.toml and the removal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core.documents import read_toml
from sparkforge.core.errors import IntegrityError
from sparkforge.core.manifest import remove
from sparkforge.core.paths import ROOT
from sparkforge.plan import families

TABLE = ROOT / "deploy/trim.toml"


@dataclass(frozen=True)
class Cut:
    """A part that an image leaves out: paths below site-packages, and why."""

    name: str
    paths: tuple[str, ...]
    why: str


def cuts(device: str, table: Path | None = None) -> list[Cut]:
    """Return what the table, deploy/trim.toml unless another is named, leaves out of the device's image.

    What a family of models needs stays (families.toml, `untrimmed`).
    """
    entries: dict[str, dict[str, Any]] = read_toml(table or TABLE).get(device, {})
    needed = {name for family in families.load().values() for name in family.untrimmed}
    return [Cut(name, tuple(row["paths"]), row["why"]) for name, row in entries.items() if name not in needed]


def trim(packages: Path, cuts: Sequence[Cut]) -> dict[str, int]:
    """Remove what `cuts` name; return the bytes that each freed. Raises IntegrityError if a path matches nothing.

    A name that no longer exists means that upstream moved something, and with it perhaps the reason.
    """
    freed = {}
    for cut in cuts:
        freed[cut.name] = 0
        for pattern in cut.paths:
            matches = sorted(packages.glob(pattern))
            if not matches:
                why = f"{pattern} of [{cut.name}] matches nothing under {packages}"
                fix = "less deploy/trim.toml   # look where upstream moved it"
                raise IntegrityError("the trimming table is out of date", why, fix, code="integrity.image-tree")
            for path in matches:
                files = [path, *path.rglob("*")] if not path.is_symlink() else []
                freed[cut.name] += sum(f.lstat().st_size for f in files if f.is_file() and not f.is_symlink())
                remove(path)
    return freed


def pattern(cuts: Sequence[Cut]) -> re.Pattern[str]:
    """Return a pattern for the beginning of every path that `cuts` leave out; group 1 is the file or folder."""
    globs = "|".join(re.escape(path).replace(r"\*", "[^/]*") for cut in cuts for path in cut.paths)
    return re.compile(f"({globs})(?:/|$)")
