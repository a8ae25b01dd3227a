"""Unpack sdists and wheels: regular files and folders inside one folder, or nothing at all.

Python's own `tarfile.data_filter` allows links, and Python 3.11.0 to 3.11.3 (Debian bookworm's) lack it. No archive
that we pin holds a link, so this module refuses links and everything else that is not a plain file or folder.
"""

import errno
import gzip
import hashlib
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from sparkforge.core.errors import IntegrityError, on
from sparkforge.core.files import CHUNK, require_space, write_atomic
from sparkforge.core.manifest import remove

MAX_RATIO, MIN_BOUND = 100, 64 << 20  # the pinned archives unpack to at most 14 times their size
MAX_MEMBERS = 200_000
MAX_HEADER = 1 << 20  # bytes of one tar header with its extensions; a longer header could only fill memory
MAX_TAIL = 1 << 20  # bytes of zeros after a tar's end; GNU tar pads to 10 KiB by default
LARGEST = 64 << 20  # bytes of one file in `read_files`; the largest that our patches touch has 0.2 MB
DEEPEST = 64  # nested folders
BLOCK = 512  # POSIX.1-2017, pax: a tar archive's unit; two of zeros end it
# Exceptions of the standard library for damaged archives; an OSError for an impossible offset becomes BadZipFile.
MALFORMED = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, struct.error, EOFError, ValueError,
             RuntimeError, LookupError, OverflowError)  # fmt: skip

Listing = Mapping[str, str]  # path inside the tree → hex sha256 of the file


@dataclass(frozen=True)
class Member:
    """One entry of an archive; `kind` is `file`, `folder`, or the name of a kind that is refused."""

    name: str
    kind: str
    executable: bool
    open: Callable[[], IO[bytes]]


def unpack(
    archive: Path, target: Path, *, top: str | None = None, wanted: Callable[[str], bool] = lambda _: True
) -> Listing:
    """Unpack `archive` (.tar, .tar.gz, .zip, .whl) into the new folder `target` and return its files' hashes.

    With `top`, every member must be in that folder, which is stripped from paths. Files that are not `wanted` are left
    out. Raises IntegrityError that names the offending member, and leaves nothing behind. Modes become 0644 or 0755,
    times are those of unpacking.
    """
    if target.exists():
        raise refused(archive, f"{target} is in the way")
    try:
        target.mkdir(parents=True)
        return _unpack(archive, target, top, wanted)
    except MALFORMED as error:
        remove(target)
        raise refused(archive, f"it is damaged or truncated: {error or type(error).__name__}") from error
    except BaseException:
        remove(target)
        raise


def _unpack(archive: Path, target: Path, top: str | None, wanted: Callable[[str], bool]) -> Listing:
    listing: dict[str, str] = {}
    bound = _bound(archive)
    folders, seen, left = {""}, set[str](), bound
    for member in members(archive):
        path = checked_path(archive, member, top)
        if path in seen or (member.kind == "file" and path in folders) or any(p in listing for p in parents(path)):
            raise refused(archive, f"{member.name!r} is in it twice, or is a file and a folder")
        if len(seen) >= MAX_MEMBERS:
            raise refused(archive, f"it has more than {MAX_MEMBERS} members")
        seen.add(path)
        folders.update(parents(path))
        if member.kind == "folder":
            folders.add(path)
            (target / path).mkdir(parents=True, exist_ok=True)
            continue
        if not wanted(path):
            continue
        listing[path], size = write_member(member, target / path, left)
        left -= size
        if left < 0:
            raise refused(archive, f"it has more than {bound} bytes up to {member.name!r}")
    return listing


def _bound(archive: Path) -> int:
    return max(MIN_BOUND, MAX_RATIO * archive.stat().st_size)


def checked_path(archive: Path, member: Member, top: str | None) -> str:
    """Return the path of `member` inside the target. Raises IntegrityError if it is outside or not a file."""
    name = member.name.removesuffix("/") if member.kind == "folder" else member.name
    parts = name.split("/")
    if member.kind not in {"file", "folder"}:
        raise refused(archive, f"{member.name!r} is a {member.kind}")
    if not unharmful(name):
        raise refused(archive, f"{member.name!r} is absolute, points outside the folder, or is not plain text")
    if top is None:
        return name
    if parts[0] != top or (len(parts) == 1 and member.kind == "file"):
        raise refused(archive, f"{member.name!r} is not in {top}/")
    return "/".join(parts[1:])


def unharmful(name: str) -> bool:
    """Tell whether `name` is a relative path of printable parts without `.`, `..`, backslashes or a drive."""
    try:
        parts = [part.encode() for part in name.split("/")]
    except UnicodeEncodeError:
        return False
    plain = name.isprintable() and "\\" not in name and name[1:2] != ":"
    return plain and len(parts) <= DEEPEST and all(0 < len(part) < 256 and part not in (b".", b"..") for part in parts)


def parents(path: str) -> list[str]:
    """Return every folder above `path`, without the root."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def members(archive: Path) -> Iterator[Member]:
    """Read an archive's members in order. Raises one of MALFORMED if it is not an archive or ends early."""
    if archive.name.endswith((".zip", ".whl")):
        yield from _zip_members(archive)
    elif archive.name.endswith((".tar", ".tar.gz", ".tgz")):
        yield from _tar_members(archive)
    else:
        raise refused(archive, "it is not a .tar, .tar.gz, .zip or .whl")


def read_files(archive: Path, top: str | None, wanted: set[str]) -> dict[str, bytes | None]:
    """Return the files `wanted` of an archive by path, None for missing ones. Raises IntegrityError."""
    contents: dict[str, bytes | None] = dict.fromkeys(wanted)
    try:
        for member in members(archive):
            path = checked_path(archive, member, top)
            if path not in wanted or member.kind != "file":
                continue
            with member.open() as source:
                content = source.read(LARGEST + 1)
            if contents[path] is not None or len(content) > LARGEST:
                raise refused(archive, f"{path} is in it twice, or is too large")
            contents[path] = content
    except MALFORMED as error:
        raise refused(archive, f"it is damaged or truncated: {error}") from error
    return contents


class _Watched(io.RawIOBase):
    """A tar stream that remembers its last block and refuses huge reads, and reads beyond `limit` bytes."""

    def __init__(self, inner: Any, limit: int) -> None:
        super().__init__()
        self.inner, self.limit, self.last = inner, limit, b""

    def read(self, size: int = -1) -> bytes:
        """Read at most MAX_HEADER bytes. Raises ReadError for more, which a damaged header can request."""
        if not 0 <= size <= MAX_HEADER:
            raise tarfile.ReadError(f"a header requests {size} bytes")
        self.last = self.inner.read(size)
        if self.inner.tell() > self.limit:
            raise tarfile.ReadError(f"it unpacks to more than {self.limit} bytes")
        return self.last

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek, because members' contents are skipped and not read. A packed stream unpacks all skipped bytes."""
        if offset > self.limit:
            raise tarfile.ReadError(f"a header names byte {offset}")
        return int(self.inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self.inner.tell())

    def require_end(self) -> None:
        """Raise ReadError unless the archive ended with a block of zeros and only a few zeros follow.

        `tarfile` takes a damaged header, or the end of a file cut between two members, for the end of the archive.
        """
        if self.last != bytes(BLOCK):
            raise tarfile.ReadError("it does not end where it should")
        trailing = self.inner.read(MAX_TAIL + 1)
        if len(trailing) > MAX_TAIL:
            raise tarfile.ReadError(f"more than {MAX_TAIL} bytes follow its end")
        if trailing.strip(b"\0"):
            raise tarfile.ReadError("something follows its end")


def _tar_members(archive: Path) -> Iterator[Member]:
    with archive.open("rb") if archive.name.endswith(".tar") else gzip.open(archive) as inner:
        watched = _Watched(inner, 2 * _bound(archive))  # including headers and their padding
        with tarfile.open(fileobj=watched, mode="r:", errors="surrogateescape") as tar:
            for info in tar:
                opener = cast("Callable[[], IO[bytes]]", partial(tar.extractfile, info))
                yield Member(info.name, _tar_kind(info), bool(info.mode & 0o100), opener)
        watched.require_end()


def _tar_kind(info: tarfile.TarInfo) -> str:
    if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return "sparse file" if info.issparse() else "file"
    names = {tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "symbolic link", tarfile.LNKTYPE: "hard link",
             tarfile.CHRTYPE: "character device",
             tarfile.BLKTYPE: "block device", tarfile.FIFOTYPE: "fifo"}  # fmt: skip
    return names.get(info.type, f"member of type {info.type!r}")


def _zip_members(archive: Path) -> Iterator[Member]:
    with _seeks_are_damage(), zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile(f"{info.orig_filename!r} is packed by method {info.compress_type}")
            mode = info.external_attr >> 16  # Unix's part of the attributes (APPNOTE.TXT 4.4.15)
            kind = "folder" if info.is_dir() else "file"
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                kind = "symbolic link" if stat.S_ISLNK(mode) else "special file"
            # `filename` is cut at a NUL; the original name is not.
            yield Member(info.orig_filename, kind, bool(mode & 0o100), partial(_open_zipped, opened, info))


def _open_zipped(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    with _seeks_are_damage():
        return opened.open(info)


@contextmanager
def _seeks_are_damage() -> Iterator[None]:
    """Convert the kernel's error for a negative or huge offset in a damaged zip into BadZipFile."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise zipfile.BadZipFile("it names an impossible offset") from error


def write_member(member: Member, path: Path, limit: int) -> tuple[str, int]:
    """Write a file, or its first `limit` + 1 bytes; return the hex sha256 and the number of the written bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with member.open() as source, path.open("xb") as file:
        while size <= limit and (chunk := source.read(min(CHUNK, limit + 1 - size))):
            size += len(chunk)
            digest.update(chunk)
            file.write(chunk)
    path.chmod(0o755 if member.executable else 0o644)
    return digest.hexdigest(), size


def listing_text(listing: Listing) -> str:
    """Return a listing in the format of `sha256sum --check`, sorted by path."""
    return "".join(f"{sha256}  {path}\n" for path, sha256 in sorted(listing.items()))


def tree_sha256(listing: Listing) -> str:
    """Return one hash for a tree, the hash of its listing's text."""
    return hashlib.sha256(listing_text(listing).encode()).hexdigest()


def write_listing(tree: Path, listing: Listing) -> None:
    """Write the listing of `tree` beside it."""
    write_atomic(listing_path(tree), listing_text(listing))


def listing_path(tree: Path) -> Path:
    """Return the path of the listing of `tree`: `cd TREE && sha256sum --check ../TREE.sha256`."""
    return tree.with_name(tree.name + ".sha256")


def read_listing(tree: Path) -> dict[str, str]:
    """Return the listing beside `tree`. Raises OSError if there is none."""
    lines = listing_path(tree).read_text(encoding="utf-8").splitlines()
    return {path: sha256 for sha256, _, path in (line.partition("  ") for line in lines)}


def require_space_for(archive: Path, target: Path) -> None:
    """Raise StorageError unless 14 times the archive's size is free, the largest expansion of a pinned archive."""
    require_space(target, 14 * archive.stat().st_size, f"the content of {archive.name}")


def refused(archive: Path, reason: str, fix: str = "") -> IntegrityError:
    """Return the error for a refused archive; the default fix is for a pinned archive."""
    fix = fix or on("rm", archive, "do not trust it; the same command fetches it again from its pinned source")
    failure = f"{archive.name} is refused"
    return IntegrityError(failure, f"{reason}; nothing of it was kept", fix, code="integrity.archive")
