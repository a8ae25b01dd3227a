"""Arguments, errors and exit codes of programs that run without `./inv`, the same as in the commands of `./inv`."""

import argparse
import csv
import errno
import json
import lzma
import os
import shlex
import socket
import ssl
import struct
import sys
import tarfile
import tomllib
import traceback
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sparkforge.core import paths
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import CompileError, NetworkError, SparkforgeError, StorageError, UsageError, completed
from sparkforge.core.files import disk_full, existing_part

INTERRUPTED = 130  # 128 plus the number of SIGINT, as in shells


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError("the arguments cannot be read", message, f"{self.prog} --help")


def parse_whole(text: str, label: str, least: int, most: int) -> int:
    """Return an option's text as a whole number from `least` to `most`. Raises UsageError."""
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else least - 1
    if not least <= value <= most:
        why = f"it takes a whole number from {least} to {most}"
        raise UsageError(f"{label}={text[:40]} is not valid", why, f"{label}={least}")
    return value


def exit_code(program: Callable[[], object]) -> int:
    """Run `program`; return 0, or the code of the error that it raised, which is printed in three parts."""
    try:
        program()
    except KeyboardInterrupt:
        say("interrupted; the same command continues where it can")
        return INTERRUPTED
    except Exception as error:
        if (declared := declare(error)) is None:
            raise
        declared.fix = completed(declared.fix, shlex.join(sys.orig_argv))
        show_error(declared)
        return declared.exit_code
    return 0


# Exceptions of parsers for malformed files or responses, which the caller did not convert.
UNREADABLE = (
    *(UnicodeError, RecursionError, EOFError, json.JSONDecodeError, tomllib.TOMLDecodeError, csv.Error),
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error, OverflowError),
)
NETWORK = (socket.gaierror, ssl.SSLError, ConnectionError, TimeoutError)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def declare(error: Exception) -> SparkforgeError | None:
    """Turn an exception caused by bad input or by the machine into a SparkforgeError; return None for a bug of ours.

    This is the last resort: code that reads a file or an answer should raise a more precise error.
    """
    if isinstance(error, SparkforgeError):
        return error
    if isinstance(error, MemoryError):
        return CompileError(
            "there is not enough memory", _where(error), "again   # first stop other programs", code="compile.memory"
        )
    if isinstance(error, UNREADABLE) or (isinstance(error, ValueError) and "embedded null" in str(error)):
        why = f"it is nested too deeply ({_where(error)})" if isinstance(error, RecursionError) else _reason(error)
        return StorageError(
            "a file, an answer or an argument cannot be read", why, "./inv doctor", code="storage.access"
        )
    return _of_system(error) if isinstance(error, OSError) else None


def _of_system(error: OSError) -> SparkforgeError:
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) and error.filename else None
    if error.errno in NO_ROOM:
        return disk_full(existing_part(path or paths.state()))
    if path is not None:
        quoted = shlex.quote(str(existing_part(path)))
        fix = f"ls -ld {quoted}   # its owner and permissions; SPARKFORGE_STATE and SPARKFORGE_CACHE name other folders"
        return StorageError(f"cannot use {path}", error.strerror or str(error), fix, code="storage.access")
    if isinstance(error, NETWORK):
        fix = "again   # first check the network and the proxy's variables"
        return NetworkError("a connection failed", _reason(error), fix, code="network.fetch")
    fix = "./inv doctor   # and look at the files that PIP_CERT, SSL_CERT_FILE and the like name"
    return StorageError("the system refused a file that it does not name", _reason(error), fix, code="storage.access")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).encode(errors="backslashreplace").decode().split())[:300] or type(error).__name__
    return f"{text} ({_where(error)})"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    files = [(Path(frame.filename), frame) for frame in frames]
    own_frames = [
        frame for file, frame in files if file.is_relative_to(paths.ROOT) and "site-packages" not in file.parts
    ]
    frame = (own_frames or frames)[-1] if frames else None
    return f"in {Path(frame.filename).name}:{frame.lineno}, {frame.name}" if frame else "in no code of ours"
