"""The one console, logger and progress display. Everything meant for people goes to stderr; results go to stdout.

Everything that is printed passes `Sanitiser`: a model, a server, a log or a file can hold control sequences that set
the clipboard, move the cursor or hide text, and none of them may reach the terminal. Our own colours are added later.
"""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from rich import progress as bars
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from sparkforge.core import paths
from sparkforge.core.errors import SparkforgeError, StorageError, UsageError

# C0 without tab and line feed, DEL, C1, bidirectional embeddings, overrides and isolates, lone surrogates.
UNSAFE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
LONGEST = 4096  # characters of an unfinished sequence that are kept back; more are shown as text
HIDDEN = "***"
# A password may hold an unescaped @, /, ? or #. After a colon that does not begin a port, it ends at the last @.
USER_INFO = re.compile(
    r"(?<=://)(?:[^\s:/?#\"'<>@]{0,128}:(?!\d{1,5}(?:[/?#]|$))[^\s\"'<>]{0,256}@"
    r"|[^\s/?#\"'<>@]{0,256}@(?=[^\s/?#\"'<>]))"
)
_UNSAFE = re.compile(f"[{UNSAFE}]")
# Each alternative has one group, which matches only where the sequence is complete. A line feed ends a control string
# too, so that an unterminated string hides at most one line.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[ -?]*([@-~])?"  # CSI: cursor, colours, modes
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(\x07|\x9c|\x1b\\)?"  # OSC, DCS, SOS, PM, APC
    r"|\x1b[ -/]*([0-~])?"
    rf"|(\r\n|[{UNSAFE}])"
)


class Sanitiser:
    """Removes control sequences (ECMA-48) from a text that comes in pieces, cut anywhere.

    A carriage return becomes a line feed, so that the text before it stays visible; a lone surrogate becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._begun, self._after_return = "", False

    def feed(self, piece: str) -> str:
        """Return the harmless part of the next piece; a sequence that has not ended is kept for the next one."""
        if self._after_return and piece:
            piece = piece.removeprefix("\n")
            self._after_return = False
        text = self._begun + piece
        self._begun = ""
        parts, end = list[str](), 0
        for match in _SEQUENCE.finditer(text):
            parts.append(text[end : match.start()])
            end = match.end()
            if match.lastindex is None:
                if end == len(text) and len(match[0]) <= LONGEST:
                    self._begun = match[0]
            elif match[0] in ("\r", "\r\n"):
                parts.append("\n")
                self._after_return = match[0] == "\r" and end == len(text)
            elif "\ud800" <= match[0] <= "\udfff":
                parts.append("\ufffd")
        return "".join([*parts, text[end:]])


def safe(text: str) -> str:
    """Return a whole text without control sequences (see `Sanitiser`)."""
    return Sanitiser().feed(text) if _UNSAFE.search(text) else text


def for_people(text: str) -> str:
    """Return `text` for people: with the commands of this installation, and without passwords in URLs."""
    return paths.as_called_here(without_passwords(text))


class _SafeConsole(Console):
    """A console that sanitises every text it renders, in tables and progress displays too; styles are added later."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else safe(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, as printing to stdout does; Rich itself would end the program with code 1."""
        raise BrokenPipeError("stderr has no reader any more")


@cache
def console() -> Console:
    """Return the console on stderr: plain without a terminal or with NO_COLOR, never markup or emoji from a text."""
    return _SafeConsole(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def say(message: str) -> None:
    """Print one line for people, without interpreting markup and without a URL's password."""
    console().print(for_people(message))


def confirmed(question: str, failure: str, fix: str) -> bool:
    """Ask and tell whether the answer is yes. Raises UsageError, with `failure` and `fix`, if there is no terminal."""
    if not sys.stdin.isatty():
        raise UsageError(failure, "there is no terminal to ask on", fix)
    return input(f"{for_people(question)} [y/N] ").strip().lower() in {"y", "yes"}


def echo(text: str = "", *, end: str = "\n") -> None:
    """Print a result to stdout."""
    _write(paths.as_called_here(safe(text)) + end)


def echo_json(value: Any) -> None:
    """Print a result as JSON to stdout; unsafe characters are escaped, so that no value changes."""
    text = paths.as_called_here(json.dumps(value, indent=2, ensure_ascii=False))
    _write(_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def stream(pieces: Iterable[str]) -> None:
    """Print pieces of one text to stdout as they arrive; a sequence that is cut between two pieces is removed, too."""
    sanitiser = Sanitiser()
    for piece in pieces:
        if text := sanitiser.feed(piece):
            _write(text)


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's later output must not fail again
        fix = "again   # first free some space there, or send the output elsewhere"
        why = "the disk that it is written to is full"
        raise StorageError("cannot write the output", why, fix, code="storage.full") from error


LONGEST_WHAT = 400  # characters; a path may have 4,096


def show_error(error: SparkforgeError) -> None:
    """Print an error in three lines: what failed with its code, why, and the next command."""
    out = console()
    what = " ".join(for_people(error.what).split())  # a name can hold line ends
    out.print(f"✗ {what if len(what) <= LONGEST_WHAT else f'{what[:LONGEST_WHAT]}…'}", style="bold red", end="")
    out.print(f" [{error.code}]" if error.code else "", style="dim")
    out.print(f"  why:  {for_people(error.why)}")
    out.print(f"  next: {for_people(paths.where_it_runs(error.fix))}", style="bold")


class Steps:
    """A numbered list of steps, each timed; `seconds` maps a step's name to its duration."""

    def __init__(self, total: int) -> None:
        self.total, self.seconds = total, dict[str, float]()

    @contextmanager
    def step(self, name: str, detail: str = "") -> Iterator[Callable[[str], None]]:
        """Show a running step; yields a function that replaces its detail text. Ends with ✓ or ✗ and seconds."""
        label = f"[{len(self.seconds) + 1}/{self.total}] {name}"
        started, last = time.monotonic(), [detail]

        def line() -> Text:
            """Return label and detail as Text: Rich would read a string as markup."""
            return Text(for_people(" · ".join(part for part in (label, last[0]) if part)))

        def update(text: str) -> None:
            last[0] = text
            status.update(line())

        mark = "✗"
        try:
            with console().status(line()) as status:
                yield update
            mark = "✓"
        finally:
            self.seconds[name] = round(time.monotonic() - started, 3)
            console().print(f"{mark} {line()} ({self.seconds[name]:.1f} s)")


@contextmanager
def download_bar(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a transfer of `total` bytes; yields a function that takes the number of received bytes."""
    text = bars.TextColumn("{task.description}", markup=False)
    columns = (text, bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn())
    with bars.Progress(*columns, console=console(), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(name, total=total)
        yield lambda count: progress.update(task, advance=count)


def without_passwords(text: str) -> str:
    """Return `text` with `***` in place of each URL's user and password."""
    return USER_INFO.sub(f"{HIDDEN}@", text) if "://" in text else text
