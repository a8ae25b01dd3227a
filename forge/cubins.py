"""Read one file for the audit: its host part, its cubins with their targets, and the mnemonics of those that matter."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from forge import elf
from forge.sass import Decoder, Shapes, count
from sparkforge.errors import CommandError
from sparkforge.process import run

INLINE = 8 << 20  # bytes of cubins up to which starting other processes costs more than it saves


@dataclass(frozen=True)
class Tools:
    """NVIDIA's two readers."""

    cuobjdump: Path
    nvdisasm: Path


@dataclass(frozen=True)
class Watch:
    """What a reader keeps: counts for cubins that load on `capability`, mnemonics and kernel names that match."""

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
        """Return how many of its instructions match."""
        return sum(number for name, number in self.mnemonics.items() if re.search(pattern, name))


@dataclass(frozen=True)
class Cubin:
    """One piece of machine code. `kernels` are those with a watched mnemonic or name, if it loads on the device."""

    name: str
    target: str  # of ptxas's own command line; empty if it does not say
    sm: int  # of the ELF flags
    size: int  # bytes
    loads: bool
    kernel_count: int = 0
    instructions: int = 0
    kernels: tuple[Kernel, ...] = ()
    strings: tuple[str, ...] = ()  # of those watched


@dataclass(frozen=True)
class Binary:
    """One file that was read. `damage` says why it could not be; then the rest is empty."""

    path: str
    size: int
    host: elf.Host | None = None
    cubins: tuple[Cubin, ...] = ()
    damage: str = ""


def loads(target: str, capability: str) -> bool:
    """Tell whether machine code for `target` loads on a device of `capability` (CUDA C++ Programming Guide, 5.1).

    Plain code loads on the same major and the same or a later minor version; `f` on its family, which for 12.x is the
    same; `a` on exactly its own.
    """
    found = re.fullmatch(r"sm_(\d+)(\d)([af]?)", target)
    if found is None:
        return False
    major, minor = map(int, capability.split("."))
    same = int(found[1]) == major
    return same and (int(found[2]) == minor if found[3] == "a" else int(found[2]) <= minor)


@dataclass(frozen=True)
class Scanned:
    """A cubin as a worker process hands it over: kernels in shapes, with a sample of each shape."""

    cubin: Cubin
    kernels: tuple[Shapes, ...] = ()
    samples: dict[int, bytes] = field(default_factory=dict)


def scan(path: Path, watch: Watch) -> Scanned:
    """Read one cubin without any program. Raises one of elf.MALFORMED."""
    data = path.read_bytes()
    read = elf.code(data)
    cubin = Cubin(path.name, read.target, read.sm, len(data), loads=loads(read.target, watch.capability))
    if not cubin.loads:
        return Scanned(cubin)
    kernels, samples = count(read.kernels())
    strings = tuple(text for text in watch.strings if text.encode() in data)
    return Scanned(replace(cubin, strings=strings), tuple(kernels), samples)


class Reader:
    """Reads files, several at once, and remembers what nvdisasm said. Memory: one file's cubins for each worker."""

    def __init__(self, tools: Tools, watch: Watch, pool: Executor | None = None) -> None:
        self.tools, self.watch, self.pool = tools, watch, pool
        self.decoders, self.lock = dict[str, Decoder](), Lock()

    def read(self, path: Path, name: str) -> Binary:
        """Read one .cubin, .o or .so. Never raises for a bad file: the result says what is wrong with it."""
        size = path.stat().st_size
        try:
            if elf.is_cubin(path):
                return Binary(name, size, cubins=self._cubins([path]))
            with elf.opened(path) as opened:
                host = elf.host(opened)
            return Binary(name, size, host, self._extracted(path, host.cubins) if host.cubins else ())
        except elf.MALFORMED as error:
            return Binary(name, size, damage=str(error) or type(error).__name__)
        except CommandError as error:
            return Binary(name, size, damage=f"{error.what}: {error.why}")

    def _extracted(self, path: Path, number: int) -> tuple[Cubin, ...]:
        with tempfile.TemporaryDirectory(prefix="sparkforge-cubins-") as place:
            run([self.tools.cuobjdump, "-xelf", "all", path.absolute()], cwd=Path(place))
            files = sorted(Path(place).iterdir())
            if len(files) != number:
                raise elf.CutError(f"its fatbins list {number} cubins and cuobjdump could unpack {len(files)}")
            return self._cubins(files)

    def _cubins(self, files: Sequence[Path]) -> tuple[Cubin, ...]:
        apart = self.pool and sum(file.stat().st_size for file in files) > INLINE
        scanned = list((self.pool.map if apart and self.pool else map)(scan, files, [self.watch] * len(files)))
        with self.lock:
            for target in {one.cubin.target for one in scanned if one.cubin.loads}:
                decoder = self.decoders.setdefault(target, Decoder(self.tools.nvdisasm, target))
                decoder.learn({k: v for one in scanned if one.cubin.target == target for k, v in one.samples.items()})
        return tuple(self._decoded(one) for one in scanned)

    def _decoded(self, scanned: Scanned) -> Cubin:
        """Return the cubin with the kernels that have a watched mnemonic or name."""
        if not scanned.cubin.loads:
            return scanned.cubin
        decoder, kept = self.decoders[scanned.cubin.target], []
        mnemonic, name = re.compile(self.watch.mnemonics), re.compile(self.watch.names)
        for one in scanned.kernels:
            watched = {m: n for m, n in sorted(decoder.named(one).items()) if mnemonic.search(m)}
            if watched or name.search(one.kernel):
                kept.append(Kernel(one.kernel, one.instructions, watched))
        total = sum(one.instructions for one in scanned.kernels)
        return replace(scanned.cubin, kernel_count=len(scanned.kernels), instructions=total, kernels=tuple(kept))
