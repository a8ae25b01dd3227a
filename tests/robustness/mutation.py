"""Mutations of valid samples. The same dice give the same bytes, so an input is known by its seed and number."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

NUMBERS = (0, 1, -1, 2, 7, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
           2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**20, 10**300)  # fmt: skip
WRITTEN = (*(str(number).encode() for number in NUMBERS), b"9" * 5000, b"1e9", b"0x10", b"1_000", b"00", b"1.5")
TOKENS = (
    *(b"", b"\0", b"\n", b"\r\n", b" ", b"\t", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\x1b[2J"),
    *rb'''\ud800 \u0000 null true NaN Infinity -Infinity 1e999 -0 {} [] "" { } [ ] " """ \ / ../ /etc/passwd ~ ://
    http://[::1 http://x:99999/ @ # %00 %zz ${x} $$ ` ; || : = , sha256 nan inf __class__'''.split(),
    *(b"--- ", b"+++ ", b"@@ -1,1 +1,1 @@\n", b"@@ -0,0 +1 @@\n", b"diff --git a/x b/x\n", b"rename from x\n"),
    *(b"\\ No newline at end of file\n", b"new file mode 120000\n", b"GIT binary patch\n"),
    *(b"data: ", b"data: [DONE]\n\n", b"event: x\n", b"PK\x01\x02", b"PK\x05\x06", b"\x7fELF", b"\x28\xb5\x2f\xfd"),
)
DIGITS = re.compile(rb"-?\d+")
LARGE = 20_000

Mutation = Callable[[bytearray, random.Random, Sequence[bytes]], None]


def _span(data: bytearray, dice: random.Random, longest: int = 64) -> tuple[int, int]:
    begin = dice.randrange(len(data) + 1)
    return begin, min(len(data), begin + dice.randrange(1, longest))


def _flip(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _insert(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    at = dice.randrange(len(data) + 1)
    data[at:at] = dice.choice(TOKENS)


def _replace(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    begin, end = _span(data, dice, 16)
    data[begin:end] = dice.choice(TOKENS)


def _delete(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    begin, end = _span(data, dice)
    del data[begin:end]


def _repeat(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    begin, end = _span(data, dice)
    data[end:end] = data[begin:end] * dice.choice((1, 1, 2, 3, 16))


def _cut(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    del data[dice.randrange(len(data) + 1) :]


def _number(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    """Replace a number in a text, or an integer of a binary format."""
    numbers = list(DIGITS.finditer(data[:65536]))
    if numbers:
        begin, end = dice.choice(numbers).span()
        data[begin:end] = dice.choice(WRITTEN)


def _integer(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    size = dice.choice((2, 4, 8))
    if len(data) > size:
        at = dice.randrange(len(data) - size) // 2 * 2
        number = dice.choice(NUMBERS) % (1 << 8 * size)
        data[at : at + size] = number.to_bytes(size, dice.choice(("little", "little", "big")))


def _line(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    """Drop, double or exchange lines."""
    lines = bytes(data).split(b"\n")
    first, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    how = dice.randrange(3)
    if how == 0:
        del lines[first]
    elif how == 1:
        lines.insert(other, lines[first])
    else:
        lines[first], lines[other] = lines[other], lines[first]
    data[:] = b"\n".join(lines)


def _splice(data: bytearray, dice: random.Random, samples: Sequence[bytes]) -> None:
    other = dice.choice(samples)
    data[dice.randrange(len(data) + 1) :] = other[dice.randrange(len(other) + 1) :]


def _hostile(data: bytearray, dice: random.Random, _samples: Sequence[bytes]) -> None:
    """Put in something large: nesting, a long line, a long number."""
    at = dice.randrange(len(data) + 1)
    unit = dice.choice(
        (b"[", b"{", b'{"a":', b"(", b"<a>", b"a", b"9", b"-", b".", b"a.", b"\n", b"\0", b" ", b"/", b"$a")
    )
    data[at:at] = unit * (LARGE // len(unit))


MUTATIONS: Sequence[Mutation] = (
    _flip, _flip, _insert, _insert, _replace, _replace, _delete, _delete, _repeat, _cut, _number, _number,
    _integer, _line, _line, _splice,
)  # fmt: skip


def mutated(samples: Sequence[bytes], dice: random.Random) -> bytes:
    """Return one of the samples after a few mutations."""
    data = bytearray(dice.choice(samples))
    for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 5))):
        dice.choice(MUTATIONS)(data, dice, samples)
    if dice.randrange(200) == 0:
        _hostile(data, dice, samples)
    return bytes(data)
