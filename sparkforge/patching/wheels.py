"""Patched wheels and source archives: upstream's pinned file with its queue applied, with a locked sha256.

`patched` makes the file once, from upstream's file in the cache, and checks it against `locks/patched.toml`. Installed
files are never edited: environments and images install the package only from this file.

The bytes must be the same on every machine, but zlib's output depends on its build, and the headers of `zipfile` on the
release of Python. So this module writes the headers and compresses nothing: unchanged members of a wheel are copied
packed, new members are stored unpacked, and a .tar.gz consists of deflate's stored blocks (RFC 1951, 3.2.4).
"""

import base64
import csv
import hashlib
import io
import json
import os
import platform
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from packaging.version import Version

from sparkforge import pins
from sparkforge.core.console import say
from sparkforge.core.errors import IntegrityError, PatchError, on
from sparkforge.core.files import CHUNK, atomic_file, require_space
from sparkforge.core.installed import parse_record, record_digest
from sparkforge.patching import series
from sparkforge.patching.hunks import Content, digest
from sparkforge.patching.series import Queue
from sparkforge.pins import Component, Stack
from sparkforge.pins.verify import PatchedFile, load_patched
from sparkforge.pins.wheels import TargetMachine, choose_pinned
from sparkforge.sources import archive, fetch

SCHEMA = 1
RELOCK_FIX = "git checkout -- patches locks pins.toml   # if the change is meant: .venv/bin/python -m lab.patches lock"
SDIST = ".tar.gz"
SDIST_FOLDER = ".sparkforge-patches"  # in a source archive, which has no dist-info; no patch may touch it
# PKWARE's APPNOTE.TXT 4.3.7, 4.3.12 and 4.3.16.
LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
UNIX, VERSION = 3, 20  # made by Unix; folders and deflate need version 2.0
UTF8 = 0x800
DOS_TIME = (0, 1 << 5 | 1)  # 1980-01-01 00:00, the earliest time of a zip
MAX_ENTRIES, MAX_SIZE = 0xFFFF, 0xFFFFFFFF  # beyond these a zip needs its 64-bit form
STORED_BLOCK = 0xFFFF
GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"  # RFC 1952: deflate, no name, no time, unknown system


class HashedOutput:
    """A file that counts and hashes the written bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        """Write all of `data`."""
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)
        return len(data)

    @property
    def sha256(self) -> str:
        """The hex sha256 of all written bytes."""
        return self._digest.hexdigest()


@dataclass(frozen=True)
class PatchedWheel:
    """A patched wheel or source archive: its path, its lock entry, and its origin."""

    path: Path
    package: str  # as pins.toml names it
    version: str  # such as 0.32.0+sparkforge.1
    upstream: str  # upstream's file name
    lock: PatchedFile
    is_new: bool  # made by this call, not found in the cache

    @property
    def requirement(self) -> str:
        """The line of a requirements file for this file, by hash."""
        return f"{self.package}=={self.version} --hash=sha256:{self.lock.sha256}"


def patched(component: Component, filename: str, *, patches: Path | None = None) -> PatchedWheel:
    """Return the patched form of `component`'s file `filename`, from the cache or made now.

    Raises PatchError if the queue or the result does not match `locks/patched.toml`, or a patch does not apply,
    IntegrityError for a malformed wheel, and the errors of `fetch`. A damaged file in the cache is made again.
    """
    queue, lock = locked(component, filename, patches)
    target = fetch.cached(lock.file, lock.sha256)
    new = False
    if not fetch.intact(target, lock.sha256):
        with fetch.locked_download(target):
            if not fetch.intact(target, lock.sha256):  # another process has made it meanwhile
                if target.exists():
                    say(f"{target.name}: the copy in the cache is damaged; making it again")
                require_space(target.parent, lock.size, target.name)
                with atomic_file(target) as file:  # after an error the partial file is removed
                    _make_checked(component, filename, queue, lock, file)
                new = True
    version = local_version(component.version, lock.revision)
    return PatchedWheel(target, str(component.package), version, filename, lock, new)


def patched_components(stack: Stack) -> list[Component]:
    """Return the components of a stack that are installed from patched wheels."""
    queued = (component for component in stack.components.values() if component.patches)
    return [component for component in queued if any(name.endswith(".whl") for name in component.files)]


def patched_wheel(component: Component, target: TargetMachine) -> PatchedWheel:
    """Return the patched wheel of `component` for a machine. Raises as `patched`, ProcessError if none is pinned."""
    return patched(component, choose_pinned(component, target).filename)


def make_stack(stack: str, machine: str, *, dry_run: bool) -> None:
    """Make the patched wheels of a stack for a machine (as `uname -m` prints it; empty: this one), and list them.

    With `dry_run` they are made, compared with the lock, and not kept. Raises as `patched`.
    """
    target = TargetMachine(machine or platform.machine())
    for component in patched_components(pins.load().stack(stack)):
        if dry_run:
            filename = choose_pinned(component, target).filename
            queue, lock = locked(component, filename)
            with Path(os.devnull).open("wb") as sink:
                _make_checked(component, filename, queue, lock, sink)
            say(f"{lock.file}: fits locks/patched.toml (dry run: nothing was kept)")
        else:
            wheel = patched_wheel(component, target)
            say(f"{wheel.path}: {'made' if wheel.is_new else 'unchanged'}, sha256 {wheel.lock.sha256}")


def locked(component: Component, filename: str, patches: Path | None = None) -> tuple[Queue, PatchedFile]:
    """Return the queue of a file and its entry in the lock. Raises PatchError if they do not match."""
    queue = Queue.load((patches or series.PATCHES) / str(component.patches))
    lock = load_patched().get(filename)
    if lock is None or (lock.queue, lock.queue_sha256) != (component.patches, queue.sha256):
        why = "it has no entry there" if lock is None else f"the queue there is not patches/{component.patches}"
        raise PatchError(f"{filename} does not fit locks/patched.toml", why, RELOCK_FIX, code="patch.lock")
    return queue, lock


def _make_checked(component: Component, filename: str, queue: Queue, lock: PatchedFile, output: IO[bytes]) -> None:
    result = make(fetch.fetch_pinned(component, filename), component, queue, lock.revision, output)
    if result != lock:
        why = f"its sha256 is {result.sha256}, and {lock.sha256} is locked"
        raise PatchError(f"{lock.file} does not fit locks/patched.toml", why, RELOCK_FIX, code="patch.lock")


def local_version(version: str, revision: int) -> str:
    """Return upstream's version with our suffix: 0.32.0+sparkforge.1, which `==0.32.0` matches (PEP 440)."""
    return f"{version}{'.' if Version(version).local else '+'}sparkforge.{revision}"


def make(source: Path, component: Component, queue: Queue, revision: int, output: IO[bytes]) -> PatchedFile:
    """Write the patched form of `source` to `output` and return the lock's entry for it.

    The same inputs give the same bytes on every machine, with every Python and zlib. Raises PatchError if a patch does
    not apply, IntegrityError for a malformed archive.
    """
    hashed = HashedOutput(output)
    version = local_version(component.version, revision)
    try:
        write = _write_sdist if source.name.endswith(SDIST) else _write_wheel
        record = write(source, component, queue, version, hashed)
    except archive.MALFORMED as error:
        raise _refused(source, f"it is damaged: {error or type(error).__name__}") from error
    name = source.name.replace(f"-{component.version}", f"-{version}", 1)
    return PatchedFile(queue=str(component.patches), queue_sha256=queue.sha256, revision=revision, file=name,
                       sha256=hashed.sha256, size=hashed.size, record=record)  # fmt: skip


def _write_wheel(source: Path, component: Component, queue: Queue, version: str, output: HashedOutput) -> str:
    names = _names(source)
    folders = sorted({name.partition("/")[0] for name in names if name.partition("/")[0].endswith(".dist-info")})
    if len(folders) != 1 or not folders[0].endswith(f"-{component.version}.dist-info"):
        raise _refused(source, f"its .dist-info folders are {folders}, and one for {component.version} is expected")
    info = folders[0]
    queue, record = queue.for_files(names), f"{info}/RECORD"
    before = archive.read_files(source, None, {*queue.paths, record, f"{info}/METADATA"})
    rows = _rows(source, before.pop(record))
    for path, content in before.items():
        if content is not None and rows.get(path) != _row(content):
            raise _refused(source, f"{path} is not the file that its RECORD lists")
    metadata = before.pop(f"{info}/METADATA")
    after = queue.apply(before, names)

    def new_path(path: str) -> str:
        """Return the path of a member in the patched wheel: two folders are named after the version (PEP 427)."""
        folder, slash, rest = path.partition("/")
        stem, dot, suffix = folder.rpartition(".")
        if folder in (info, info.removesuffix("dist-info") + "data"):
            return stem.removesuffix(component.version) + version + dot + suffix + slash + rest
        return path

    contents = {**after, new_path(f"{info}/METADATA"): _metadata(source, metadata, component.version, version)}
    for name, data in _documents(source, component, queue, before, after).items():
        contents[new_path(f"{info}/patches/{name}")] = data
    contents = dict(sorted(contents.items()))
    rows = {new_path(path): row for path, row in rows.items() if path != record}
    for path, content in contents.items():
        if content is None:
            rows.pop(path, None)
        else:
            rows[path] = _row(content)
    lines, listed = io.StringIO(), [(path, *row) for path, row in rows.items()]
    csv.writer(lines, lineterminator="\n").writerows([*listed, (new_path(record), "", "")])
    contents[new_path(record)] = lines.getvalue().encode()
    rewrite_wheel(source, output, new_path, contents, new_path(record))
    return record_digest(parse_record(lines.getvalue(), new_path(record)))


def _write_sdist(source: Path, component: Component, queue: Queue, version: str, output: HashedOutput) -> None:
    top = source.name.removesuffix(SDIST)
    before = archive.read_files(source, top, {*queue.paths, "PKG-INFO"})
    metadata = _metadata(source, before.pop("PKG-INFO"), component.version, version)
    files = [member.name for member in archive.members(source) if member.kind != "folder"]
    after = queue.apply(before, [name.removeprefix(f"{top}/") for name in files])
    contents = {**after, "PKG-INFO": metadata}
    for name, data in _documents(source, component, queue, before, after).items():
        contents[f"{SDIST_FOLDER}/{name}"] = data
    stem = top.removesuffix(component.version)
    rewrite_sdist(source, output, (top, stem + version), dict(sorted(contents.items())))


def _names(source: Path) -> list[str]:
    """Return the files of a wheel. Raises IntegrityError for a member that could not be unpacked safely."""
    members = (member for member in archive.members(source) if member.kind != "folder")
    names = [archive.checked_path(source, member, None) for member in members]
    if len(set(names)) != len(names):
        raise _refused(source, f"{next(name for name in names if names.count(name) > 1)!r} is in it twice")
    return names


def _rows(source: Path, record: Content) -> dict[str, tuple[str, str]]:
    if record is None:
        raise _refused(source, "it has no RECORD")
    rows = list(csv.reader(io.StringIO(record.decode(), newline="")))
    if any(len(row) != 3 for row in rows):
        raise _refused(source, "its RECORD has a line that is not `path,hash,size`")
    return {path: (hashed, size) for path, hashed, size in rows}


def _row(content: bytes) -> tuple[str, str]:
    hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"sha256={hashed}", str(len(content))


def _metadata(source: Path, metadata: Content, version: str, local_version: str) -> bytes:
    head, blank, body = (metadata or b"").partition(b"\n\n")
    old, new = f"Version: {version}".encode(), f"Version: {local_version}".encode()
    lines = head.split(b"\n")
    if lines.count(old) != 1:
        raise _refused(source, f"its metadata does not say `{old.decode()}` once")
    return b"\n".join(new if line == old else line for line in lines) + blank + body


def _documents(
    source: Path, component: Component, queue: Queue, before: Mapping[str, Content], after: Mapping[str, Content]
) -> dict[str, bytes]:
    origin = {
        "schema": SCHEMA, "upstream": queue.upstream, "version": component.version, "filename": source.name,
        "sha256": component.files[source.name], "queue_sha256": queue.sha256,
        "patches": [{"name": patch.name, "sha256": patch.sha256} for patch in queue.patches],
        "files": {path: {"before": digest(before[path]), "after": digest(after[path])} for path in queue.paths},
    }  # fmt: skip
    return {
        "series": "".join(f"{patch.name}\n" for patch in queue.patches).encode(),
        **{patch.name: patch.text for patch in queue.patches},
        "upstream.json": (json.dumps(origin, indent=2, sort_keys=True) + "\n").encode(),
    }


def _refused(source: Path, reason: str) -> IntegrityError:
    failure = f"{source.name} cannot be patched"
    fix = on("ls -l", source, "inspect it; for another version change its pin in pins.toml")
    return IntegrityError(failure, f"{reason}; nothing of it was kept", fix, code="integrity.archive")


def rewrite_wheel(
    source: Path, output: HashedOutput, new_path: Callable[[str], str], contents: Mapping[str, bytes | None], last: str
) -> None:
    """Write the wheel `source` to `output`: each member at `new_path(name)`, in upstream's order.

    `contents` has new bytes by new name (None: leave the member out); new members come before the member `last`.
    Raises BadZipFile, one of archive.MALFORMED, for a wheel that cannot be copied.
    """
    with zipfile.ZipFile(source) as opened, source.open("rb") as packed:
        writer, names = _ZipWriter(output), {new_path(info.orig_filename) for info in opened.infolist()}
        for info in opened.infolist():
            name = new_path(info.orig_filename)
            if name == last:
                for new in [new for new in contents if new not in names]:
                    writer.store(new, contents[new])
            if name in contents:
                writer.store(name, contents[name], info.external_attr)
            else:
                writer.copy(name, info, packed)
        writer.end()


class _ZipWriter:
    """Writes a zip without extensions: no 64-bit form, no data descriptors, no extra fields."""

    def __init__(self, output: HashedOutput) -> None:
        self.output, self.directory, self.entries = output, bytearray(), 0

    def store(self, name: str, content: bytes | None, attributes: int = (stat.S_IFREG | 0o644) << 16) -> None:
        if content is not None:
            sizes = (zlib.crc32(content), len(content), len(content))
            self._header(name, zipfile.ZIP_STORED, sizes, attributes)
            self.output.write(content)

    def copy(self, name: str, info: zipfile.ZipInfo, packed: IO[bytes]) -> None:
        """Copy a member from `packed` unchanged. Raises BadZipFile if its header contradicts the directory."""
        packed.seek(info.header_offset)
        header = packed.read(LOCAL.size)
        if len(header) != LOCAL.size or header[:4] != b"PK\3\4":
            raise zipfile.BadZipFile(f"{info.orig_filename!r} has no header")
        name_size, extra_size = LOCAL.unpack(header)[-2:]
        if packed.read(name_size) != _encoded(info.orig_filename)[0]:
            raise zipfile.BadZipFile(f"{info.orig_filename!r} has another name in its own header")
        packed.seek(extra_size, 1)
        self._header(name, info.compress_type, (info.CRC, info.compress_size, info.file_size), info.external_attr)
        remaining = info.compress_size
        while remaining:
            data = packed.read(min(CHUNK, remaining))
            if not data:
                raise zipfile.BadZipFile(f"{info.orig_filename!r} ends early")
            self.output.write(data)
            remaining -= len(data)

    def _header(self, name: str, method: int, sizes: tuple[int, int, int], attributes: int) -> None:
        offset, (encoded, flags) = self.output.size, _encoded(name)
        self.entries += 1
        if self.entries > MAX_ENTRIES or max(offset, *sizes) > MAX_SIZE:
            raise zipfile.BadZipFile(f"at {name!r} it is too large for a zip without 64-bit sizes")
        common = (flags, method, *DOS_TIME, *sizes, len(encoded), 0)
        self.output.write(LOCAL.pack(b"PK\3\4", VERSION, *common) + encoded)
        self.directory += CENTRAL.pack(b"PK\1\2", UNIX << 8 | VERSION, VERSION, *common, 0, 0, 0, attributes, offset)
        self.directory += encoded

    def end(self) -> None:
        start = self.output.size
        self.output.write(bytes(self.directory))
        counts = (0, 0, self.entries, self.entries)
        self.output.write(END.pack(b"PK\5\6", *counts, len(self.directory), start, 0))


def _encoded(name: str) -> tuple[bytes, int]:
    return (name.encode("ascii"), 0) if name.isascii() else (name.encode(), UTF8)


def rewrite_sdist(
    source: Path, output: HashedOutput, top: tuple[str, str], contents: Mapping[str, bytes | None]
) -> None:
    """Write the .tar.gz `source` to `output`: its folder `top[0]` becomes `top[1]`, and some files get new bytes.

    `contents` has new bytes by path inside the folder (None: leave the file out); new files come last. Modes become
    0644 or 0755, owners and times 0. Raises one of archive.MALFORMED for a damaged archive.
    """
    old, new = top
    remaining, packer = dict(contents), _StoredGzip(output)
    with tarfile.open(fileobj=cast("Any", packer), mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in archive.members(source):
            path = archive.checked_path(source, member, old)
            info = tarfile.TarInfo("/".join(filter(None, (new, path))))
            if member.kind == "folder":
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
                continue
            info.mode = 0o755 if member.executable else 0o644
            if path in remaining:
                _add(tar, info, remaining.pop(path))
            else:
                with member.open() as file:
                    _add(tar, info, b"".join(iter(partial(file.read, CHUNK), b"")))
        for path, data in remaining.items():
            _add(tar, tarfile.TarInfo(f"{new}/{path}"), data)
    packer.end()


def _add(tar: tarfile.TarFile, info: tarfile.TarInfo, content: bytes | None) -> None:
    if content is not None:
        info.size = len(content)
        tar.addfile(info, BytesIO(content))


class _StoredGzip:
    """Writes gzip whose deflate blocks are stored."""

    def __init__(self, output: HashedOutput) -> None:
        self.output, self.crc, self.size, self.pending = output, 0, 0, bytearray()
        output.write(GZIP_HEADER)

    def write(self, data: bytes) -> int:
        """Write `data` in blocks of 65,535 bytes, independent of the sizes of the writes."""
        self.pending += data
        while len(self.pending) >= STORED_BLOCK:
            self._block(bytes(self.pending[:STORED_BLOCK]), final=False)
            del self.pending[:STORED_BLOCK]
        self.crc, self.size = zlib.crc32(data, self.crc), self.size + len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def _block(self, data: bytes, *, final: bool) -> None:
        self.output.write(struct.pack("<BHH", final, len(data), len(data) ^ 0xFFFF) + data)

    def end(self) -> None:
        self._block(bytes(self.pending), final=True)
        self.output.write(struct.pack("<LL", self.crc, self.size & 0xFFFFFFFF))
