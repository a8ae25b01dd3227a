"""Find where a change applies, for status and rebase. `hunks` tries only the named line; this module, the whole file.

As in `git apply`, a hunk that begins at line 1 stays at the beginning, a hunk that ends without context stays at the
end, and two hunks never overlap. Unlike git, this module refuses a hunk that fits in several places, unless one is its
own line and no earlier hunk was moved: a choice would be a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from io import BytesIO

from sparkforge.patching.hunks import FileChange, Hunk

SHOWN = 12  # lines of a hunk in a message


@dataclass(frozen=True)
class Misfit:
    """A hunk, or a whole file (`line` 0), that does not fit: the 1-based line it names, why, and its text as a diff."""

    path: str
    line: int
    why: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}" if self.line else f"{self.path}: {self.why}"


@dataclass(frozen=True)
class Fit:
    """The result of a change: the file's bytes, by how many lines each hunk moved, and the hunks that do not fit."""

    content: bytes | None
    offsets: tuple[int, ...] = ()
    misfits: tuple[Misfit, ...] = ()


def fit(change: FileChange, content: bytes | None) -> Fit:
    """Apply `change` to `content` (None: no such file); search the whole file for its hunks."""
    if change.creates != (content is None):
        why = "upstream has the file already" if change.creates else "upstream has no such file any more"
        return Fit(content, misfits=(Misfit(change.path, 0, why),))
    lines = BytesIO(content or b"").readlines()
    result, end = list[bytes](), 0
    offsets, misfits = list[int](), list[Misfit]()
    for hunk in change.hunks:
        line, why = _find(hunk, lines, end, moved=any(offsets))
        if line is None:
            misfits.append(Misfit(change.path, hunk.start + 1, why, _text(hunk)))
            continue
        offsets.append(line - hunk.start)
        result += [*lines[end:line], *hunk.after]
        end = line + len(hunk.before)
    result += lines[end:]
    if change.deletes and result and not misfits:
        why = "the patch deletes the file, but upstream's has lines that the patch does not remove"
        misfits.append(Misfit(change.path, 0, why))
    if misfits:
        return Fit(content, tuple(offsets), tuple(misfits))
    return Fit(None if change.deletes else b"".join(result), tuple(offsets))


def undone(change: FileChange) -> FileChange:
    """Return the reverse of `change`."""
    hunks, growth = list[Hunk](), 0
    for hunk in change.hunks:
        hunks.append(replace(hunk, start=hunk.start + growth, before=hunk.after, after=hunk.before))
        growth += len(hunk.after) - len(hunk.before)
    return replace(change, creates=change.deletes, deletes=change.creates, hunks=tuple(hunks))


def _find(hunk: Hunk, lines: list[bytes], end: int, *, moved: bool) -> tuple[int | None, str]:
    """Return the 0-based line where `hunk` fits, or None and the reason.

    `end` is where the previous hunk ends; `moved` tells whether an earlier hunk was moved.
    """
    candidates = _candidates(hunk, lines)
    if hunk.start in candidates and hunk.start >= end and (len(candidates) == 1 or not moved):
        return hunk.start, ""
    if not candidates:
        return None, "the text that it changes is not there"
    if len(candidates) > 1:
        numbers = ", ".join(str(line + 1) for line in candidates)
        return None, f"it fits in {len(candidates)} places: lines {numbers}"
    return (candidates[0], "") if candidates[0] >= end else (None, "its text stands before that of an earlier hunk")


def _candidates(hunk: Hunk, lines: list[bytes]) -> list[int]:
    size, last = len(hunk.before), len(lines) - len(hunk.before)
    fixed = hunk.start == 0 or not size  # at the beginning, or no text to look for
    starts = range(hunk.start, min(hunk.start, last) + 1) if fixed else range(last + 1)
    before = list(hunk.before)
    fitting = (start for start in starts if lines[start : start + size] == before)
    return [start for start in fitting if hunk.ends_in_context or start == last]


def _text(hunk: Hunk) -> str:
    """Return a hunk as its removed and added lines, without the context that both share at its ends."""
    before, after = list(hunk.before), list(hunk.after)
    while before and after and before[0] == after[0]:
        del before[0], after[0]
    while before and after and before[-1] == after[-1]:
        del before[-1], after[-1]
    diff = [f"-{line.decode().rstrip()}" for line in before] + [f"+{line.decode().rstrip()}" for line in after]
    omitted = [f"… {len(diff) - SHOWN} more lines"] if len(diff) > SHOWN else []
    return "\n".join([*diff[:SHOWN], *omitted])
