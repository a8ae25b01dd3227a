"""Fetch a pinned file: from the cache if its bytes are still right, else from the index, hashed during the download.

The index is pip's, with the folders in pip's configuration. A component that pip's index lacks, such as torch without
CUDA, names its own index. A download stops at the pinned size. Processes that need the same file wait for one download.
"""

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import quote

import httpx
from filelock import FileLock

from sparkforge.core import paths
from sparkforge.core.console import download_bar, say
from sparkforge.core.errors import IntegrityError, NetworkError
from sparkforge.core.files import CHUNK, atomic_file, require_space, sha256_file, sweep_temporaries
from sparkforge.core.http import LimitError
from sparkforge.pins import Component
from sparkforge.pins.index import attempts, client, locate, pip_config, reason
from sparkforge.sources import offline

LARGEST = 4 << 30  # bytes of a file whose size neither pin nor index has; the largest pinned file has 0.45 GB
SLOWEST = 20_000  # bytes a second; a transfer may take START_SECONDS plus its size at this speed
START_SECONDS = 600.0


def cached(filename: str, sha256: str) -> Path:
    """Return the path of a verified file: each hash has a folder, so that files of one name do not collide.

    Raises NetworkError if the name, which comes from an index, contains a path.
    """
    plain = filename not in ("", "..") and Path(filename).name == filename and "\0" not in filename
    if not plain or len(filename.encode(errors="replace")) > 200:  # NAME_MAX, less the prefix of a temporary file
        fix = "pip config list   # check the index"
        raise NetworkError(f"cannot fetch {filename[:80]!r}", "it is not a plain file name", fix, code="network.fetch")
    return paths.cache() / "files" / sha256 / filename


@contextmanager
def locked_download(target: Path) -> Iterator[None]:
    """Hold the lock of one file of the cache; wait while another process fetches it."""
    folder = paths.cache() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{target.parent.name}.lock"):
        target.parent.mkdir(parents=True, exist_ok=True)
        yield


@cache
def sweep(files: Path) -> int:
    """Remove temporary files of killed downloads under `files`, once per process; return their bytes."""
    freed = sum(sweep_temporaries(folder, ".*.tmp") for folder in files.glob("*/"))
    if freed:
        say(f"removed {freed / 1e6:.1f} MB of interrupted downloads")
    return freed


def fetch_pinned(component: Component, filename: str) -> Path:
    """Fetch one file of `component` and return its path in the cache. Raises as `fetch` does."""
    size = component.size_of(filename)
    return fetch(component.package or "", filename, component.files[filename], size, component.index)


def fetch(package: str, filename: str, sha256: str, size: int | None = None, index: str | None = None) -> Path:
    """Fetch one file and return its path in the cache; `size` is the pinned size, None if there is none.

    `index` is the URL of the folder with the file if pip's index lacks it. Raises NetworkError if the file cannot be
    fetched, IntegrityError if it is larger than the pin or has another hash, StorageError if there is no space; then
    nothing is kept.
    """
    target = cached(filename, sha256)
    if intact(target, sha256):
        return target
    sweep(target.parent.parent)
    with locked_download(target):
        if intact(target, sha256):  # another process has fetched it meanwhile
            return target
        if target.exists():
            say(f"{filename}: the copy in the cache is damaged; fetching it again")
        if bundle := offline.folder():
            _copy(_bundled(bundle, target, sha256), target)
            return target
        beside_pip = (folder / filename for folder in pip_config().find_links)
        if linked := next((path for path in beside_pip if path.is_file() and intact(path, sha256)), None):
            _copy(linked, target)
            return target
        with client() as http:
            try:
                url, listed = locate(package, filename, http)
            except NetworkError:
                if not index:
                    raise
                url, listed = f"{index}/{quote(filename)}", None
            try:
                attempts()(download, url, target, sha256, http, size or listed)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError) as error:  # the last three: a bad URL
                why = reason(error) if isinstance(error, httpx.HTTPError) else str(error)[:300]
                fix = "again   # first check the network, or set PIP_FIND_LINKS to a folder that has it"
                failure, why = f"cannot fetch {filename}", f"the transfer failed: {why}"
                raise NetworkError(failure, why, fix, code="network.fetch") from error
    return target


def intact(target: Path, sha256: str) -> bool:
    """Tell whether the cache holds this file; another process may replace it meanwhile."""
    try:
        return sha256_file(target) == sha256
    except FileNotFoundError:
        return False


def download(url: str, target: Path, sha256: str, http: httpx.Client, size: int | None = None) -> None:
    """Download at most `size` bytes with that sha256. Raises IntegrityError, StorageError and httpx's errors."""
    digest, count, limit = hashlib.sha256(), 0, size or LARGEST
    deadline = time.monotonic() + START_SECONDS + limit / SLOWEST
    with http.stream("GET", url) as response:
        response.raise_for_status()
        length = response.headers.get("content-length", "")
        promised = int(length) if length.isdecimal() and len(length) < 20 else None
        if promised is not None and promised > limit:
            raise _too_large(target.name, sha256, limit, f"the server announces {promised} bytes")
        require_space(target.parent, promised or size or 0, target.name)
        with atomic_file(target) as file, download_bar(target.name, promised or size) as advance:
            # Raw bytes, so that an index's Content-Encoding does not change the hashed bytes.
            for chunk in response.iter_raw(CHUNK):
                count += len(chunk)
                if count > limit:
                    raise _too_large(target.name, sha256, limit, "more came")
                if time.monotonic() > deadline:
                    raise LimitError(f"{count} bytes arrived in {START_SECONDS + limit / SLOWEST:.0f} s")
                digest.update(chunk)
                file.write(chunk)
                advance(len(chunk))
            if digest.hexdigest() != sha256:  # inside atomic_file, which removes the temporary file after an error
                raise wrong_file(target.name, f"wanted sha256 {sha256}, got {digest.hexdigest()}")


def _bundled(bundle: Path, target: Path, sha256: str) -> Path:
    """Return a file of the unpacked bundle. Raises NetworkError if it has none, IntegrityError if it is wrong."""
    source = bundle / "files" / sha256 / target.name
    if not source.is_file():
        why = f"the bundle has no such file with sha256 {sha256}, which pins.toml or a lock requires"
        fix = "./inv bundle   # on a machine with a network, at the same commit"
        raise NetworkError(f"cannot fetch {target.name}", why, fix, code="network.fetch")
    if (digest := sha256_file(source)) != sha256:
        fix = "./inv bundle.unpack --help   # copy the bundle again and unpack it into a new folder"
        raise wrong_file(target.name, f"wanted sha256 {sha256}, the bundle has {digest}", fix)
    return source


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as file, atomic_file(target) as output:
        shutil.copyfileobj(file, output, CHUNK)


def wrong_file(
    name: str, why: str, fix: str = "again   # do not trust this source: first check the mirror"
) -> IntegrityError:
    """Build the error for a file that is not the pinned one."""
    failure = f"{name} is not the file that was pinned"
    return IntegrityError(failure, f"{why}; nothing was kept", fix, code="integrity.hash")


def _too_large(name: str, sha256: str, limit: int, why: str) -> IntegrityError:
    return wrong_file(name, f"the pin with sha256 {sha256} has at most {limit} bytes, and {why}")
