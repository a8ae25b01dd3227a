"""What an ELF file says about itself: whole or cut, what it needs, which machine code it carries and for which GPU.

The target of a cubin stands in the command line of ptxas in `.note.nv.tkinfo`. File names and ELF flags are the same
for sm_121, sm_121a and sm_121f. Files for the CPU are read by pyelftools.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

ELF, ZSTD = b"\x7fELF", b"\x28\xb5\x2f\xfd"
ARCH = re.compile(rb"-arch[ =]+(sm_\d+[af]?)")
TKINFO = ".note.nv.tkinfo"
FATBINS = (".nv_fatbin", "__nv_relfatbin")
# The layout of a fatbin as nvcc 11 to 13 write it: {magic u32, version u16, header size u16, payload size u64}, then
# entries of {kind u16, version u16, header size u32, payload size u64, size when packed u32 (0: it is not), 8 bytes,
# sm u32 at byte 28, …, size when unpacked u64 at byte 56}.
# Read off with cuobjdump 13.5.37 as the judge (tests/integration/test_audit.py).
FATBIN_MAGIC, FATBIN_HEADER, ENTRY_HEADER = 0xBA55ED50, struct.Struct("<IHHQ"), struct.Struct("<HHIQI8xI24xQ")
KIND_PTX, KIND_CUBIN = 1, 2
# Elf64_Ehdr from byte 24 on, and the head of Elf64_Shdr (System V ABI, chapter 4).
ELF_HEADER, SECTION, SHT_NOBITS = struct.Struct("<QQQIHHHHHH"), struct.Struct("<IIQQQQ"), 8
MALFORMED = (
    ELFError,
    struct.error,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    AttributeError,
    TypeError,
    OSError,
)


@dataclass(frozen=True)
class Host:
    """What a shared library or object of the CPU needs and offers."""

    machine: str  # as `uname -m` has it
    shared: bool
    soname: str
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    glibc: tuple[int, int]  # the newest version of glibc that a symbol asks for; (0, 0) if none does
    executable_stack: bool
    undefined: tuple[str, ...]  # symbols without a version that something else must define; weak ones left out
    exports: frozenset[str]
    cubins: int  # in its fatbins, before anything was unpacked
    ptx: tuple[str, ...]  # architecture of each PTX in its fatbins, such as compute_120


@dataclass(frozen=True)
class Entry:
    """One entry of a fatbin: what it is (KIND_…), its architecture, and where in the file its payload lies.

    `at`, `size` and `unpacked` are in bytes. `packing` is the payload's first bytes: ELF for a cubin as it is, ZSTD for
    one of `nvcc --compress-mode=size`; anything else only NVIDIA's tool unpacks.
    """

    kind: int
    sm: int
    at: int
    size: int
    unpacked: int
    packing: bytes


class CutError(ValueError):
    """A file ends before its own tables say so."""


def opened(path: Path) -> ELFFile:
    """Return the ELF file at `path`, whose parts all lie inside it. Raises CutError, or one of MALFORMED."""
    elf = ELFFile(path.open("rb"))
    size, header = path.stat().st_size, elf.header
    ends = [header["e_shoff"] + header["e_shnum"] * header["e_shentsize"]]
    if max(ends) > size:
        raise CutError(f"its section table ends at byte {max(ends)} and the file at {size}")
    ends += [one["p_offset"] + one["p_filesz"] for one in elf.iter_segments()]
    headers = (elf._get_section_header(i) for i in range(elf.num_sections()))  # noqa: SLF001 - no names are wanted
    ends += [one["sh_offset"] + one["sh_size"] for one in headers if one["sh_type"] != "SHT_NOBITS"]
    if max(ends) > size:
        raise CutError(f"a part of it ends at byte {max(ends)} and the file at {size}")
    return elf


def is_cubin(path: Path) -> bool:
    """Tell whether `path` starts like machine code for an NVIDIA GPU (e_machine 190, EM_CUDA)."""
    with path.open("rb") as file:
        start = file.read(20)
    return start[:4] == ELF and start[18:20] == b"\xbe\x00"


@dataclass(frozen=True)
class Code:
    """A cubin: 64 bit, little-endian. Its tables are read here, for pyelftools takes 50 ms for 2,400 sections."""

    data: memoryview
    flags: int
    sections: Mapping[str, tuple[int, int]]  # name → first byte, size

    @property
    def sm(self) -> int:
        """The architecture's number in the ELF flags, without any suffix: 121 for sm_121a too."""
        return self.flags >> 8 & 0xFF

    @property
    def target(self) -> str:
        """What ptxas was told to make, such as sm_121a; several joined by +; empty if the cubin does not say."""
        return "+".join(sorted({name.decode() for name in ARCH.findall(self.part(TKINFO))}))

    def part(self, name: str) -> bytes:
        """Return a section's bytes; none if there is no such section."""
        at, size = self.sections.get(name, (0, 0))
        return bytes(self.data[at : at + size])

    def kernels(self) -> Iterator[tuple[str, bytes]]:
        """Return each kernel's mangled name and its code."""
        for name in self.sections:
            if name.startswith(".text."):
                yield name.removeprefix(".text."), self.part(name)


def code(data: bytes) -> Code:
    """Return the cubin in `data`. Raises CutError where a part lies outside it, or one of MALFORMED."""
    view = memoryview(data)
    if view[: len(ELF)] != ELF:
        raise CutError("a cubin in it is no ELF file")
    _, segments, table, flags, _, segment, count, width, number, names = ELF_HEADER.unpack_from(view, 24)
    if (end := max(table + width * number, segments + segment * count)) > len(view):
        raise CutError(f"its tables end at byte {end} and the file at {len(view)}")
    rows = [SECTION.unpack_from(view, table + width * i) for i in range(number)]
    end = max((at + size for _, kind, _, _, at, size in rows if kind != SHT_NOBITS), default=0)
    if end > len(view):
        raise CutError(f"a part of it ends at byte {end} and the file at {len(view)}")
    base = rows[names][4]
    named = {_text(data, base + name): (at, 0 if kind == SHT_NOBITS else size) for name, kind, _, _, at, size in rows}
    return Code(view, flags, named)


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def host(elf: ELFFile, entries: Sequence[Entry] = ()) -> Host:
    """Return what a file for the CPU needs and offers; `entries` are those of its fatbins. Raises one of MALFORMED."""
    tags = _dynamic(elf)
    undefined, exports = _symbols(elf)
    return Host(
        machine={"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(elf["e_machine"], str(elf["e_machine"])),
        shared=elf["e_type"] == "ET_DYN",
        soname="".join(tags.get("soname", [])),
        needed=tuple(tags.get("needed", [])),
        runpath=tuple(place for word in tags.get("runpath", []) + tags.get("rpath", []) for place in word.split(":")),
        glibc=_glibc(elf),
        executable_stack=any(s["p_type"] == "PT_GNU_STACK" and s["p_flags"] & 1 for s in elf.iter_segments()),
        undefined=undefined,
        exports=exports,
        cubins=sum(one.kind == KIND_CUBIN for one in entries),
        ptx=tuple(sorted(f"compute_{one.sm}" for one in entries if one.kind == KIND_PTX)),
    )


def _dynamic(elf: ELFFile) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    section: Any = elf.get_section_by_name(".dynamic")
    for tag in section.iter_tags() if section else ():
        name = str(tag.entry.d_tag).removeprefix("DT_").lower()
        if hasattr(tag, name):
            found.setdefault(name, []).append(str(getattr(tag, name)))
    return found


def _symbols(elf: ELFFile) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return (undefined global symbols without a version, defined global symbols) of the dynamic symbol table."""
    table: Any = elf.get_section_by_name(".dynsym")
    versions = elf.get_section_by_name(".gnu.version")
    undefined, exports = set[str](), set[str]()
    for number, symbol in enumerate(table.iter_symbols() if table else ()):
        if symbol["st_shndx"] != "SHN_UNDEF":
            exports.add(symbol.name)
        elif symbol["st_info"]["bind"] == "STB_GLOBAL" and not _versioned(versions, number):
            undefined.add(symbol.name)
    return tuple(sorted(undefined)), frozenset(exports)


def _versioned(versions: Any, number: int) -> bool:
    # 0 and 1 are VER_NDX_LOCAL and VER_NDX_GLOBAL, which pyelftools gives as names; a version is a number.
    return versions is not None and isinstance(versions.get_symbol(number)["ndx"], int)


def _glibc(elf: ELFFile) -> tuple[int, int]:
    section: Any = elf.get_section_by_name(".gnu.version_r")
    names = [one.name for _, group in (section.iter_versions() if section else ()) for one in group]
    found = [re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", name) for name in names]
    return max(((int(one[1]), int(one[2])) for one in found if one), default=(0, 0))


def entries(elf: ELFFile) -> tuple[Entry, ...]:
    """Return the entries of a file's fatbins, in their order. Raises CutError where one runs past its section."""
    section = next(filter(None, map(elf.get_section_by_name, FATBINS)), None)
    if section is None or section["sh_size"] == 0:
        return ()
    # Hundreds of MB, of which headers are read.
    with mmap.mmap(elf.stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return tuple(_entries(data, section["sh_offset"], section["sh_offset"] + section["sh_size"]))


def _entries(data: mmap.mmap, at: int, end: int) -> Iterator[Entry]:
    while at + FATBIN_HEADER.size <= end:
        magic, _, header, size = FATBIN_HEADER.unpack_from(data, at)
        if magic != FATBIN_MAGIC:
            at += 8  # fatbins are aligned; between two of them are zeros
            continue
        if at + header + size > end:
            raise CutError(f"a fatbin ends {at + header + size - end} bytes behind its section")
        yield from _contents(data, at + header, at + header + size)
        at += header + size


def _contents(data: mmap.mmap, at: int, end: int) -> Iterator[Entry]:
    while at + ENTRY_HEADER.size <= end:
        kind, _, header, size, packed, sm, unpacked = ENTRY_HEADER.unpack_from(data, at)
        payload = at + header
        packing = data[payload : payload + len(ELF)]
        yield Entry(kind, sm, payload, size, unpacked if packed else size, packing)
        at = payload + size
        if at > end or header == 0:
            raise CutError("an entry of a fatbin runs past its end")
