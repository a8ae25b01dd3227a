"""Count a kernel's instructions by mnemonic, at about the speed of a memory copy; nvdisasm decodes the mnemonics.

nvdisasm reads 2 MB of cubins a second, and large libraries hold hundreds of MB. But kernels repeat themselves: 2.6 MB
of FlashInfer's MoE hold 162,000 instructions with 698 *shapes*. A shape is an instruction's bits without registers,
immediates and scheduling. So we count shapes and give nvdisasm one real instruction of each. Of the 128 bits, 0-11 are
the opcode and 72-104 its modifiers (derived from nvdisasm's output; tests/integration/test_audit.py compares whole
kernels). A few instructions have modifiers in other bits (SHFL, LDG, HSETP2, IMAD's display names): their counts can be
wrong by modifier, never by base name. No rule uses them.
"""

from __future__ import annotations

import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.core.errors import ProcessError
from sparkforge.core.process import run

WIDTH = 16  # bytes of an instruction, since compute capability 7.0
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
MOST_SHAPES = 1 << 18  # of one cubin; FlashInfer's MoE has 698, and nvdisasm reads 16 bytes of each
NVDISASM_SECONDS = 300.0  # time limit for the samples of one target; 0.3 s is usual
LOW_4, LOW_1 = (bytes(value & mask for value in range(256)) for mask in (0x0F, 0x01))


@dataclass(frozen=True)
class Shapes:
    """A kernel's mangled name and the counts of its shapes, packed because libraries hold thousands of kernels."""

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
