"""Takes the files of weights out of the page cache: on a Spark the cache is the GPU's memory too.

vLLM reads a checkpoint once. What it leaves in the page cache can be dropped by the kernel, but cudaMemGetInfo counts
it as used, and a start has to reclaim it in the middle of its largest allocations. posix_fadvise(DONTNEED) needs no
right but to read. It drops pages that no process has mapped: a shard that is being read loses its read-ahead at most.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PERIOD_SECONDS = 5.0
LONGEST_SECONDS = 3600.0  # a start takes no longer (container.READY_SECONDS)


def drop(folder: str) -> None:
    """Drop what the page cache holds of a folder's weights, as far as no process has it mapped and it is written."""
    for file in Path(folder).glob("*.safetensors"):
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def tend(folder: str, mask: Iterable[int]) -> NoReturn:
    """Drop the weights again and again while a start can read them; then end this process. `mask`: signals to block."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        end = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < end:
            drop(folder)
            time.sleep(PERIOD_SECONDS)
    finally:
        os._exit(0)
