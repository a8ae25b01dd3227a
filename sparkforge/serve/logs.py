"""The server's log: follow it, and select the lines that explain a failure."""

import re
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from sparkforge.core import events
from sparkforge.core.errors import RefusalError, ServerError, with_remark

LINES_SHOWN = 12
PIECE = 1 << 20  # bytes
# vLLM's own prefix "(EngineCore pid=12) ERROR 11-21 03:40:12 [core.py:123]" says nothing to a user.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
# Lines that a starting server prints (vLLM's unless noted), and their meaning for a person who waits.
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


def refusal(problem: str, text: str, *, why: str, fix: str, then: str = "") -> RefusalError:
    """Return the error for a validator's refusal, with its report's failed checks and the first one's next command.

    `why` and `fix` are for a `text` without a report; `then` follows the report's command.
    """
    lines = [line.strip() for line in text.splitlines()]
    checks = dict.fromkeys(line for line in lines if line.startswith("FAIL "))
    mark, fixes = "", dict[str, str]()  # a line's mark → the first command below such a line: warnings have some too
    for line in lines:
        if line.startswith("next:"):
            fixes.setdefault(mark, line.removeprefix("next:").strip())
        elif line[:5] in {"FAIL ", "WARN ", "skip "}:
            mark = line[:4]
    first = fixes.get("FAIL") or fixes.get("skip") or next(iter(fixes.values()), "")
    if first:
        fix = with_remark(first, f"then {then}") if then else first
    return RefusalError(problem, "\n        ".join(checks) or why, fix, code="validation.failed")


def read(log: Path) -> str:
    """Return a log's text; empty if it cannot be read."""
    with suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace")
    return ""


def explain(text: str) -> list[str]:
    """Return the lines of a log that explain a failure, without prefixes; without a fault, its last lines."""
    event = events.read_text(f"{text}\n")
    if decisive := event.decisive:
        message = [line.strip() for line in decisive.after if line[:1].isspace()]  # pydantic's cause is in its 2nd line
        causes = dict.fromkeys([*(line.shown for line in event.chain(decisive)), *message])
        others = dict.fromkeys(line.shown for line in event.faults if line.shown not in causes)
        return [*list(causes)[-LINES_SHOWN:], *others][:LINES_SHOWN]
    calm = [line for line in text.splitlines() if events.parse(line).level != "WARNING"]
    lines = [_PREFIX.sub("", line).rstrip() for line in calm or text.splitlines()]
    return [line for line in lines if line.strip() and not line.lstrip().startswith(("File ", "^", "~"))][-LINES_SHOWN:]


def failure(problem: str, text: str, command: str) -> ServerError:
    """Return the error for a failed server with its log's explaining lines; `command` prints the whole log."""
    why = "\n        ".join(explain(text) or ["its log is empty"])
    return ServerError(problem, why, f"./inv doctor   # the whole log: {command}", code="server.start")


def milestone(text: str) -> str:
    """Return the last step of a starting server by its log, for a person; empty if none is known yet."""
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
