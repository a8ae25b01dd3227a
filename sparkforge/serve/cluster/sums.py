"""What `./inv cluster.sync` asks of a node: `python3 - ARGUMENT < sums.py`, which prints one JSON object.

It runs by that machine's own Python 3.9 or newer, as the user that ssh logs in, and imports the standard library alone.
A folder that is not there yet is collected beside its place, in `.NAME.sparkforge-sync`.

The argument is a JSON object with a `mode`, a `folder`, and `patterns` of file names:
  list   sizes and sha256 of the folder's files, or of what was collected for it; `known` sums are not computed again,
         and a file of another size than in `sizes` has none
  stage  make the folder in which it is collected
  keep   rename that one to its place
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
SUFFIX = ".sparkforge-sync"


def listing(options: dict[str, Any]) -> dict[str, Any]:
    """Return the files, where they are, and the free bytes there."""
    folder = Path(options["folder"])
    path = folder if folder.is_dir() else staged(folder)
    files = {}
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        if file.is_file() and any(fnmatchcase(file.name, pattern) for pattern in options["patterns"]):
            size = file.stat().st_size
            wanted = options.get("sizes", {}).get(file.name, size)
            total = options.get("known", {}).get(file.name) or (sha256(file) if size == wanted else "")
            files[file.name] = {"size": size, "sha256": total}
    existing = next(part for part in (path, *path.parents) if part.exists())
    return {
        "files": files,
        "path": str(path),
        "whole": folder.is_dir(),
        "free": shutil.disk_usage(existing).free,
    }


def staged(folder: Path) -> Path:
    """Return where a folder is collected."""
    return folder.with_name(f".{folder.name}{SUFFIX}")


def sha256(file: Path) -> str:
    """Return a file's sha256 in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def stage(options: dict[str, Any]) -> dict[str, Any]:
    """Make the folder in which files are collected."""
    folder = Path(options["folder"])
    if not folder.is_dir():
        staged(folder).mkdir(parents=True, exist_ok=True)
    return {}


def keep(options: dict[str, Any]) -> dict[str, Any]:
    """Sync what was collected and rename it to its place."""
    folder = Path(options["folder"])
    if not folder.is_dir():
        for file in staged(folder).iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        staged(folder).rename(folder)
    return {}


def main(argument: str) -> None:
    """Print the answer to one argument; an error is an answer too."""
    options = json.loads(argument)
    try:
        answer = {"list": listing, "stage": stage, "keep": keep}[options["mode"]](options)
    except OSError as error:
        answer = {"error": " ".join(str(error).split())}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
