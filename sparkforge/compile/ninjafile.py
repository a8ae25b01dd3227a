"""Read ninja's files: the statements of a build.ninja, and the headers that compilers reported (`.ninja_deps`).

Only what FlashInfer and CMake write: variables, rules, build statements; no subninja, no dyndep. Ninja's manual, "Ninja
file reference"; the binary log is ninja's src/deps_log.cc, version 4.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.documents import read_bytes, read_text

MAGIC = b"# ninjadeps\n"
VERSION = 4
LONGEST = 1 << 20  # characters of a line with its variables replaced
COMPILERS = ("compile", "cuda_compile")  # FlashInfer's rules that make an object (flashinfer/jit/cpp_ext.py)
_TOKEN = re.compile(r"(?:\$.|[^\s$:|])+|\|\|?@?|:", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{([\w.-]+)\}|([\w-]+)|(.))", re.DOTALL)


@dataclass(frozen=True)
class Statement:
    """One build statement: what it makes, by which rule, from what; implicit and order-only inputs included."""

    outputs: tuple[str, ...]
    rule: str
    inputs: tuple[str, ...]


def statements(path: Path) -> list[Statement]:
    """Return the build statements of a ninja file; an unreadable file has none."""
    variables: dict[str, str] = {}
    parsed = []
    try:
        for line in re.sub(r"\$\n[ ]*", "", read_text(path)).splitlines():
            if line.startswith("build "):
                parsed.append(_statement(line[len("build ") :], variables))
            elif match := re.match(r"([\w.-]+)\s*=\s*(.*)", line):  # at the margin: of the file, not of a rule
                variables[match[1]] = _expand(match[2], variables)
    except (OSError, ValueError):
        return []
    return [statement for statement in parsed if statement]


def _statement(line: str, variables: Mapping[str, str]) -> Statement | None:
    tokens = _TOKEN.findall(line)
    if ":" not in tokens[:-1]:
        return None
    colon = tokens.index(":")
    outputs, inputs = (
        tuple(_expand(token, variables) for token in part if not token.startswith("|"))
        for part in (tokens[:colon], tokens[colon + 2 :])
    )
    return Statement(outputs, tokens[colon + 1], inputs)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        """Return what stands for a `$`: the character after it, or a variable's value."""
        return match[3] or variables.get(match[1] or match[2], "")

    if sum(len(value(match)) for match in _REFERENCE.finditer(text)) > LONGEST:  # variables may double each other
        raise ValueError(f"a line has more than {LONGEST} characters once its variables are replaced")
    return _REFERENCE.sub(value, text)


def reported(path: Path) -> dict[str, tuple[str, ...]]:
    """Return, for each output in a `.ninja_deps`, the files that its compiler reported to have read.

    A log of another version, or the torn tail that a killed ninja leaves, is skipped.
    """
    try:
        data = read_bytes(path)
    except (OSError, ValueError):
        return {}
    head = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC or len(data) < head or struct.unpack_from("<i", data, len(MAGIC))[0] != VERSION:
        return {}
    names: list[str] = []
    headers: dict[str, tuple[str, ...]] = {}
    offset = head
    while offset + 4 <= len(data):
        (word,) = struct.unpack_from("<I", data, offset)
        size = word & 0x7FFFFFFF
        if offset + 4 + size > len(data) or size % 4 or size < 8:
            break
        record = data[offset + 4 : offset + 4 + size]
        offset += 4 + size
        if not word >> 31:  # a path
            names.append(record[:-4].rstrip(b"\0").decode("utf-8", "surrogateescape"))
            continue
        numbers = struct.unpack(f"<{size // 4}I", record)
        output, inputs = numbers[0], numbers[3:]  # between them the object's time
        if len(numbers) >= 3 and max(output, *inputs, 0) < len(names):
            headers[names[output]] = tuple(names[index] for index in inputs)
    return headers
