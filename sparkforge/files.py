"""Files that are whole or absent: written beside their place, synced, renamed; and a lock between processes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from sparkforge.errors import BusyError, DiskFullError, UsageError

CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes, read in chunks of 1 MiB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(path: Path) -> None:
    """Make a rename inside `path` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success sync and rename it there, on any error remove it.

    Raises DiskFullError where the file system has no room.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path.parent) from error
        raise
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o644) -> None:
    """Replace `path` by `data` (text as UTF-8) in one step."""
    with atomic_file(path, mode=mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON with sorted keys and a closing newline."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def disk_full(directory: Path) -> DiskFullError:
    """Build the error for a file system without room, with what is left on it."""
    free = shutil.disk_usage(directory).free
    return DiskFullError(
        f"cannot write under {directory}",
        f"the file system is full ({free / 1e9:.1f} GB free)",
        "free some space, then run the same command again",
    )


def require_space(directory: Path, needed: int, purpose: str) -> None:
    """Raise DiskFullError unless `needed` bytes are free where `directory` is or will be."""
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DiskFullError(
            f"not enough room for {purpose}",
            f"{existing} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed",
            "free some space, or set SPARKFORGE_STATE and SPARKFORGE_CACHE to a larger disk",
        )


def require_writable(path: Path) -> Path:
    """Return `path`, whose folder is made, if a file can be put there: asked before minutes go into what it will hold.

    Raises UsageError.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        told = error.strerror or str(error)
        raise UsageError(f"cannot write {path}", told, "name a file in a folder of yours: --output FILE") from error
    return path


@contextmanager
def locked(path: Path, purpose: str) -> Iterator[None]:
    """Hold an exclusive lock on `path` while inside; the kernel drops it when the process dies.

    Raises BusyError at once if another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"cannot {purpose}",
                f"another Sparkforge process holds {path}",
                "wait for it to end, then run the same command again",
            ) from None
        yield
