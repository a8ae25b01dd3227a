"""Reads JSON and TOML files that anybody may have written: bounded in size, in depth, and never from a pipe or device.

Raises OSError, which names the file, or DocumentError. DocumentError is a ValueError too, so a caller that reports
malformed files in its own words catches both with `except (OSError, ValueError)`.
"""

import errno
import json
import math
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkforge.core.errors import StorageError

LARGEST = 64 << 20  # bytes of a file; our largest result has 3 MB
LARGEST_TOML = 4 << 20  # bytes; tomllib is slow, and our tables are written by hand
MOST_DOTS = 10**8  # squares of the dots of each line, summed: tomllib's time for a dotted key grows like that
MOST_VALUES = 10_000_000  # of one JSON text, by its commas and brackets: Python takes about 100 bytes for each
DEEPEST = 64  # tables and lists inside each other; what writes such a value again needs several calls a level


class DocumentError(StorageError, ValueError):
    """A file is not the JSON or TOML that it should be; as text, only the reason."""

    def __init__(self, origin: str, why: str) -> None:
        fix = "again   # first correct or remove that file"
        super().__init__(f"cannot read {origin}", why, fix, code="storage.access")

    def __str__(self) -> str:
        return self.why


def read_bytes(path: Path, *, largest: int = LARGEST) -> bytes:
    """Return the content of a regular file. Raises OSError; DocumentError for another kind of file or a larger one."""
    try:
        # A pipe without a writer would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the name
        raise DocumentError(repr(str(path)), str(error)) from None
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise DocumentError(str(path), "it is no file but a pipe, socket or device")
        with open(handle, "rb", closefd=False) as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error  # a read names no file
    finally:
        os.close(handle)
    if len(data) > largest:
        raise DocumentError(str(path), f"it has more than {largest:,} bytes")
    return data


def read_text(path: Path, *, largest: int = LARGEST) -> str:
    """Return a regular file's text. Raises OSError, DocumentError."""
    return _text(read_bytes(path, largest=largest), str(path))


def read_json(path: Path, *, largest: int = LARGEST, finite: bool = True) -> Any:
    """Return the value in a JSON file; see parse_json. Raises OSError, DocumentError."""
    return parse_json(read_bytes(path, largest=largest), str(path), finite=finite)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file. Raises OSError, DocumentError."""
    origin = str(path)
    text = _text(read_bytes(path, largest=LARGEST_TOML), origin).replace("\r\n", "\n")
    if sum(line.count(".") ** 2 for line in text.splitlines()) > MOST_DOTS:
        raise DocumentError(origin, f"it is nested deeper than {DEEPEST} levels, by dotted keys")
    value: dict[str, Any] = _parsed(tomllib.loads, text, origin, "TOML")
    return value


def parse_json(data: bytes | str, origin: str, *, finite: bool = True) -> Any:
    """Return the value in JSON text; `origin` says in errors where it is from. Raises DocumentError.

    Without `finite` NaN and infinity are let through, which Python's own writer writes where there is no figure.
    """
    text = _text(data, origin) if isinstance(data, bytes) else data
    if len(text) > MOST_VALUES and sum(map(text.count, ",[{")) > MOST_VALUES:
        raise DocumentError(origin, f"it holds more than {MOST_VALUES:,} values")
    return _parsed(json.loads, text, origin, "JSON", finite=finite)


def _text(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(origin, f"it is no text: byte {error.start} is {data[error.start]:#x}") from None


def _parsed(parse: Callable[[str], Any], text: str, origin: str, form: str, *, finite: bool = True) -> Any:
    try:
        value = parse(text)
    except RecursionError:
        raise DocumentError(origin, f"it is nested deeper than {DEEPEST} levels") from None
    except ValueError as error:
        raise DocumentError(origin, f"it is no {form}: {' '.join(str(error).split())[:200]}") from None
    levels: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        if not levels:
            return value
        inner: list[Any] = []
        for item in levels:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif finite and isinstance(item, float) and not math.isfinite(item):
                raise DocumentError(origin, f"it holds the number {item}")
            elif isinstance(item, int) and abs(item) >> 64:
                raise DocumentError(origin, f"it holds a number of {item.bit_length()} bits")
        levels = inner
    raise DocumentError(origin, f"it is nested deeper than {DEEPEST} levels")
