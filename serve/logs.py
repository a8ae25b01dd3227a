"""The server's log: follow it, and pick the lines of it that explain a failure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LINES_SHOWN = 12
# vLLM's own prefix "(EngineCore pid=12) ERROR 11-21 03:40:12 [core.py:123]" says nothing to a user.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_EXPLAINS = re.compile(r"error|exception|refus|killed|cannot|not supported|no space|out of memory", re.IGNORECASE)
# What a starting vLLM prints, and what that means to a person who waits.
MILESTONES = (
    ("Starting to load model", "loading the model"),
    ("Loading weights took", "weights loaded"),
    ("Using 'SPARK_", "MXFP4 kernel chosen"),
    ("KV cache size", "cache allocated"),
    ("Starting vLLM server", "server starting"),
    ("Application startup complete", "first token"),
)


def relevant(log: Path, count: int = LINES_SHOWN) -> list[str]:
    """Return up to `count` last lines that explain a failure, without prefixes; the very last ones if none does."""
    return telling(_read(log), count)


def telling(text: str, count: int = LINES_SHOWN) -> list[str]:
    """Do the same with a log's text."""
    lines = [_PREFIX.sub("", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip() and not line.lstrip().startswith(("File ", "^", "~"))]
    explaining = list(dict.fromkeys(line for line in lines if _EXPLAINS.search(line)))
    return (explaining or lines)[-count:]


def milestone(log: Path) -> str:
    """Return what a starting server did last, in words; empty if nothing is known yet."""
    return reached_in(_read(log))


def reached_in(text: str) -> str:
    """Do the same with a log's text."""
    reached = [(text.rfind(sign), words) for sign, words in MILESTONES if sign in text]
    return max(reached)[1] if reached else ""


def follow(log: Path, still_alive: Callable[[], bool], *, from_end: bool = False) -> Iterator[str]:
    """Yield the log's text as it grows, until the server has ended and all is read."""
    with log.open(encoding="utf-8", errors="replace") as file:
        if from_end:
            file.seek(0, 2)
        while True:
            alive = still_alive()
            if text := file.read():
                yield text
            elif not alive:
                return
            else:
                time.sleep(0.2)


def _read(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
