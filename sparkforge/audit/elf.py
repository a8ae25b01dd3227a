"""Reads ELF files: whether they are complete, their dependencies, their machine code and its target GPU.

The target of a cubin is in the command line of ptxas in `.note.nv.tkinfo`. File names and ELF flags are the same
for sm_121, sm_121a and sm_121f. Files for the CPU are read by pyelftools.

A file may be damaged or hostile. Every loop over its tables is bounded, and errors name the section and the byte.
"""

import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

ELF, ZSTD = b"\x7fELF", b"\x28\xb5\x2f\xfd"
ARCH = re.compile(rb"-arch[ =]+(sm_\d+[af]?)")
TKINFO = ".note.nv.tkinfo"
MERCURY = b".nv.merc."  # prefix of second entries that ptxas 13 makes for some sections (no code), with equal bytes
# Up to 12.6, ptxas wrote no command line: the ELF flags hold the number in their first byte, and the suffix `a` as a
# bit (compared with cuobjdump 13.5.37 on sm_60 to sm_90a, and LLVM's EF_CUDA_ACCELERATORS).
OLD_ABI, OLD_SUFFIX = 7, 0x800
FATBINS = (".nv_fatbin", "__nv_relfatbin")
# The layout of a fatbin of nvcc 11 to 13: {magic u32, version u16, header size u16, payload size u64}, then
# entries of {kind u16, version u16, header size u32, payload size u64, size when packed u32 (0: it is not), 8 bytes,
# sm u32 at byte 28, …, size when unpacked u64 at byte 56}.
# Established by comparison with cuobjdump 13.5.37 (tests/integration/test_audit.py).
FATBIN_MAGIC, FATBIN_HEADER, ENTRY_HEADER = 0xBA55ED50, struct.Struct("<IHHQ"), struct.Struct("<HHIQI8xI24xQ")
FATBIN_MAGIC_BYTES = FATBIN_MAGIC.to_bytes(4, "little")
KIND_PTX, KIND_CUBIN = 1, 2
VERSION_ENTRY = 16  # bytes of an Elf64_Verneed and of an Elf64_Vernaux
# Elf64_Ehdr from byte 24 on, and the head of Elf64_Shdr (System V ABI, chapter 4).
ELF_HEADER, SECTION, SHT_NOBITS = struct.Struct("<QQQIHHHHHH"), struct.Struct("<IIQQQQ"), 8
SECTION_SIZES, SEGMENT_SIZES = {32: 40, 64: 64}, {32: 32, 64: 56}  # bytes of a header by ELF class
# Our own limits for one file: far above those of any library in a wheel, and read within seconds.
MOST_SECTIONS, MOST_SEGMENTS, MOST_TAGS, MOST_VERSIONS = 1 << 17, 1 << 12, 1 << 14, 1 << 16
MOST_SYMBOLS, MOST_ENTRIES = 1 << 20, 1 << 18
MOST_NAMES = 1 << 27  # bytes of all names of one table: several entries may share one long name
# pyelftools raises AssertionError for a link to a section of the wrong kind.
MALFORMED = (
    *(ELFError, struct.error, ValueError, LookupError, ArithmeticError, AssertionError, AttributeError, TypeError),
    *(OSError, EOFError, MemoryError, RecursionError),
)


@dataclass(frozen=True)
class Host:
    """The symbols and libraries that the host code of a library or object needs and exports."""

    machine: str  # as `uname -m` prints it
    shared: bool
    soname: str
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    glibc: tuple[int, int]  # the newest version of glibc that a symbol needs; (0, 0) if none does
    executable_stack: bool
    undefined: tuple[str, ...]  # unversioned, non-weak symbols that another library must define
    exports: frozenset[str]
    cubins: int  # number of cubins that its fatbins list
    ptx: tuple[str, ...]  # architecture of each PTX in its fatbins, such as compute_120
    other: int = 0  # other entries of its fatbins, such as code for the linker


@dataclass(frozen=True)
class FatbinEntry:
    """One entry of a fatbin: its kind (KIND_…), its architecture, and the place of its payload in the file.

    `offset`, `size` and `unpacked` are in bytes. `packing` is the payload's first bytes: ELF for an unpacked cubin,
    ZSTD for `nvcc --compress-mode=size`; only NVIDIA's tool unpacks other formats.
    """

    kind: int
    sm: int
    offset: int
    size: int
    unpacked: int
    packing: bytes


class CutError(ValueError):
    """A damaged file: a table that ends past the file's end, a list without an end, or impossible sizes."""


class BoundedFile(ELFFile):
    """An ELF file whose tables lie inside it; a section is parsed only when it is requested by name."""

    def check(self) -> None:
        """Raise CutError unless every table, section and segment lies inside the file and has plausible numbers."""
        header = self.header
        self._check_table("section", header["e_shoff"], header["e_shnum"], header["e_shentsize"], SECTION_SIZES)
        self._check_table("segment", header["e_phoff"], header["e_phnum"], header["e_phentsize"], SEGMENT_SIZES)
        if (number := self.num_sections()) > MOST_SECTIONS:
            raise CutError(f"its section table at byte {header['e_shoff']} lists {number} sections")
        for segment in self.segment_headers():
            self._check_end("segment", segment["p_offset"], segment["p_filesz"])
        for name, section in self.section_headers.items():
            if section["sh_type"] != "SHT_NOBITS":
                self._check_end(f"section {name}", section["sh_offset"], section["sh_size"])

    def _check_table(self, kind: str, offset: int, number: int, width: int, widths: Mapping[int, int]) -> None:
        if (number or kind == "section") and offset and width != widths[self.elfclass]:
            raise CutError(f"its {kind} table at byte {offset} has entries of {width} bytes")
        if offset + number * width > self.stream_len:
            raise CutError(f"its {kind} table ends at byte {offset + number * width} and the file at {self.stream_len}")

    def _check_end(self, part: str, offset: int, size: int) -> None:
        if offset + size > self.stream_len:
            raise CutError(f"{part} at byte {offset} ends at byte {offset + size} and the file at {self.stream_len}")

    def segment_headers(self) -> Iterator[Any]:
        """Yield the program headers. Raises CutError if there are too many."""
        if (number := self.num_segments()) > MOST_SEGMENTS:
            raise CutError(f"its segment table at byte {self.header['e_phoff']} lists {number} segments")
        return (self._get_segment_header(i) for i in range(number))

    @cached_property
    def section_headers(self) -> dict[str, Any]:
        """Return section headers by name, the last of a repeated name. Raises CutError if the names are too long."""
        headers, length = {}, 0
        for number in range(self.num_sections()):
            header = self._get_section_header(number)
            name = self._get_section_name(header)
            length += len(name)
            if length > MOST_NAMES:
                raise CutError(f"the names of its first {number} sections have more than {MOST_NAMES} bytes")
            headers[name] = header
        return headers

    @contextmanager
    def section(self, name: str) -> Iterator[Any]:
        """Yield the section `name`, None if there is none. Errors in the block name the section and its first byte."""
        header = self.section_headers.get(name)
        try:
            yield None if header is None else self._make_section(header)
        except MALFORMED as error:
            at = f" at byte {header['sh_offset']}" if header is not None else ""
            why = str(error) or f"its link or kind is wrong ({type(error).__name__})"
            raise CutError(f"section {name}{at}: {why}") from error


def opened(path: Path) -> BoundedFile:
    """Return the ELF file at `path`, whose parts all lie inside it. Raises CutError, or one of MALFORMED."""
    file = path.open("rb")
    try:
        elf = BoundedFile(file)
        elf.check()
    except BaseException:
        file.close()
        raise
    return elf


def is_cubin(path: Path) -> bool:
    """Tell whether `path` starts like machine code for an NVIDIA GPU (e_machine 190, EM_CUDA)."""
    with path.open("rb") as file:
        start = file.read(20)
    return start[:4] == ELF and start[18:20] == b"\xbe\x00"


@dataclass(frozen=True)
class Code:
    """A cubin: 64 bit, little-endian. Its tables are read here, because pyelftools takes 50 ms for 2,400 sections."""

    data: memoryview
    flags: int
    sections: Mapping[str, tuple[int, int]]  # name → first byte, size

    @property
    def sm(self) -> int:
        """The architecture's number in the ELF flags, without any suffix: 121 for sm_121a too."""
        return self.flags & 0xFF if self._is_old else self.flags >> 8 & 0xFF

    @property
    def _is_old(self) -> bool:
        return self.data[8] == OLD_ABI

    @property
    def target(self) -> str:
        """The target of ptxas, such as sm_121a; several joined by +; empty if unknown."""
        if targets := {name.decode() for name in ARCH.findall(self.part(TKINFO))}:
            return "+".join(sorted(targets))
        return f"sm_{self.sm}{'a' if self.flags & OLD_SUFFIX else ''}" if self._is_old else ""

    def part(self, name: str) -> bytes:
        """Return a section's bytes; none if there is no such section."""
        offset, size = self.sections.get(name, (0, 0))
        return bytes(self.data[offset : offset + size])

    def kernels(self) -> Iterator[tuple[str, bytes]]:
        """Return each kernel's mangled name and its code."""
        for name in self.sections:
            if name.startswith(".text."):
                yield name.removeprefix(".text."), self.part(name)


def code(data: bytes) -> Code:
    """Return the cubin in `data`. Raises CutError if a part lies outside it, or one of MALFORMED."""
    view = memoryview(data)
    if view[: len(ELF)] != ELF:
        raise CutError("a cubin in it is not an ELF file")
    _, segments, table, flags, _, segment, count, width, number, names = ELF_HEADER.unpack_from(view, 24)
    if (end := max(table + width * number, segments + segment * count)) > len(view):
        raise CutError(f"its tables end at byte {end} and the file at {len(view)}")
    rows = [SECTION.unpack_from(view, table + width * i) for i in range(number)]
    end = max((offset + size for _, kind, _, _, offset, size in rows if kind != SHT_NOBITS), default=0)
    if end > len(view):
        raise CutError(f"a part of it ends at byte {end} and the file at {len(view)}")
    base, length, total, sections = rows[names][4], 0, 0, dict[str, tuple[int, int]]()
    for name, kind, _, _, offset, size in rows:
        begin = base + name
        text = data[begin : data.index(b"\0", begin)]
        length += len(text)
        if length > MOST_NAMES:
            raise CutError(f"the names of its sections, from byte {base} on, have more than {MOST_NAMES} bytes")
        sections[text.decode()] = offset, 0 if kind == SHT_NOBITS else size
        if kind != SHT_NOBITS and not text.startswith(MERCURY):
            total += size
    if total > len(view):
        raise CutError(f"its sections overlap: they have {total} bytes, and the file {len(view)}")
    return Code(view, flags, sections)


def host(elf: BoundedFile, entries: Sequence[FatbinEntry] = ()) -> Host:
    """Return needs and exports of a file's host code; `entries` are its fatbins' entries. Raises one of MALFORMED."""
    tags = _dynamic(elf)
    undefined, exports = _symbols(elf)
    return Host(
        machine={"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(elf["e_machine"], str(elf["e_machine"])),
        shared=elf["e_type"] == "ET_DYN",
        soname="".join(tags.get("soname", [])),
        needed=tuple(tags.get("needed", [])),
        runpath=tuple(path for paths in tags.get("runpath", []) + tags.get("rpath", []) for path in paths.split(":")),
        glibc=_glibc(elf),
        executable_stack=any(s["p_type"] == "PT_GNU_STACK" and s["p_flags"] & 1 for s in elf.segment_headers()),
        undefined=undefined,
        exports=exports,
        cubins=sum(entry.kind == KIND_CUBIN for entry in entries),
        ptx=tuple(sorted(f"compute_{entry.sm}" for entry in entries if entry.kind == KIND_PTX)),
        other=sum(entry.kind not in (KIND_CUBIN, KIND_PTX) for entry in entries),
    )


def _dynamic(elf: BoundedFile) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    length = 0
    with elf.section(".dynamic") as section:
        for number, tag in enumerate(section.iter_tags() if section else ()):
            name = str(tag.entry.d_tag).removeprefix("DT_").lower()
            if hasattr(tag, name):
                text = str(getattr(tag, name))
                length += len(text)
                texts.setdefault(name, []).append(text)
            if number >= min(MOST_TAGS, section["sh_size"] // section["sh_entsize"]) or length > MOST_NAMES:
                raise CutError(f"it has no end after {number} entries")
    return texts


def _symbols(elf: BoundedFile) -> tuple[tuple[str, ...], frozenset[str]]:
    undefined, exports, length = set[str](), set[str](), 0
    with elf.section(".dynsym") as table, elf.section(".gnu.version") as versions:
        for number, symbol in enumerate(table.iter_symbols() if table else ()):
            length += len(symbol.name)
            if number >= MOST_SYMBOLS or length > MOST_NAMES:
                raise CutError(f"its first {number} symbols have names of {length} bytes, too many for a library")
            if symbol["st_shndx"] != "SHN_UNDEF":
                exports.add(symbol.name)
            elif symbol["st_info"]["bind"] == "STB_GLOBAL":
                # pyelftools returns 0 and 1 (VER_NDX_LOCAL, VER_NDX_GLOBAL) as names; a version is a number.
                versioned = versions is not None and isinstance(versions.get_symbol(number)["ndx"], int)
                if not versioned:
                    undefined.add(symbol.name)
    return tuple(sorted(undefined)), frozenset(exports)


def _glibc(elf: BoundedFile) -> tuple[int, int]:
    newest, number, length = (0, 0), 0, 0
    with elf.section(".gnu.version_r") as section:
        most = min(MOST_VERSIONS, section["sh_size"] // VERSION_ENTRY) if section else 0
        for library, versions in section.iter_versions() if section else ():
            number, length = number + 1, length + len(library.name)
            for version in versions:
                number, length = number + 1, length + len(version.name)
                if number > most or length > MOST_NAMES:
                    raise CutError(f"it lists more than the {most} versions that it has room for")
                if match := re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version.name):
                    newest = max(newest, (int(match[1]), int(match[2])))
    return newest


def entries(elf: BoundedFile) -> tuple[FatbinEntry, ...]:
    """Return the entries of a file's fatbins, in their order. Raises CutError if one ends past its section."""
    name = next((name for name in FATBINS if name in elf.section_headers), "")
    if not name or elf.section_headers[name]["sh_size"] == 0:
        return ()
    # The section may have hundreds of MB; only headers are read.
    with elf.section(name) as section, mmap.mmap(elf.stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        contents = list[FatbinEntry]()
        for entry in _entries(data, section["sh_offset"], section["sh_offset"] + section["sh_size"]):
            if len(contents) >= MOST_ENTRIES:
                raise CutError(f"it lists more than {MOST_ENTRIES} entries, the last at byte {entry.offset}")
            contents.append(entry)
        return tuple(contents)


def _entries(data: mmap.mmap, offset: int, end: int) -> Iterator[FatbinEntry]:
    start = offset
    # Fatbins are aligned to 8 bytes; between two of them are zeros.
    while (offset := data.find(FATBIN_MAGIC_BYTES, offset, end)) >= 0:
        if (offset - start) % 8 or offset + FATBIN_HEADER.size > end:
            offset += 1
            continue
        _, _, header, size = FATBIN_HEADER.unpack_from(data, offset)
        if header < FATBIN_HEADER.size:
            raise CutError(f"the fatbin at byte {offset} has a header of {header} bytes")
        if offset + header + size > end:
            raise CutError(f"the fatbin at byte {offset} ends {offset + header + size - end} bytes past its section")
        offset, last = offset + header, offset + header + size
        while offset + ENTRY_HEADER.size <= last:
            kind, _, header, size, packed, sm, unpacked = ENTRY_HEADER.unpack_from(data, offset)
            if header < ENTRY_HEADER.size or offset + header + size > last:
                left = f"has {header} + {size} bytes, and {last - offset} are left"
                raise CutError(f"the fatbin entry at byte {offset} {left}")
            payload = offset + header
            yield FatbinEntry(kind, sm, payload, size, unpacked if packed else size, data[payload : payload + len(ELF)])
            offset = payload + size
        offset = last
