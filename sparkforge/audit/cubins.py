"""Read a file for the audit: its host code, its cubins with their targets, and the mnemonics of relevant cubins.

nvdisasm reads 2 MB of cubins a second, and large libraries hold hundreds of MB. But instructions repeat: 2.6 MB of
FlashInfer's MoE hold 162,000 instructions with 698 *shapes*. A shape is an instruction's bits without registers,
immediates and scheduling. So we count shapes and give nvdisasm one real instruction of each. Of the 128 bits, 0-11 are
the opcode and 72-104 its modifiers (derived from nvdisasm's output; tests/integration/test_audit.py compares whole
kernels). SHFL, LDG, HSETP2 and IMAD have modifiers in other bits; their counts by modifier can be wrong. No rule uses
these modifiers.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from sparkforge.audit import elf
from sparkforge.core.errors import ProcessError
from sparkforge.core.process import run

# Formats that are read without cuobjdump. For the zstd in vLLM's wheel cuobjdump takes 3 times the CPU time, and 1 GB
# of disk.
READABLE = (elf.ELF, elf.ZSTD) if find_spec("zstandard") else (elf.ELF,)
MAX_CUBIN_BYTES = 512 << 20  # bytes of an unpacked cubin at most; the largest in vLLM's wheel has 65 MB
LARGEST_TOGETHER = 16 << 30  # bytes of a file's unpacked cubins at most; vLLM's wheel: 1.4 GB (docs/concepts/audit.md)
LONGEST_SECONDS = 600.0  # time limit of cuobjdump for one file; vLLM's whole wheel takes 10 s (docs/concepts/audit.md)
PTX_HEAD = 4096  # bytes of a PTX file that are read for its `.target`; only comments and `.version` precede it
PTX_TARGET = re.compile(rb"^\.target\s+sm_(\d+[af]?)", re.MULTILINE)
INLINE = 8 << 20  # bytes of cubins up to which one process is faster than several
WIDTH = 16  # bytes of an instruction, since compute capability 7.0
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
MOST_SHAPES = 1 << 18  # of one cubin; FlashInfer's MoE has 698, and nvdisasm reads 16 bytes of each
NVDISASM_SECONDS = 300.0  # time limit for the samples of one target; 0.3 s is usual
LOW_4, LOW_1 = (bytes(value & mask for value in range(256)) for mask in (0x0F, 0x01))


@dataclass(frozen=True)
class Shapes:
    """A kernel's mangled name and the counts of its shapes, in arrays because libraries hold thousands of kernels."""

    kernel: str
    shapes: array[int]
    numbers: array[int]

    @property
    def instructions(self) -> int:
        """The number of instructions of the kernel."""
        return sum(self.numbers)


def count(kernels: Iterable[tuple[str, bytes]]) -> tuple[list[Shapes], dict[int, bytes]]:
    """Return each kernel's shapes and a real instruction of each shape. Raises ValueError for too many shapes."""
    counted_kernels, samples = [], dict[int, bytes]()
    for name, code in kernels:
        packed = shapes(code)
        view = memoryview(packed).cast("Q")
        counts = Counter(view)
        if new := counts.keys() - samples.keys():
            first = dict(zip(reversed(view), range(len(view) - 1, -1, -1), strict=True))
            samples |= {shape: code[first[shape] * WIDTH : (first[shape] + 1) * WIDTH] for shape in new}
        if len(samples) > MOST_SHAPES:
            raise ValueError(f"its kernels up to {name[:200]} have {len(samples)} kinds of instructions")
        counted_kernels.append(Shapes(name, array("Q", counts.keys()), array("I", counts.values())))
    return counted_kernels, samples


@dataclass
class Decoder:
    """The mnemonics of one target's shapes that nvdisasm has decoded, and separately those that match `watch`."""

    nvdisasm: Path
    target: str  # such as sm_121a
    watch: str = ""
    known: dict[int, str] = field(default_factory=dict)
    watched: dict[int, str] = field(default_factory=dict)

    def learn(self, samples: Mapping[int, bytes]) -> None:
        """Let nvdisasm read the samples of new shapes in one call, which takes 0.3 s. Raises ProcessError."""
        new = {shape: code for shape, code in samples.items() if shape not in self.known}
        if not new:
            return
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(b"".join(new.values()))
            file.flush()
            command = [str(self.nvdisasm), "-b", self.target.replace("sm_", "SM"), "-ndf", file.name]
            listing = run(command, seconds=NVDISASM_SECONDS).stdout
        names = {int(offset, 16) // WIDTH: name for offset, name in LINE.findall(listing)}
        if missing := set(range(len(new))) - names.keys():
            failure, why = f"nvdisasm left out {len(missing)} instructions", f"for {self.target}"
            raise ProcessError(failure, why, "again   # if it fails again, report this", code="process.failed")
        named = {shape: names[number] for number, shape in enumerate(new)}
        self.known |= named
        self.watched |= {shape: name for shape, name in named.items() if re.search(self.watch, name)}


def named(kernel: Shapes, names: Mapping[int, str]) -> Counter[str]:
    """Return a kernel's number of instructions by mnemonic, for the shapes in `names`."""
    counts = Counter[str]()
    for shape, number in zip(kernel.shapes, kernel.numbers, strict=True):
        if shape in names:
            counts[names[shape]] += number
    return counts


def shapes(code: bytes) -> bytearray:
    """Return 8 bytes for each instruction: the bits that determine its mnemonic."""
    code = code[: len(code) // WIDTH * WIDTH]
    packed = bytearray(len(code) // WIDTH * 8)
    packed[0::8] = code[0::WIDTH]
    packed[1::8] = code[1::WIDTH].translate(LOW_4)
    for number in range(4):
        packed[2 + number :: 8] = code[9 + number :: WIDTH]
    packed[6::8] = code[13::WIDTH].translate(LOW_1)
    return packed


@dataclass(frozen=True)
class Tools:
    """NVIDIA's programs that read cubins."""

    cuobjdump: Path
    nvdisasm: Path


@dataclass(frozen=True)
class Watch:
    """A reader's selection: cubins that load on `capability`, and patterns of the kernels' mnemonics and names."""

    capability: str
    mnemonics: str
    names: str
    strings: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """One kernel: mangled name, number of instructions, counts of the watched mnemonics."""

    name: str
    instructions: int
    mnemonics: dict[str, int]

    def count(self, pattern: str) -> int:
        """Return the number of the kernel's instructions that match."""
        return sum(number for name, number in self.mnemonics.items() if re.search(pattern, name))


@dataclass(frozen=True)
class Cubin:
    """One cubin. If it loads on the device, `kernels` has its kernels with a watched mnemonic or name."""

    name: str
    target: str  # from ptxas's own command line; empty if unknown
    sm: int  # of the ELF flags
    size: int  # bytes
    loads: bool
    kernel_count: int = 0
    instructions: int = 0
    kernels: tuple[Kernel, ...] = ()
    strings: tuple[str, ...] = ()  # the watched texts that it contains
    sha256: str = ""

    @property
    def label(self) -> str:
        """The target in words; if ptxas did not record it, the number without a possible suffix."""
        return self.target or f"sm_{self.sm}, suffix not stated"


@dataclass(frozen=True)
class Binary:
    """One file. `damage` is the reason why it could not be read; then the other fields are empty."""

    path: str
    size: int
    host: elf.Host | None = None
    cubins: tuple[Cubin, ...] = ()
    damage: str = ""


def loads(target: str, capability: str) -> bool:
    """Tell whether machine code for `target` loads on a device of `capability` (CUDA C++ Programming Guide, 5.1).

    Plain code, and `f` code on 12.x, loads on the same major and the same or a later minor version; `a` code loads only
    on its own capability.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", target)
    if match is None:
        return False
    major, minor = map(int, capability.split("."))
    return int(match[1]) == major and (int(match[2]) == minor if match[3] == "a" else int(match[2]) <= minor)


def compiles(ptx: str, capability: str) -> bool:
    """Tell whether the driver can compile PTX for `ptx`, such as compute_120, on a device of `capability`.

    Plain PTX can be compiled for the same and every later capability, `f` PTX for its family, `a` PTX only for its own.
    """
    match = re.fullmatch(r"compute_(\d+)(\d)([af]?)", ptx)
    if match is None:
        return False
    if match[3]:
        return loads(ptx.replace("compute_", "sm_"), capability)
    major, minor = map(int, capability.split("."))
    return (int(match[1]), int(match[2])) <= (major, minor)


@dataclass(frozen=True)
class Scanned:
    """A cubin from a worker process: kernels as counts of instruction shapes, with a sample of each shape."""

    cubin: Cubin
    kernels: tuple[Shapes, ...] = ()
    samples: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """The place of a cubin: `size` bytes of the file at `path`, from byte `offset` on; `name` is for the report.

    `unpacked` is the size in bytes after unpacking, if zstd packed it.
    """

    path: Path
    name: str
    size: int
    offset: int = 0
    unpacked: int = 0

    def data(self) -> bytes:
        """Return the cubin. Raises elf.CutError if it cannot be unpacked to its size."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if not (size := self.unpacked):
            return data
        import zstandard  # noqa: PLC0415 - some environments that import us lack it: see READABLE

        try:
            if zstandard.frame_content_size(data) != size or size > MAX_CUBIN_BYTES:  # before memory is allocated
                raise elf.CutError(f"a cubin cannot be unpacked to the {size} bytes in its fatbin's header")
            return zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError as error:
            raise elf.CutError(f"a cubin cannot be unpacked: {error}") from None


def _ptx(path: Path, entry: elf.FatbinEntry) -> str:
    """Return a PTX's target, such as compute_120a: its `.target`, or the fatbin's number if LZ4 packed the PTX."""
    with path.open("rb") as file:
        file.seek(entry.offset)
        data = file.read(min(entry.size, PTX_HEAD))
    if entry.packing == elf.ZSTD and elf.ZSTD in READABLE:
        import zstandard  # noqa: PLC0415 - see READABLE

        with suppress(zstandard.ZstdError):
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    target = PTX_TARGET.search(data[:PTX_HEAD])
    return f"compute_{target[1].decode() if target else entry.sm}"


def scan(piece: Piece, watch: Watch) -> Scanned:
    """Read one cubin without NVIDIA's programs. Raises one of elf.MALFORMED."""
    data = piece.data()
    read = elf.code(data)
    digest, fits = hashlib.sha256(data).hexdigest(), loads(read.target, watch.capability)
    cubin = Cubin(piece.name, read.target, read.sm, len(data), loads=fits, sha256=digest)
    if not fits:
        return Scanned(cubin)
    kernels, samples = count(read.kernels())
    strings = tuple(text for text in watch.strings if text.encode() in data)
    return Scanned(replace(cubin, strings=strings), tuple(kernels), samples)


@dataclass(frozen=True)
class Draft:
    """A file that was read without mnemonics: `binary` has no cubins yet; they are in `scanned`."""

    binary: Binary
    scanned: tuple[Scanned, ...] = ()


class Reader:
    """Reads files in parallel; then nvdisasm decodes the shapes of all files, with one call for each target.

    Memory: one cubin for each worker, and the shapes of every kernel (10 MB for vLLM's wheel).
    """

    def __init__(self, tools: Tools, watch: Watch, pool: Executor | None = None) -> None:
        self.tools, self.watch, self.pool = tools, watch, pool
        self.decoders = dict[str, Decoder]()

    def draft(self, path: Path, name: str) -> Draft:
        """Read one .cubin, .o or .so. Never raises for a bad file; the result names its damage."""
        size = path.stat().st_size
        try:
            if elf.is_cubin(path):
                return Draft(Binary(name, size), self._scanned([Piece(path, path.name, size)]))
            with elf.opened(path) as opened:
                entries = elf.entries(opened)
                ptx = sorted(_ptx(path, entry) for entry in entries if entry.kind == elf.KIND_PTX)
                host = replace(elf.host(opened, entries), ptx=tuple(ptx))
            carried = [entry for entry in entries if entry.kind == elf.KIND_CUBIN]
            if (together := sum(max(entry.size, entry.unpacked) for entry in carried)) > LARGEST_TOGETHER:
                raise elf.CutError(f"its {len(carried)} cubins have {together} bytes once they are unpacked")
            return Draft(Binary(name, size, host), self._carried(path, carried) if carried else ())
        except elf.MALFORMED as error:
            return Draft(Binary(name, size, damage=str(error) or type(error).__name__))
        except ProcessError as error:
            return Draft(Binary(name, size, damage=f"{error.what}: {error.why}"))

    def _carried(self, path: Path, entries: Sequence[elf.FatbinEntry]) -> tuple[Scanned, ...]:
        """Read the cubins of a file's fatbins in place; if one cannot be read, let cuobjdump unpack all."""
        if all(entry.packing in READABLE for entry in entries):
            pieces = []
            for number, entry in enumerate(entries, 1):
                name = f"{path.stem}.{number}.sm_{entry.sm}.cubin"  # cuobjdump's numbering
                unpacked = entry.unpacked if entry.packing == elf.ZSTD else 0
                pieces.append(Piece(path, name, entry.size, entry.offset, unpacked))
            return self._scanned(pieces)
        with tempfile.TemporaryDirectory(prefix="sparkforge-cubins-") as folder:
            command = [str(self.tools.cuobjdump), "-xelf", "all", str(path.absolute())]
            run(command, cwd=Path(folder), seconds=LONGEST_SECONDS)
            files = sorted(Path(folder).iterdir())
            if len(files) != len(entries):
                raise elf.CutError(f"its fatbins list {len(entries)} cubins and cuobjdump could unpack {len(files)}")
            return self._scanned([Piece(file, file.name, file.stat().st_size) for file in files])

    def _scanned(self, pieces: Sequence[Piece]) -> tuple[Scanned, ...]:
        size = sum(piece.unpacked or piece.size for piece in pieces)
        run_map = self.pool.map if self.pool and size > INLINE else map
        return tuple(run_map(scan, pieces, [self.watch] * len(pieces)))

    def finished(self, drafts: Sequence[Draft]) -> list[Binary]:
        """Return the files with their cubins; a file that nvdisasm cannot read is marked as damaged."""
        with suppress(ProcessError):  # one file causes it; the loop below finds that file
            self._learn([scanned for draft in drafts for scanned in draft.scanned])
        binaries = []
        for draft in drafts:
            try:
                self._learn(draft.scanned)
            except ProcessError as error:
                binaries.append(replace(draft.binary, damage=f"{error.what}: {error.why}"))
            else:
                cubins = tuple(self._decoded(scanned) for scanned in draft.scanned)
                binaries.append(replace(draft.binary, cubins=cubins))
        return binaries

    def _learn(self, scanned: Sequence[Scanned]) -> None:
        """Decode all unknown shapes of all targets. Raises ProcessError if a shape cannot be decoded."""
        samples: dict[str, dict[int, bytes]] = {}
        for item in scanned:
            if item.cubin.loads:
                samples.setdefault(item.cubin.target, {}).update(item.samples)
        for target in samples.keys() - self.decoders.keys():
            self.decoders[target] = Decoder(self.tools.nvdisasm, target, self.watch.mnemonics)
        decoders = [self.decoders[target] for target in samples]
        with ThreadPoolExecutor(max(1, len(samples))) as threads:
            list(threads.map(Decoder.learn, decoders, samples.values()))

    def _decoded(self, scanned: Scanned) -> Cubin:
        if not scanned.cubin.loads:
            return scanned.cubin
        decoder, kernels = self.decoders[scanned.cubin.target], []
        for shapes in scanned.kernels:
            counts = dict(sorted(named(shapes, decoder.watched).items()))
            if counts or re.search(self.watch.names, shapes.kernel):
                kernels.append(Kernel(shapes.kernel, shapes.instructions, counts))
        total = sum(shapes.instructions for shapes in scanned.kernels)
        return replace(scanned.cubin, kernel_count=len(scanned.kernels), instructions=total, kernels=tuple(kernels))
