"""One patch's changes to files: parsed strictly and applied exactly, without git.

A user's machine has Python and may have no git (docs/decisions/0002-patches-without-git.md). The rule is that of
`git apply` without its search for another place: every context line and removed line must be equal, byte for byte, at
the line that the hunk names, and a hunk that ends without context must end at the end of the file.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import PatchedFile, PatchSet

from sparkforge.core.errors import PatchError
from sparkforge.sources.archive import unharmful

Content: TypeAlias = bytes | None  # None: there is no such file
NOWHERE = "/dev/null"
RESERVED = ".sparkforge"  # prefix of our own records in a tree; no patch may touch them
# The lines that may come before a file's hunks. All others are refused; errors name the known kinds.
HUNK_LINE = re.compile(r"^@@ .*$", re.MULTILINE)
INFO_LINE = re.compile(r"diff --git \S+ \S+|index [0-9a-f]+\.\.[0-9a-f]+( 100644)?|(new|deleted) file mode 100644")
REFUSED_LINES = (
    (re.compile(r"^(GIT binary patch|Binary files? )", re.MULTILINE), "holds a binary change"),
    (re.compile(r"^(rename|copy) (from|to) ", re.MULTILINE), "renames or copies a file"),
    (re.compile(r"^(old|new) mode \d", re.MULTILINE), "changes a file's mode"),
    (re.compile(r"^(new|deleted) file mode (?!100644$)", re.MULTILINE), "touches a link or a program, not a 0644 file"),
)


@dataclass(frozen=True)
class Hunk:
    """A block of changed lines; `start` is the 0-based index of its first line in the file before the change."""

    start: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    ends_in_context: bool


@dataclass(frozen=True)
class FileChange:
    """The change of one patch to the file at `path`, relative to the tree."""

    patch: str
    path: str
    creates: bool
    deletes: bool
    hunks: tuple[Hunk, ...]

    def apply(self, content: Content) -> Content:
        """Return the file's bytes after this change; None stands for a missing file, before or after.

        Raises PatchError, naming the patch and the place, unless everything matches exactly.
        """
        if self.creates != (content is None):
            raise self._conflict("the file is there already" if self.creates else "the file is missing")
        lines = BytesIO(content or b"").readlines()  # splits only at \n, as git does
        result, previous = list[bytes](), 0
        for number, hunk in enumerate(self.hunks):
            if self.creates and number:  # like git: after the first hunk the file is no longer empty
                raise self._conflict("the patch creates the file more than once")
            end = hunk.start + len(hunk.before)
            if tuple(lines[hunk.start : end]) != hunk.before or hunk.start < previous:
                raise self._conflict(f"the text at line {hunk.start + 1} is not the one that the patch changes")
            if not hunk.ends_in_context and end != len(lines):
                raise self._conflict(f"the hunk at line {hunk.start + 1} ends without context inside the file")
            result += [*lines[previous : hunk.start], *hunk.after]
            previous = end
        result += lines[previous:]
        if self.deletes and result:
            raise self._conflict("the patch deletes the file, and the file has lines that are not in the patch")
        return None if self.deletes else b"".join(result)

    def _conflict(self, why: str) -> PatchError:
        page = "docs/concepts/patch-queue.md"
        fix = f"again   # first restore the pinned version of the tree; for another version: {page}"
        return PatchError(f"{self.patch} does not apply to {self.path}", why, fix, code="patch.conflict")


def read_files(tree: Path, names: Iterable[str]) -> dict[str, Content]:
    """Return the bytes of the files `names` under `tree`."""
    return {name: (tree / name).read_bytes() if (tree / name).is_file() else None for name in names}


def digest(content: Content) -> str | None:
    """Return the hex sha256 of a file's bytes; None for a missing file."""
    return None if content is None else hashlib.sha256(content).hexdigest()


def refuse_folders(patch: str, files: Iterable[str]) -> None:
    """Raise PatchError if one of `files` is also a folder of another; `patch` is the name for messages."""
    names = set(files)
    for name in sorted(names):
        if parent := next((str(parent) for parent in PurePosixPath(name).parents if str(parent) in names), ""):
            raise refuse(patch, f"makes a file of {parent}, which is the folder of {name}")


def parse(patch: str, diff: str) -> tuple[FileChange, ...]:
    """Read a unified diff of text files with a/ and b/ prefixes; `patch` is the file's name. Raises PatchError."""
    if not diff.endswith("\n"):
        raise refuse(patch, "is cut off: its last line does not end")
    for pattern, reason in REFUSED_LINES:
        if pattern.search(diff):
            raise refuse(patch, reason)
    try:
        files = PatchSet(diff)
    except (UnidiffParseError, ValueError) as error:  # ValueError: a number of more than 4,300 digits
        raise refuse(patch, f"cannot be parsed: {' '.join(str(error).split())}") from error
    changes = tuple(_file_change(patch, file) for file in files)
    if not changes:
        raise refuse(patch, "changes no file")
    if HUNK_LINE.sub("@@", str(files)) != HUNK_LINE.sub("@@", diff):  # the parsed hunks must be the whole diff
        raise refuse(patch, "holds lines that belong to no file or hunk, or gives one file two names")
    if len({change.path for change in changes}) != len(changes):
        raise refuse(patch, "names a file twice")
    return changes


def refuse(patch: str, reason: str) -> PatchError:
    """Build the error for a patch that may not be used; `reason` continues the patch's name."""
    fix = "git checkout -- patches   # restores it; or write it again with git diff"
    return PatchError(f"{patch} cannot be used", f"it {reason}", fix, code="patch.format")


def _file_change(patch: str, file: PatchedFile) -> FileChange:
    creates, deletes = file.source_file == NOWHERE, file.target_file == NOWHERE
    paths = set[str]() if creates else {_path(patch, file.source_file, "a/")}
    paths |= set() if deletes else {_path(patch, file.target_file, "b/")}
    if len(paths) != 1:
        raise refuse(patch, f"gives one file two names: {file.source_file} and {file.target_file}")
    path = paths.pop()
    for line in file.patch_info or ():
        if not INFO_LINE.fullmatch(line.rstrip("\n")):
            raise refuse(patch, f"holds a line that belongs to no hunk: {line.strip()!r}")
        # `git diff --no-index` writes one prefix twice for a new or a deleted file.
        if line.startswith("diff --git ") and {name[2:] for name in line.split()[2:]} != {path}:
            raise refuse(patch, f"gives one file two names: {line.strip()} and {path}")
    if not file and not (creates or deletes):
        raise refuse(patch, f"changes nothing in {path}")
    return FileChange(patch, path, creates, deletes, tuple(_hunk(patch, hunk) for hunk in file))


def _path(patch: str, name: str, prefix: str) -> str:
    path = name.removeprefix(prefix)
    parts = path.split("/")
    if path == name:
        raise refuse(patch, f"names {name}, which does not begin with {prefix}")
    if PurePosixPath(path).is_absolute() or any(part in ("", ".", "..") for part in parts):
        raise refuse(patch, f"names {name}, which points outside the tree or is not in its shortest form")
    if name.startswith('"') or not unharmful(path) or parts[0].startswith(RESERVED):
        raise refuse(patch, f"names {name}, which is not a plain file name or belongs to Sparkforge")
    return path


def _hunk(patch: str, parsed: ParsedHunk) -> Hunk:
    before, after = list[bytes](), list[bytes]()
    sides = {" ": (before, after), "-": (before,), "+": (after,)}
    last = ""
    for line in parsed:
        if line.line_type == "\\":  # "\ No newline at end of file" is about the line above it
            if not line.value.startswith(" "):
                raise refuse(patch, f"holds a line that belongs to no hunk: {line.value.strip()!r}")
            if not last:
                raise refuse(patch, f"has a remark before the first line of the hunk at line {parsed.source_start}")
            for side in sides[last]:
                side[-1] = side[-1].removesuffix(b"\n")
        elif line.line_type in sides:
            last = line.line_type
            for side in sides[last]:
                side.append(line.value.encode())
        else:
            raise refuse(patch, f"holds an empty line after the hunk at line {parsed.source_start}")
    start = parsed.source_start - 1 if before else parsed.source_start  # "-N,0" means after line N
    return Hunk(start, tuple(before), tuple(after), ends_in_context=last == " ")
