"""Mutations of valid samples. The same dice give the same bytes, so seed and number identify an input."""

import re

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

KINDS = (*("flip", "insert", "replace", "delete", "number", "line") * 2, "repeat", "cut", "integer", "splice")
# Large parts: nesting, a long line, a long number.
UNITS = (b"[", b"{", b'{"a":', b"(", b"<a>", b"a", b"9", b"-", b".", b"a.", b"\n", b"\0", b" ", b"/", b"$a")


def _changed(data, dice, samples):
    begin = dice.randrange(len(data) + 1)
    end = min(len(data), begin + dice.randrange(1, 64))
    piece = b""  # for "delete" and "cut"
    match dice.choice(KINDS):
        case "flip":
            end = begin + 1
            piece = bytes(byte ^ 1 << dice.randrange(8) for byte in data[begin:end])
        case "insert":
            end, piece = begin, dice.choice(TOKENS)
        case "replace":
            end, piece = min(end, begin + dice.randrange(1, 16)), dice.choice(TOKENS)
        case "repeat":
            piece = data[begin:end] * dice.choice((2, 2, 3, 4, 17))
        case "cut":
            end = len(data)
        case "splice":
            other = dice.choice(samples)
            end, piece = len(data), other[dice.randrange(len(other) + 1) :]
        case "number":  # of a text
            numbers = list(DIGITS.finditer(data[:65536]))
            (begin, end), piece = (dice.choice(numbers).span(), dice.choice(WRITTEN)) if numbers else ((0, 0), b"")
        case "integer":  # of a binary format
            size, begin = dice.choice((2, 4, 8)), begin // 2 * 2
            end = begin + size
            piece = (dice.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, dice.choice(("little", "little", "big")))
        case "line":  # dropped, doubled, or replaced by another line
            lines = data.split(b"\n")
            first, other_line = dice.randrange(len(lines)), dice.randrange(len(lines))
            line = lines[first]
            lines[first : first + 1] = dice.choice(([], [line, line], [lines[other_line]]))
            lines[other_line : other_line + 1] = dice.choice(([line], lines[other_line : other_line + 1]))
            begin, end, piece = 0, len(data), b"\n".join(lines)
    return data[:begin] + piece + data[end:]


def mutated(samples, dice):
    """Return one of the samples after a few changes, one in 200 with something large in it."""
    data = dice.choice(samples)
    for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 5))):
        data = _changed(data, dice, samples)
    if dice.randrange(200) == 0:
        at, unit = dice.randrange(len(data) + 1), dice.choice(UNITS)
        data = data[:at] + unit * (LARGE // len(unit)) + data[at:]
    return data
