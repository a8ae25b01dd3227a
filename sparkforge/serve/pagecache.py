"""Takes the files of weights out of the page cache once they were read: on a Spark the cache is the GPU's memory too.

vLLM reads a checkpoint once. What it leaves in the page cache can be dropped by the kernel, but cudaMemGetInfo counts
it as used, and a start has to reclaim it in the middle of its largest allocations. posix_fadvise(DONTNEED) needs no
right but to read. It drops pages that no process has mapped: a shard that is being read loses its read-ahead at most.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PERIOD_SECONDS = 2.0
LONGEST_SECONDS = 3600.0  # a start takes no longer (container.READY_SECONDS)
QUIET_SECONDS = 120.0  # nothing came back into the cache for so long: everything was read


def weights(folder: str) -> list[Path]:
    """Return the files of weights in a checkpoint's folder."""
    return sorted(Path(folder).glob("*.safetensors"))


def resident(file: Path) -> int:
    """Return how many bytes of a file are in the page cache (mincore(2)).

    The kernel tells it to those who own or may write the file, and says "all" to others. Raises OSError.
    """
    size = file.stat().st_size
    if not size:
        return 0
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        (*[ctypes.c_size_t] * 2, *[ctypes.c_int] * 3, ctypes.c_long),
    )
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        address = libc.mmap(0, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in {None, ctypes.c_void_p(-1).value}:
            raise OSError(ctypes.get_errno(), "cannot map", str(file))
        pages = (size + page - 1) // page
        residency = ctypes.create_string_buffer(pages)
        try:
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), residency):
                raise OSError(ctypes.get_errno(), "mincore", str(file))
        finally:
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    finally:
        os.close(descriptor)
    in_cache = sum(residency.raw.count(bytes([value])) for value in range(1, 256, 2))  # the lowest bit counts
    return min(size, in_cache * page)


def drop(files: Iterable[Path]) -> None:
    """Drop what the page cache holds of files, as far as no process has it mapped and it is written."""
    for file in files:
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def tend(folder: str, mask: Iterable[int]) -> NoReturn:
    """Drop each file of weights after it was read, until none is read any more; then end this process.

    A file was read when its part in the cache is the same in two rounds. `mask` are the signals to block.
    """
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        dropped = _tend(folder)
        if dropped:
            print(f"the page cache let {dropped / 1e9:.1f} GB of weights go", flush=True)
    finally:
        os._exit(0)


def _tend(folder: str) -> int:
    before: dict[Path, int] = {}
    dropped, start = 0, time.monotonic()
    last = start
    while time.monotonic() - start < LONGEST_SECONDS and (not dropped or time.monotonic() - last < QUIET_SECONDS):
        for file in weights(folder):
            try:
                now = resident(file)
                if now and now == before.get(file):
                    drop([file])
                    gone = now - (now := resident(file))
                    dropped, last = dropped + gone, time.monotonic() if gone else last
                before[file] = now
            except OSError:
                continue
        time.sleep(PERIOD_SECONDS)
    return dropped
