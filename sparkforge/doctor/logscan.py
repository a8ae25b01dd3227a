"""Find signatures in a log of any size: read once, in pieces, in memory that does not grow with it.

Only a piece of whole lines that holds one of the signs, as bytes, is searched line by line. Colours, bytes that are no
text, endless lines and a last line without a line end are all accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from sparkforge.doctor.signatures import Signature

PIECE = 1 << 20  # bytes
LONGEST = 1 << 16  # bytes of a line that is searched as one; a longer one is searched in parts that overlap
OVERLAP = 1 << 10
SHOWN = 300  # characters of a line that are kept
BLOCK_LINES = 40  # after the first line of an error of ours, in which its `next:` must come
DIFFERENT = 5  # hits of one signature with different groups that are kept, such as two unknown variables
COLOUR = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
PART = re.compile(r"^\s+(why|next):\s*(.*)$")
# Prefixes of a line by Compose (service), BuildKit (step) and vLLM (process). A signature's ^ matches after them.
PREFIX = re.compile(r"^(?:[\w.-]+\s+\| )?(?:#\d+ [\d.]+ )?(?:\(\w+(?: pid=\d+)?\) )*")


@dataclass
class Hit:
    """A signature that a log shows: the first line, the groups of that line, and how often."""

    signature: Signature
    line: int
    text: str
    groups: dict[str, str]
    count: int = 1


@dataclass
class _Open:
    """An error of ours whose `why:` and `next:` are still to come."""

    hit: Hit
    left: int = BLOCK_LINES
    part: str = ""
    parts: dict[str, list[str]] = field(default_factory=dict)


def scan(chunks: Iterable[bytes], signatures: Sequence[Signature]) -> list[Hit]:
    """Return what the log shows, by line. `chunks` are its bytes, cut anywhere."""
    reader = _Reader([signature for signature in signatures if signature.signs])
    for number, piece in _pieces(chunks):
        reader.read(number, COLOUR.sub(b"", piece) if b"\x1b" in piece else piece)
    return sorted(reader.hits.values(), key=lambda hit: hit.line)


def _pieces(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield pieces of whole lines with the number of their first line; a line that does not end comes in parts."""
    number, rest = 1, b""
    for chunk in chunks:
        for begin in range(0, len(chunk), PIECE):
            piece = rest + chunk[begin : begin + PIECE]
            end = piece.rfind(b"\n") + 1
            if end:
                yield number, piece[:end]
                number += piece.count(b"\n", 0, end)
            rest = piece[end:]
            while len(rest) > LONGEST:
                yield number, rest[:LONGEST]
                rest = rest[LONGEST - OVERLAP :]
    if rest:
        yield number, rest


class _Reader:
    """The hits so far, and the error blocks that have not ended."""

    def __init__(self, signatures: Sequence[Signature]) -> None:
        self.signatures, self.open, self.over = signatures, list[_Open](), set[bytes]()
        self.hits: dict[tuple[str, ...], Hit] = {}

    def read(self, number: int, piece: bytes) -> None:
        """Take a piece whose first line is `number`."""
        candidates = [s for s in self.signatures if any(sign in piece for sign in s.signs)]
        ends = {s.until for s in self.signatures if s.until and s.until in piece} - self.over
        if not candidates and not self.open and not ends:
            return
        for offset, line in enumerate(piece.removesuffix(b"\n").split(b"\n")):
            self.over |= {end for end in ends if end in line}
            present = [s for s in candidates if s.until not in self.over and any(sign in line for sign in s.signs)]
            if present or self.open:
                text = line[: LONGEST + OVERLAP].decode("utf-8", "replace").rstrip("\r\n")
                self._line(number + offset, PREFIX.sub("", text), present)

    def _line(self, number: int, text: str, present: Sequence[Signature]) -> None:
        for block in self.open:
            self._continue(block, text)
        self.open = [block for block in self.open if block.left > 0]
        for signature in present:
            groups = signature.match(text)
            if groups is not None:
                hit = Hit(signature, number, text.strip()[:SHOWN], {k: v[:SHOWN] for k, v in groups.items()})
                if signature.block:
                    self.open.append(_Open(hit))
                else:
                    self._keep(hit)

    def _continue(self, block: _Open, text: str) -> None:
        """Add a line to an error of ours: a part, or more of the previous part; `next:` ends it."""
        block.left -= 1
        if part := PART.match(text):
            block.part = part[1]
            block.parts[block.part] = [part[2].strip()]
        elif block.part and text.startswith("        "):
            block.parts[block.part].append(text.strip())
        elif block.part or not text.startswith(" "):
            block.left = 0  # another line of the log: our error has ended
        if block.part == "next":
            block.left = 0
            parts = {name: "; ".join(takewhile(bool, lines))[:SHOWN] for name, lines in block.parts.items()}
            block.hit.groups |= {"why": "", **parts}
            self._keep(block.hit)

    def _keep(self, hit: Hit) -> None:
        name = hit.signature.id
        key = (name, *hit.groups.values())
        if key in self.hits:
            self.hits[key].count += 1
        elif sum(other[0] == name for other in self.hits) < DIFFERENT:
            self.hits[key] = hit
