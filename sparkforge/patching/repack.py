"""Rewrite a wheel or a source archive with some members replaced: the same bytes on every machine.

The output of zlib depends on its build. So a wheel's unchanged members are copied still packed, and new members are
stored unpacked; a .tar.gz, which is one packed stream, consists of deflate's stored blocks (RFC 1951, 3.2.4). This
module writes the headers, because those of `zipfile` differ between releases of Python.
"""

import hashlib
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from sparkforge.core.files import CHUNK
from sparkforge.sources import archive

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
        """Write a new member unpacked; None writes nothing."""
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
        """Write the directory."""
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
        """Return the number of written, unpacked bytes, which `tarfile` needs."""
        return self.size

    def _block(self, data: bytes, *, final: bool) -> None:
        self.output.write(struct.pack("<BHH", final, len(data), len(data) ^ 0xFFFF) + data)

    def end(self) -> None:
        """Write the last block and the checksum."""
        self._block(bytes(self.pending), final=True)
        self.output.write(struct.pack("<LL", self.crc, self.size & 0xFFFFFFFF))
