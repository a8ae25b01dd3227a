"""Atomic writes (temporary file, sync, rename), bounded reads, and a lock between processes.

JSON and TOML from any source are read with limits of size and depth, and never from a pipe or device. The readers raise
OSError, which names the file, or DocumentError. DocumentError is a ValueError too, so a caller that reports malformed
files in its own words catches both with `except (OSError, ValueError)`.
"""

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from sparkforge.core.errors import StorageError

CHUNK = 1 << 20
LARGEST = 64 << 20  # bytes of a file; our largest result has 3 MB
LARGEST_TOML = 4 << 20  # bytes; tomllib is slow, and our tables are written by hand
MOST_DOTS = 10**8  # sum of each line's squared number of dots; tomllib's time for dotted keys grows with it
MOST_VALUES = 10_000_000  # of one JSON text, by its commas and brackets: Python takes about 100 bytes for each
DEEPEST = 64  # nested tables and lists; a writer of such a value needs several calls per level
HOLDER_SECONDS = 0.5  # in which a process that has just got a lock writes its id into the file


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_size(folder: Path) -> int:
    """Return the bytes of all files under a folder, links not followed."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another process may remove it
                total += Path(top, name).lstat().st_size
    return total


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

    Also removes the temporary files of killed writers of `path`. Raises StorageError if the file system is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(path.parent, f".{glob.escape(path.name)}.*.tmp")
    while True:  # a lock on the file shows that its writer is alive
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        temporary = Path(name)
        with suppress(OSError):  # a file system without locks; nothing is swept there
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            break
        os.close(handle)  # another process swept it before it was locked
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


def sweep_temporaries(folder: Path, pattern: str) -> int:
    """Remove the temporary files in `folder` whose writer was killed; return their bytes. Those in use stay."""
    freed = 0
    for path in folder.glob(pattern):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(file.fileno()).st_size
            path.unlink()
            freed += size
    return freed


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o644) -> None:
    """Replace `path` by `data` in one step; text is written as UTF-8, a lone surrogate as its JSON escape."""
    with atomic_file(path, mode=mode) as file:
        file.write(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Replace `path` by `value` as indented JSON with sorted keys and a closing newline."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", mode=mode)


def disk_full(directory: Path) -> StorageError:
    """Return the error for a full file system, with its free space."""
    free = shutil.disk_usage(existing_part(directory)).free
    why, fix = f"the file system is full ({free / 1e9:.1f} GB free)", "again   # first free some space"
    return StorageError(f"cannot write under {directory}", why, fix, code="storage.full")


def existing_part(path: Path) -> Path:
    """Return `path`, or the nearest existing folder above it; never raises, whatever the name is."""
    return next((part for part in (path, *path.parents) if os.path.exists(part)), Path("/"))  # noqa: PTH110 - see above


def require_space(directory: Path, needed: int, purpose: str) -> None:
    """Raise StorageError unless `needed` bytes are free where `directory` is or will be."""
    existing = existing_part(directory)
    free = shutil.disk_usage(existing).free
    if free < needed:
        why = f"{existing} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed"
        places = "~/.cache/sparkforge/files can be removed too; SPARKFORGE_STATE moves the state"
        fix = f"./inv list   # ./inv rm removes a model; {places}"
        raise StorageError(f"not enough room for {purpose}", why, fix, code="storage.full")


def untrusted(path: Path, why: str, fix: str) -> StorageError:
    """Return the error for a file that decides which programs run, and that other users may have written."""
    return StorageError(f"{path} is not trusted", why, fix, code="storage.access")


def unreadable(folder: Path) -> tuple[str, str] | None:
    """Return why this process cannot read a folder's files, and the fix; None if it can, or the folder is missing.

    Links are followed, as in a snapshot of Hugging Face's cache, whose files are links into another folder.
    """
    if denied := _denied(folder.absolute()):
        return denied
    visible = [file for file in folder.iterdir() if not file.name.startswith(".")] if folder.is_dir() else []
    for file in sorted(visible):
        target = Path(os.path.realpath(file))
        if denied := _denied(target):
            return denied
        if not target.exists():
            why = f"{file.name} is a link to {file.readlink()}, which is not there"
            return why, "name or mount the whole cache: a snapshot's files are links into the folder blobs beside it"
    return None


def _denied(path: Path) -> tuple[str, str] | None:
    """Return why a part of `path` cannot be read, and the command that fixes it; None if `path` can be read."""
    for part in (*reversed(path.parents), path):
        mode = (os.R_OK if part == path else 0) | (os.X_OK if part.is_dir() else 0)
        if not part.exists() or os.access(part, mode):
            continue
        status = part.stat()
        groups = ", ".join(map(str, sorted({os.getegid(), *os.getgroups()})))
        why = (
            f"{os.strerror(errno.EACCES)}: {part} belongs to uid {status.st_uid}, group {status.st_gid}, with mode "
            f"{stat.S_IMODE(status.st_mode):04o}, and this is uid {os.geteuid()}, groups {groups}"
        )
        by_group = status.st_mode & stat.S_IRGRP and status.st_mode & stat.S_IXGRP
        user = f"--group-add {status.st_gid}" if by_group else f"--user {status.st_uid}:{status.st_gid}"
        return why, f"chmod -R a+rX {part}   # in a container: of the mounted folder; or docker run {user}"
    return None


@contextmanager
def locked(path: Path, purpose: str) -> Iterator[None]:
    """Hold an exclusive lock on `path` while inside; the kernel drops it when the process dies.

    The file names the process that holds it. Raises StorageError at once, with that id, if another process does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = f"another Sparkforge command{_holder(path)} holds {path}"
            raise StorageError(f"cannot {purpose}", why, "again   # when it has ended", code="storage.busy") from None
        with suppress(OSError):  # a full disk: the process holds the lock without its line in the file
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"pid {os.getpid()}: {purpose}\n".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                os.ftruncate(file.fileno(), 0)


def holder(path: Path, purpose: str) -> int | None:
    """Return the id of our process that holds the lock `path` for `purpose`; None if there is none.

    A killed holder leaves its line in the file, so the process must also have the file open.
    """
    try:
        pid, _, named_purpose = path.read_text(encoding="utf-8").removeprefix("pid ").partition("\n")[0].partition(": ")
        descriptors = list(Path("/proc", str(int(pid)), "fd").iterdir())
    except (OSError, ValueError):  # no such process, or another user's
        return None
    is_open = str(path.resolve()) in map(os.path.realpath, descriptors)
    return int(pid) if is_open and named_purpose == purpose else None


def _holder(path: Path) -> str:
    deadline = time.monotonic() + HOLDER_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            if line := path.read_text(encoding="utf-8").partition("\n")[0]:
                return f" ({line})"
        time.sleep(0.01)
    return ""


class DocumentError(StorageError, ValueError):
    """A file is not valid JSON or TOML; str() returns only the reason."""

    def __init__(self, origin: str, why: str) -> None:
        fix = "again   # first correct or remove that file"
        super().__init__(f"cannot read {origin}", why, fix, code="storage.access")

    def __str__(self) -> str:
        return self.why


def read_bytes(path: Path, *, largest: int = LARGEST) -> bytes:
    """Return the content of a regular file. Raises OSError; DocumentError for another kind of file or a larger one."""
    try:
        # A pipe without a writer would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the name
        raise DocumentError(repr(str(path)), str(error)) from None
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise DocumentError(str(path), "it is not a file but a pipe, socket or device")
        with open(handle, "rb", closefd=False) as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error  # errors of read() do not name the file
    finally:
        os.close(handle)
    if len(data) > largest:
        raise DocumentError(str(path), f"it has more than {largest:,} bytes")
    return data


def read_text(path: Path, *, largest: int = LARGEST) -> str:
    """Return a regular file's text. Raises OSError, DocumentError."""
    return _text(read_bytes(path, largest=largest), str(path))


def read_json(path: Path, *, largest: int = LARGEST, finite: bool = True) -> Any:
    """Return the value in a JSON file; see parse_json. Raises OSError, DocumentError."""
    return parse_json(read_bytes(path, largest=largest), str(path), finite=finite)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file. Raises OSError, DocumentError."""
    origin = str(path)
    text = _text(read_bytes(path, largest=LARGEST_TOML), origin).replace("\r\n", "\n")
    if sum(line.count(".") ** 2 for line in text.splitlines()) > MOST_DOTS:
        raise DocumentError(origin, f"it is nested deeper than {DEEPEST} levels, by dotted keys")
    value: dict[str, Any] = _parsed(tomllib.loads, text, origin, "TOML")
    return value


def parse_json(data: bytes | str, origin: str, *, finite: bool = True) -> Any:
    """Return the value in JSON text; `origin` names its source in errors. Raises DocumentError.

    Without `finite`, NaN and infinity are accepted; Python's json module writes them for missing figures.
    """
    text = _text(data, origin) if isinstance(data, bytes) else data
    if len(text) > MOST_VALUES and sum(map(text.count, ",[{")) > MOST_VALUES:
        raise DocumentError(origin, f"it holds more than {MOST_VALUES:,} values")
    return _parsed(json.loads, text, origin, "JSON", finite=finite)


def _text(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(origin, f"it is not text: byte {error.start} is {data[error.start]:#x}") from None


def _parsed(parse: Callable[[str], Any], text: str, origin: str, form: str, *, finite: bool = True) -> Any:
    try:
        value = parse(text)
    except RecursionError:
        raise DocumentError(origin, f"it is nested deeper than {DEEPEST} levels") from None
    except ValueError as error:
        why = " ".join(str(error).partition("; use sys.")[0].split())  # Python's advice is about its own settings
        raise DocumentError(origin, f"it is not {form}: {why[:200]}") from None
    levels: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        if not levels:
            return value
        inner: list[Any] = []
        for item in levels:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif finite and isinstance(item, float) and not math.isfinite(item):
                raise DocumentError(origin, f"it holds the number {item}")
            elif isinstance(item, int) and abs(item) >> 64:
                raise DocumentError(origin, f"it holds a number of {item.bit_length()} bits")
        levels = inner
    raise DocumentError(origin, f"it is nested deeper than {DEEPEST} levels")
