"""Count a kernel's instructions by mnemonic, at the speed of a copy, with nvdisasm as the one who reads them.

nvdisasm reads 2 MB of cubins a second, and large libraries hold hundreds. But kernels repeat themselves: 2.6 MB of
FlashInfer's MoE hold 162,000 instructions and 698 *shapes*: the bits without registers, immediates and scheduling.
So we count shapes and give nvdisasm one real instruction of each. Bits: 0-11 opcode, 72-104 its modifiers, of 128
(read off nvdisasm's own output; tests/integration/test_audit.py compares whole kernels). A few instructions have
modifiers elsewhere (SHFL, LDG, HSETP2, IMAD's display names): their counts can be off by modifier, never by base
name. The rules look at none of them.
"""

from __future__ import annotations

import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.errors import CommandError
from sparkforge.process import run

WIDTH = 16  # bytes of an instruction, since compute capability 7.0
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
LOW_4, LOW_1 = (bytes(value & mask for value in range(256)) for mask in (0x0F, 0x01))


@dataclass(frozen=True)
class Shapes:
    """A kernel's mangled name and its shapes: how often each occurs, packed because libraries hold thousands."""

    kernel: str
    shapes: array[int]
    numbers: array[int]

    @property
    def instructions(self) -> int:
        """How many instructions the kernel has."""
        return sum(self.numbers)


def count(kernels: Iterable[tuple[str, bytes]]) -> tuple[list[Shapes], dict[int, bytes]]:
    """Return each kernel's shapes, and one real instruction of each shape, from kernels' names and code."""
    found, samples = [], dict[int, bytes]()
    for name, code in kernels:
        packed = shapes(code)
        counted = Counter(memoryview(packed).cast("Q"))
        for shape in counted.keys() - samples.keys():
            samples[shape] = _sample(shape, packed, code)
        found.append(Shapes(name, array("Q", counted.keys()), array("I", counted.values())))
    return found, samples


@dataclass
class Decoder:
    """The mnemonics of one target's shapes, as nvdisasm gave them so far; apart those that match `watch`."""

    nvdisasm: Path
    target: str  # such as sm_121a
    watch: str = ""
    known: dict[int, str] = field(default_factory=dict)
    watched: dict[int, str] = field(default_factory=dict)

    def learn(self, samples: Mapping[int, bytes]) -> None:
        """Have nvdisasm read the samples of shapes not seen yet: one call, 0.3 s whether for 1 or 1000.

        Raises CommandError if it cannot.
        """
        new = {shape: code for shape, code in samples.items() if shape not in self.known}
        if not new:
            return
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(b"".join(new.values()))
            file.flush()
            told = run([self.nvdisasm, "-b", self.target.replace("sm_", "SM"), "-ndf", file.name]).stdout
        names = {int(at, 16) // WIDTH: name for at, name in LINE.findall(told)}
        if missing := set(range(len(new))) - names.keys():
            raise CommandError(f"nvdisasm left out {len(missing)} instructions", f"for {self.target}", "report this")
        named = {shape: names[number] for number, shape in enumerate(new)}
        self.known |= named
        self.watched |= {shape: name for shape, name in named.items() if re.search(self.watch, name)}


def named(kernel: Shapes, names: Mapping[int, str]) -> Counter[str]:
    """Return a kernel's count of instructions by mnemonic, of those shapes that `names` has."""
    found = Counter[str]()
    for shape, number in zip(kernel.shapes, kernel.numbers, strict=True):
        if shape in names:
            found[names[shape]] += number
    return found


def shapes(code: bytes) -> bytearray:
    """Return 8 bytes for each instruction: what of it decides its mnemonic."""
    code = code[: len(code) // WIDTH * WIDTH]
    packed = bytearray(len(code) // WIDTH * 8)
    packed[0::8] = code[0::WIDTH]
    packed[1::8] = code[1::WIDTH].translate(LOW_4)
    for number in range(4):
        packed[2 + number :: 8] = code[9 + number :: WIDTH]
    packed[6::8] = code[13::WIDTH].translate(LOW_1)
    return packed


def _sample(shape: int, packed: bytearray, code: bytes) -> bytes:
    """Return the first instruction of `shape`."""
    wanted, at = shape.to_bytes(8, "little"), -1
    while (at := packed.find(wanted, at + 1)) % 8:
        pass
    return code[at * 2 : at * 2 + WIDTH]
