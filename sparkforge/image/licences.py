"""Licence texts for the images: wheels that come without one get upstream's, from the table deploy/licences.toml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sparkforge.core.documents import read_toml
from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import sha256_file, write_atomic
from sparkforge.core.paths import ROOT

TABLE = ROOT / "deploy/licences.toml"
TEXT = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)


def add(packages: Path, table: Path | None = None) -> list[str]:
    """Give each distribution without a licence text those that the table has for it; return the names of these.

    They lie in dist-info/licenses, as wheels have them (PEP 639). Raises IntegrityError if a text of ours is not the
    one that the table pins.
    """
    table = table or TABLE
    document: dict[str, Any] = read_toml(table)
    added = []
    for name, info in without(packages).items():
        if name not in document["distributions"]:
            continue
        for file, text in document["distributions"][name]["files"].items():
            source = table.with_suffix("") / text
            if not source.is_file() or sha256_file(source) != document["texts"][text]:
                why = "it is gone, or its sha256 is another"
                raise IntegrityError(
                    f"{source} is not the text in {table.name}", why, f"git checkout {table.parent.name}",
                    code="integrity.hash",
                )  # fmt: skip
            write_atomic(info / "licenses" / file, source.read_bytes())
        added.append(name)
    return added


def without(packages: Path) -> dict[str, Path]:
    """Return the distributions that have no licence text in their dist-info, by name."""
    return {
        canonicalize_name(info.name.partition("-")[0]): info
        for info in sorted(packages.glob("*.dist-info"))
        if not any(path.is_file() and TEXT.search(path.name) for path in info.rglob("*"))
    }
