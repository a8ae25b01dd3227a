"""Compare an installed distribution with its RECORD: which files were edited, removed or added since.

RECORD (https://packaging.python.org/en/latest/specifications/recording-installed-packages/) lists a wheel's files with
their hashes; an installer adds lines. Without the installer's lines, the wheel's RECORD and the installed one have the
same digest, which `locks/patched.toml` holds for each wheel that we patch.
"""

import _imp
import base64
import csv
import hashlib
import io
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import CHUNK, read_text

LARGEST_RECORD = 64 << 20  # bytes, our own bound; FlashInfer's has 1 MB
# Files that pip and uv write into a dist-info folder and list in RECORD.
INSTALLERS = frozenset({"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"})
SCRIPT = re.compile(r"\.\./\.\./\.\./bin/[^/]+")
SHA256 = re.compile(r"sha256=([A-Za-z0-9_-]{43})")
IMPORTABLE = (".py", ".pyc", ".so")
WORKERS = min(8, os.cpu_count() or 1)
UNCHECKED_HASH = 0b01  # flags of an unchecked hash-based .pyc: Python does not compare the source's hash; PEP 552
REINSTALL = "./inv up   # first remove the package's environment; this installs it again"


@dataclass(frozen=True)
class RecordLine:
    """One file of RECORD: its path below site-packages, the sha256 of its bytes (hex), and their number."""

    path: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Installed:
    """A distribution in site-packages: its dist-info folder, and RECORD's lines without those of the installer."""

    info: Path
    name: str
    version: str
    lines: tuple[RecordLine, ...]

    @classmethod
    def read(cls, info: Path, *, strict: bool = True) -> Self:
        """Read the RECORD in a dist-info folder; `strict` as in `parse_record`. Raises IntegrityError."""
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        name = re.sub(r"[-_.]+", "-", name).lower()
        record = info / "RECORD"
        try:
            text = read_text(record, largest=LARGEST_RECORD)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise _unreadable(str(record), reason) from None
        return cls(info, name, version, parse_record(text, str(record), strict=strict))

    @property
    def packages(self) -> Path:
        """The site-packages folder."""
        return self.info.parent

    @property
    def record(self) -> str:
        """The digest of RECORD without the installer's lines; the wheel's RECORD has the same digest."""
        return record_digest(self.lines)

    def differences(
        self,
        *,
        left_out: Collection[str] = (),
        compiled: Mapping[str, str] | None = None,
        added: Collection[str] | None = (),
    ) -> list[str]:
        """Return how the distribution's files differ from RECORD, as `path: change`, sorted; empty if they do not.

        Files in or below `left_out` may be missing. The hashes of `compiled` (path → sha256) replace those of RECORD.
        Files that RECORD does not list are allowed below the folders `added`; None allows them everywhere.
        """
        compiled = compiled or {}

        def judge(line: RecordLine) -> str:
            path = f"{self.packages}/{line.path}"
            try:
                with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
                    status = os.fstat(file.fileno())
                    if not stat.S_ISREG(status.st_mode):
                        return f"{line.path}: is not a regular file"
                    if line.path not in compiled and status.st_size != line.size:
                        return f"{line.path}: was changed, it has {status.st_size:,} bytes and not {line.size:,}"
                    large = status.st_size >= CHUNK
                    digest = hashlib.file_digest(file, "sha256") if large else hashlib.sha256(file.read())
                    is_same = digest.hexdigest() == compiled.get(line.path, line.sha256)
                    return "" if is_same else f"{line.path}: was changed"
            except (FileNotFoundError, NotADirectoryError):
                return "" if is_below(line.path, left_out) else f"{line.path}: is missing"
            except OSError as error:
                return f"{line.path}: cannot be read, {error.strerror}"

        with ThreadPoolExecutor(WORKERS) as pool:  # hashing releases the GIL
            large = pool.map(judge, [line for line in self.lines if line.size >= CHUNK])
            changes = [judge(line) for line in self.lines if line.size < CHUNK]  # faster without a thread
            if added is not None:
                changes += _extra(str(self.packages), {line.path for line in self.lines}, added)
            changes += large
        return sorted(change for change in changes if change)


def parse_record(text: str, source: str, *, strict: bool = True) -> tuple[RecordLine, ...]:
    """Return the lines of a wheel's RECORD, or of an installed one without those of the installer.

    `source` names it in errors. Raises IntegrityError if it is not a RECORD, and for a line without sha256 or size, or
    with a path that leads out of site-packages or is listed twice; without `strict` such lines are left out.
    """
    lines = dict[str, RecordLine]()
    try:
        for row in csv.reader(io.StringIO(text, newline="")):
            if not row or _is_installers(row[0]):
                continue
            try:
                line = _line(*row)
            except (TypeError, ValueError) as error:
                if strict:
                    raise _unreadable(source, f"after {len(lines)} lines: {str(error)[:200]}") from None
                continue
            if strict and line.path in lines:
                raise _unreadable(source, f"it names {line.path} twice")
            lines[line.path] = line
    except csv.Error as error:
        raise _unreadable(source, f"after {len(lines)} lines: {error}") from None
    if not lines and strict:
        raise _unreadable(source, "it is empty")
    return tuple(lines.values())


def record_digest(lines: Iterable[RecordLine]) -> str:
    """Return the sha256 over lines of RECORD: `path,sha256=…,size`, sorted, each with a line end, nothing quoted."""
    texts = []
    for line in lines:
        encoded = base64.urlsafe_b64encode(bytes.fromhex(line.sha256)).rstrip(b"=").decode()
        texts.append(f"{line.path},sha256={encoded},{line.size}\n")
    return hashlib.sha256("".join(sorted(texts)).encode()).hexdigest()


def is_below(path: str, parents: Collection[str]) -> bool:
    """Tell whether `path` is one of `parents`, or below one that is a folder."""
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)


def _is_installers(path: str) -> bool:
    if SCRIPT.fullmatch(path) or "/__pycache__/" in f"/{path}":
        return True
    folder, _, name = path.partition("/")
    return folder.endswith(".dist-info") and (name == "RECORD" or name in INSTALLERS)


def _line(path: str, digest: str, size: str) -> RecordLine:
    if not path.isprintable() or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"it names {path[:100]!r}, which is not a file of a package")
    if not (match := SHA256.fullmatch(digest)):
        raise ValueError(f"{path[:100]} has {digest[:80]!r}, which is not a sha256")
    return RecordLine(path, base64.urlsafe_b64decode(f"{match[1]}=").hex(), int(size))


def _extra(packages: str, wanted: Collection[str], added: Collection[str]) -> Iterator[str]:
    """Yield the importable files and links in the distribution's folders that are not in RECORD, and stale bytecode."""
    for top in sorted({path.partition("/")[0] for path in wanted if "/" in path}):
        for folder, below, names in os.walk(f"{packages}/{top}"):
            relative = folder[len(packages) + 1 :]
            below[:] = [name for name in below if not is_below(f"{relative}/{name}", added)]
            for name in below:
                if Path(folder, name).is_symlink():
                    yield f"{relative}/{name}: is a link to a folder"
            for name in names:
                if not name.endswith(IMPORTABLE) or f"{relative}/{name}" in wanted:
                    continue
                if not folder.endswith("/__pycache__"):
                    yield f"{relative}/{name}: was added"
                elif _is_stale(folder, name):
                    yield f"{relative}/{name}: was compiled from another source"


def _is_stale(folder: str, name: str) -> bool:
    """Tell whether a `.pyc` in a `__pycache__` was compiled from another source, and Python would still run it.

    Only an unchecked hash-based `.pyc` (PEP 552), as in our images, can be stale: Python recompiles others by itself.
    """
    with suppress(OSError), Path(folder, name).open("rb") as file:
        header = file.read(16)
        if len(header) == 16 and int.from_bytes(header[4:8], "little") == UNCHECKED_HASH:
            source = Path(folder).parent / f"{name.partition('.')[0]}.py"
            return _imp.source_hash(int.from_bytes(header[:4], "little"), source.read_bytes()) != header[8:]
    return False


def _unreadable(source: str, why: str) -> IntegrityError:
    return IntegrityError(f"{source} cannot be read", why, REINSTALL, code="integrity.installed")
