"""Find signatures in a log of any size: read once, in pieces, in memory that does not grow with it.

A piece of whole lines is looked at closely only if it holds one of the signs, which bytes comparison tells at once.
Colours, bytes that are no text, lines without end and a last line without line end are all taken as they come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from serve.signatures import Signature

PIECE = 1 << 20  # bytes
LONGEST = 1 << 16  # of a line that is looked at as one; what is longer is looked at in parts that overlap
OVERLAP = 1 << 10
SHOWN = 300  # characters of a line that are kept
BLOCK_LINES = 40  # behind the first line of an error of ours, in which its `next:` must come
DIFFERENT = 5  # answers of one signature that are kept apart, such as two unknown variables
COLOUR = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
PART = re.compile(r"^\s+(why|next):\s*(.*)$")
# What stands before a line: Compose's service, BuildKit's step, vLLM's process. A signature's ^ is behind it.
BEFORE = re.compile(r"^(?:[\w.-]+\s+\| )?(?:#\d+ [\d.]+ )?(?:\(\w+(?: pid=\d+)?\) )*")


@dataclass
class Hit:
    """A signature that a log shows: where it did first, what its groups were, and how often."""

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
    """What was found so far, and the blocks that are not at their end."""

    def __init__(self, signatures: Sequence[Signature]) -> None:
        self.signatures, self.open, self.over = signatures, list[_Open](), set[bytes]()
        self.hits: dict[tuple[str, ...], Hit] = {}

    def read(self, number: int, piece: bytes) -> None:
        """Take a piece whose first line is `number`."""
        shown = [each for each in self.signatures if any(sign in piece for sign in each.signs)]
        ends = {each.until for each in self.signatures if each.until and each.until in piece} - self.over
        if not shown and not self.open and not ends:
            return
        for offset, line in enumerate(piece.removesuffix(b"\n").split(b"\n")):
            self.over |= {end for end in ends if end in line}
            present = [
                each for each in shown if each.until not in self.over and any(sign in line for sign in each.signs)
            ]
            if present or self.open:
                text = line[: LONGEST + OVERLAP].decode("utf-8", "replace").rstrip("\r\n")
                self._line(number + offset, BEFORE.sub("", text), present)

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
        """Take a line behind an error of ours: one of its parts, or more of the part before; `next:` ends it."""
        block.left -= 1
        if found := PART.match(text):
            block.part = found[1]
            block.parts[block.part] = [found[2].strip()]
        elif block.part and text.startswith("        "):
            block.parts[block.part].append(text.strip())
        elif block.part or not text.startswith(" "):
            block.left = 0  # another line of the log: what ours had to say has ended
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
        elif sum(each[0] == name for each in self.hits) < DIFFERENT:
            self.hits[key] = hit
