"""Work from an unpacked bundle instead of the network.

A bundle holds files by hash and a package index of plain HTML pages over them (PEP 503), which pip and uv read like any
index: `PIP_INDEX_URL=file:///…/simple`. Its files are checked against this checkout's pins and locks, never against the
bundle's.
"""

import os
import shlex
from pathlib import Path

from sparkforge.core.errors import UsageError
from sparkforge.core.paths import typed

VARIABLE = "SPARKFORGE_OFFLINE"
INDEX = "index.json"


def use(folder: Path) -> None:
    """Use the unpacked bundle in `folder` instead of the network, also in child processes. Raises UsageError."""
    if not (folder / INDEX).is_file():
        words = ["./inv", "bundle.unpack", *([str(folder), f"{folder}.unpacked"] if folder.is_file() else ["--help"])]
        fix = f"{shlex.join(words)}   # unpacks a bundle"
        raise UsageError(f"{folder} is not an unpacked bundle", f"it has no {INDEX}", fix)
    os.environ |= {VARIABLE: str(folder.absolute()), "PIP_INDEX_URL": (folder.absolute() / "simple").as_uri(),
                   "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}  # fmt: skip


def use_bundle(chosen: str) -> None:
    """Use the bundle in the folder that a command line names; with an empty name, the network stays in use."""
    if chosen:
        use(typed(chosen))


def folder() -> Path | None:
    """Return the folder of the bundle in use; None if the network is used."""
    return Path(chosen) if (chosen := os.environ.get(VARIABLE)) else None
