"""The server's log: follow it, and pick the lines of it that explain a failure."""

from __future__ import annotations

import re
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from pathlib import Path

LINES_SHOWN = 12
PIECE = 1 << 20  # bytes
# vLLM's own prefix "(EngineCore pid=12) ERROR 11-21 03:40:12 [core.py:123]" says nothing to a user.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_EXPLAINS = re.compile(r"error|exception|refus|killed|cannot|not supported|no space|out of memory", re.IGNORECASE)
# What a starting server prints, vLLM unless it says otherwise, and what that means to a person who waits.
MILESTONES = (
    ("Starting to load model", "loading the model"),
    ("Loading weights took", "weights loaded"),
    ("Using 'SPARK_", "MXFP4 kernel chosen"),
    ("KV cache size", "cache allocated"),
    ("Starting vLLM server", "server starting"),
    ("Application startup complete", "first token"),
    # Modular's MAX.
    ("Building, compiling, and initializing model", "compiling the model"),
    ("Building, compiling, and initializing sampler", "compiling the sampler"),
    ("Server ready on", "first token"),
)


def read(log: Path) -> str:
    """Return a log's text; empty if it cannot be read."""
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def explain(text: str) -> list[str]:
    """Return the last lines of a log that explain a failure, without prefixes; its very last ones if none does."""
    lines = [_PREFIX.sub("", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip() and not line.lstrip().startswith(("File ", "^", "~"))]
    explaining = list(dict.fromkeys(line for line in lines if _EXPLAINS.search(line)))
    return (explaining or lines)[-LINES_SHOWN:]


def milestone(text: str) -> str:
    """Return what a starting server did last by its log, for a person; empty if nothing is known yet."""
    milestones = [(text.rfind(sign), meaning) for sign, meaning in MILESTONES if sign in text]
    return max(milestones)[1] if milestones else ""


def follow(log: Path, still_alive: Callable[[], bool], *, from_end: bool = False) -> Iterator[str]:
    """Yield the log's text as it grows, until the server has ended and all is read."""
    decoder = getincrementaldecoder("utf-8")("replace")  # a read can end in the middle of a character
    with log.open("rb") as file:
        if from_end:
            file.seek(0, 2)
        while True:
            alive = still_alive()
            if data := file.read(PIECE):
                yield decoder.decode(data)
            elif not alive:
                return
            else:
                time.sleep(0.2)
