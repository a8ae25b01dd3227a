"""Bring a pinned file: from the cache if its bytes are still right, else from the index, hashed while it streams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx

from forge import offline
from forge.index import client, locate
from forge.pins import Component
from sparkforge import paths
from sparkforge.console import download_bar, say
from sparkforge.errors import FetchError, HashMismatchError
from sparkforge.files import CHUNK, atomic_file, require_space, sha256_file


def cached(filename: str, sha256: str) -> Path:
    """Return where a verified file lies: a folder a hash, so that two files of one name never meet."""
    return paths.cache() / "files" / sha256 / filename


def fetch_all(component: Component, *, only: str = "") -> list[Path]:
    """Bring every file of `component` whose name ends with `only` and return their paths."""
    package = component.package or ""
    return [fetch(package, name, sha) for name, sha in component.files.items() if name.endswith(only)]


def fetch(package: str, filename: str, sha256: str) -> Path:
    """Bring one file and return its path in the cache.

    Raises FetchError if it cannot be had, HashMismatchError if it is another file than was pinned (nothing is kept),
    DiskFullError if there is no room.
    """
    target = cached(filename, sha256)
    if target.is_file():
        if sha256_file(target) == sha256:
            return target
        say(f"{filename}: the copy in the cache is damaged; bringing it again")
        target.unlink()
    if offline.folder():
        offline.bring(filename, sha256, target)
        return target
    with client() as http:
        download(locate(package, filename, http), target, sha256, http)
    return target


def download(url: str, target: Path, sha256: str, http: httpx.Client) -> None:
    """Stream `url` to `target`, which appears only if its sha256 is right. Raises as `fetch` does."""
    digest = hashlib.sha256()
    try:
        with http.stream("GET", url) as reply:
            reply.raise_for_status()
            size = int(reply.headers.get("content-length", 0)) or None
            require_space(target.parent, size or 0, target.name)
            with atomic_file(target) as file, download_bar(target.name, size) as advance:
                for chunk in _chunks(reply):
                    digest.update(chunk)
                    file.write(chunk)
                    advance(len(chunk))
                # Inside atomic_file: raising here drops the temporary file.
                _check(target.name, sha256, digest.hexdigest())
    except httpx.HTTPError as error:
        raise FetchError(
            f"cannot bring {target.name}",
            f"the transfer failed: {error}",
            "check the network, then run the same command again",
        ) from error


def _chunks(reply: httpx.Response) -> Iterator[bytes]:
    # Raw bytes: an index that adds Content-Encoding must not change what is hashed.
    yield from reply.iter_raw(CHUNK)


def _check(name: str, wanted: str, got: str) -> None:
    if wanted != got:
        raise HashMismatchError(
            f"{name} is not the file that was pinned",
            f"wanted sha256 {wanted}, got {got}; nothing was kept",
            "do not trust this source; check the mirror, then run the same command again",
        )
