"""Read what ninja knows: the statements of a build.ninja, and the headers that compilers reported (`.ninja_deps`).

Only what FlashInfer and CMake write: variables, rules, build statements; no subninja, no dyndep. Ninja's manual, "Ninja
file reference"; the binary log is ninja's src/deps_log.cc, version 4.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"# ninjadeps\n"
VERSION = 4
COMPILERS = ("compile", "cuda_compile")  # FlashInfer's rules that make an object (flashinfer/jit/cpp_ext.py)
_WORD = re.compile(r"(?:\$.|[^\s$:|])+|\|\|?@?|:", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{([\w.-]+)\}|([\w-]+)|(.))", re.DOTALL)


@dataclass(frozen=True)
class Statement:
    """One build statement: what it makes, by which rule, from what; implicit and order-only inputs included."""

    outputs: tuple[str, ...]
    rule: str
    inputs: tuple[str, ...]


def statements(path: Path) -> list[Statement]:
    """Return the build statements of a ninja file; an unreadable file has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    variables: dict[str, str] = {}
    found = []
    for line in re.sub(r"\$\n[ ]*", "", text).splitlines():
        if line.startswith("build "):
            found.append(_statement(line[len("build ") :], variables))
        elif match := re.match(r"([\w.-]+)\s*=\s*(.*)", line):  # at the margin: of the file, not of a rule
            variables[match[1]] = _expand(match[2], variables)
    return [one for one in found if one]


def _statement(line: str, variables: Mapping[str, str]) -> Statement | None:
    words = _WORD.findall(line)
    if ":" not in words[:-1]:
        return None
    colon = words.index(":")
    outputs, inputs = (
        tuple(_expand(word, variables) for word in part if not word.startswith("|"))
        for part in (words[:colon], words[colon + 2 :])
    )
    return Statement(outputs, words[colon + 1], inputs)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    return _REFERENCE.sub(lambda m: m[3] or variables.get(m[1] or m[2], ""), text)


def reported(path: Path) -> dict[str, tuple[str, ...]]:
    """Return, for each output in a `.ninja_deps`, the files that its compiler reported to have read.

    A log of another version, or the torn tail that a killed ninja leaves, is passed over.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    head = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC or len(data) < head or struct.unpack_from("<i", data, len(MAGIC))[0] != VERSION:
        return {}
    names: list[str] = []
    found: dict[str, tuple[str, ...]] = {}
    for is_deps, record in _records(data, head):
        if not is_deps:
            names.append(record[:-4].rstrip(b"\0").decode("utf-8", "surrogateescape"))
            continue
        output, _, _, *inputs = struct.unpack(f"<{len(record) // 4}i", record)
        if max([output, *inputs]) < len(names):
            found[names[output]] = tuple(names[index] for index in inputs)
    return found


def _records(data: bytes, at: int) -> Iterator[tuple[bool, bytes]]:
    while at + 4 <= len(data):
        (word,) = struct.unpack_from("<I", data, at)
        size = word & 0x7FFFFFFF
        if at + 4 + size > len(data) or size % 4 or size < 8:
            return
        yield bool(word >> 31), data[at + 4 : at + 4 + size]
        at += 4 + size
