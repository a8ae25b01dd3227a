"""Work from an unpacked bundle instead of the network.

A bundle holds files by hash and, over them, a package index of plain HTML pages (PEP 503), so that pip and uv read it
as any index: `PIP_INDEX_URL=file:///…/simple`. What is taken from it is checked against this checkout's own pins and
locks, never against the bundle's.
"""

from __future__ import annotations

import os
from pathlib import Path

from forge import index
from sparkforge.errors import FetchError, HashMismatchError, UsageError
from sparkforge.files import CHUNK, atomic_file, sha256_file
from sparkforge.paths import typed

VARIABLE = "SPARKFORGE_OFFLINE"
INDEX = "index.json"


def use(folder: Path) -> None:
    """Bring everything from the unpacked bundle in `folder` from now on, in this process and those it starts.

    Raises UsageError if it is no unpacked bundle.
    """
    if not (folder / INDEX).is_file():
        hint = f"./inv bundle.unpack {folder}" if folder.is_file() else "./inv bundle.unpack FILE"
        raise UsageError(f"{folder} is no unpacked bundle", f"it has no {INDEX}", f"unpack the bundle first: {hint}")
    os.environ |= {VARIABLE: str(folder.absolute()), "PIP_INDEX_URL": (folder.absolute() / "simple").as_uri(),
                   "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}  # fmt: skip
    index.pip_config.cache_clear()


def use_bundle(chosen: str) -> None:
    """Use the folder that a command line names; an empty word leaves the network in use."""
    if chosen:
        use(typed(chosen))


def folder() -> Path | None:
    """Return the bundle that everything comes from; None when the network may be used."""
    return Path(chosen) if (chosen := os.environ.get(VARIABLE)) else None


def bring(filename: str, sha256: str, target: Path) -> None:
    """Copy one file of the bundle to `target`. Raises FetchError if there is none, HashMismatchError if it is wrong."""
    source = Path(os.environ[VARIABLE]) / "files" / sha256 / filename
    if not source.is_file():
        raise FetchError(
            f"cannot bring {filename}",
            f"the bundle has no such file with sha256 {sha256}, which pins.toml or a lock asks for",
            "make the bundle from this very commit, on a machine with a network: ./inv bundle",
        )
    if (got := sha256_file(source)) != sha256:
        raise HashMismatchError(
            f"{filename} is not the file that was pinned",
            f"wanted sha256 {sha256}, the bundle has {got}; nothing was kept",
            "copy the bundle again and unpack it afresh: ./inv bundle.unpack FILE",
        )
    with source.open("rb") as file, atomic_file(target) as out:
        while chunk := file.read(CHUNK):
            out.write(chunk)
