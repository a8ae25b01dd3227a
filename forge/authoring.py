"""Write a new patch: edit in a scratch copy of the patched tree, then have the diff headed, checked and queued."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from forge import archive, fetch, gitdiff, pins, status, upstream
from forge.manifest import remove
from forge.patch import patched
from forge.pins import Pins
from forge.series import FIELDS, PATCH_NAME, Patch, Queue
from forge.upstream import Release
from sparkforge import paths
from sparkforge.console import say
from sparkforge.errors import TreeModifiedError, UsageError
from sparkforge.files import fsync_directory, locked, write_atomic

BASE = "sparkforge-base"  # the scratch copy's tag; commits made on top of it all end up in the one patch
IDENTITY = ("-c", "user.name=Sparkforge", "-c", "user.email=sparkforge@localhost", "-c", "commit.gpgsign=false")


@dataclass(frozen=True)
class Draft:
    """A patch being written: for which queue, against which release, and where it is edited."""

    name: str
    folder: Path
    queue: Queue
    release: Release

    @property
    def place(self) -> Path:
        """The scratch copy, a git repository."""
        return paths.state() / "patch" / self.folder.name / self.name

    @property
    def file_name(self) -> str:
        """The patch's file name, one number above the last in the queue."""
        return f"{int(self.queue.patches[-1].name[:4]) + 1:04}-{self.name}.patch"


def show(name: str, *, stack: str = "spark", of: str = "vllm", finish: bool = False, **fields: str) -> None:
    """Begin the patch `name` for a stack's upstream `of`, or `finish` it with the DEP-3 `fields`.

    `fields` are description, bug, drop_when, and if wanted origin and forwarded; several lines are joined by ` ; `
    in drop_when. Raises UsageError for what is missing or was not changed, and the errors of `begin` and `end`.
    """
    made = draft(pins.load(), name, stack, of)
    if not finish:
        begin(made)
        say(f"edit under {made.place} (git diff shows your changes), then")
        say(f"./inv patch.new {name} --finish --description … --bug URL --drop-when 'contains PATH TEXT'")
        return
    file = end(made, fields)
    say(f"wrote {file} and named it in series; next: ./inv patch.status, then ./inv test")


def draft(table: Pins, name: str, stack: str, of: str, patches: Path = status.PATCHES) -> Draft:
    """Find what the patch `name` is for. Raises UsageError for a bad name or one that the queue has already."""
    if not PATCH_NAME.fullmatch(f"0001-{name}.patch"):
        raise UsageError(f"{name!r} is no name for a patch", "it takes small letters, digits and single hyphens",
                         "name it by what it does, such as guard-option-on-old-torch")  # fmt: skip
    for folder in patches.glob(f"{of}-*"):
        _sweep(folder, name)
    component, queue, _ = status.chosen(table, stack, f"{of}-0", patches)
    folder = patches / f"{queue.upstream}-{queue.version}"
    if present := [patch.name for patch in queue.patches if patch.name[5:] == f"{name}.patch"]:
        raise UsageError(f"{present[0]} is in the queue already", f"see {folder}", "choose another name")
    return Draft(name, folder, queue, upstream.release(table, component, queue.version))


def begin(made: Draft) -> Path:
    """Make the scratch copy unless it is there: the release with the queue applied, as a git repository.

    Raises the errors of `fetch` and `archive`, PatchConflictError, and CommandError without git.
    """
    with locked(made.place.with_name(f".{made.name}.lock"), f"make {made.place}"):
        for stale in made.place.parent.glob(f".{made.name}.*.tmp"):
            remove(stale)
        if not made.place.exists():
            file = fetch.fetch(made.release.package, made.release.filename, made.release.sha256)
            archive.require_room(file, made.place)
            temporary = made.place.with_name(f".{made.name}.{os.getpid()}.tmp")
            archive.unpack(file, temporary, top=made.release.top)
            _make_patched(temporary, made.queue)
            _make_repository(temporary, made.folder.name)
            temporary.rename(made.place)
            fsync_directory(made.place.parent)
    return made.place


def end(made: Draft, fields: dict[str, str]) -> Path:
    """Write the patch into its queue and remove the scratch copy; return the patch file.

    Raises UsageError if nothing was edited or a field is missing, PatchFormatError for what a patch may not hold,
    PatchConflictError if the queue has changed so that it no longer fits; the queue is then as it was.
    """
    if not made.place.is_dir():
        raise UsageError(
            f"{made.name} was not begun", f"there is no {made.place}", f"./inv patch.new {made.name} makes it"
        )
    data = header(fields) + _diff(made)
    with tempfile.TemporaryDirectory(prefix="sparkforge-") as name:
        candidate = Path(name) / made.file_name
        candidate.write_bytes(data)
        _require_right(made, Patch.load(candidate))
    series = made.folder / "series"
    text = series.read_text(encoding="utf-8")
    # Between these two the queue is refused by name ("not in `series`"); the same command again then cleans up.
    write_atomic(made.folder / made.file_name, data)
    write_atomic(series, text + ("" if text.endswith("\n") else "\n") + made.file_name + "\n")
    remove(made.place)
    return made.folder / made.file_name


def header(fields: dict[str, str]) -> bytes:
    """Return a DEP-3 header with its closing line. Raises UsageError naming the flags of missing fields."""
    today = datetime.now().astimezone().date().isoformat()
    given = {"Origin": "vendor, Sparkforge", "Forwarded": "no", "Last-Update": today}
    given |= {key.replace("_", "-").capitalize(): value.strip() for key, value in fields.items() if value.strip()}
    if missing := [name for name in FIELDS if name not in given]:
        flags = " ".join(f"--{name.lower()} …" for name in missing)
        raise UsageError("the patch has no header", f"it lacks {', '.join(missing)}", f"add {flags}")
    given["Drop-when"] = "\n".join(part.strip() for part in given["Drop-when"].split(" ; "))
    lines = [f"{name}: " + "\n ".join(given[name].splitlines()) for name in FIELDS]
    return ("\n".join(lines) + "\n---\n").encode()


def _diff(made: Draft) -> bytes:
    with tempfile.TemporaryDirectory(prefix="sparkforge-") as name:
        output = Path(name) / "diff"
        gitdiff.git(made.place, "add", "--all")
        gitdiff.git(made.place, "diff", "--cached", *gitdiff.PLAIN, f"--output={output}", BASE)
        body = output.read_bytes()
    if not body:
        raise UsageError(
            f"{made.name} changes nothing", f"{made.place} is as it was made",
            f"edit files in it, then the same command again; to give it up: rm -r {shlex.quote(str(made.place))}",
        )  # fmt: skip
    return body


def _require_right(made: Draft, patch: Patch) -> None:
    """Raise unless `patch` makes the edited bytes of the queue's tree, and its Drop-when does not hold yet."""
    wanted = {*made.queue.paths, *(c.path for c in patch.changes), *(c.path for c in patch.drop_when)}
    read = upstream.reader(made.release, wanted)
    if held := [condition for condition in patch.drop_when if condition.holds_for(read(condition.path))]:
        raise UsageError("the Drop-when is of no use", f"it holds on {made.release.filename} already: {held[0]}",
                         "name a text that upstream will have, or lack, once it needs the patch no more")  # fmt: skip
    contents = patched({path: read(path) for path in wanted}, made.queue)
    for change in patch.changes:
        file = made.place / change.path
        if change.apply(contents[change.path]) != (file.read_bytes() if file.is_file() else None):
            raise TreeModifiedError(f"{made.file_name} was not written", f"it does not make {file} of the queue's tree",
                                    "the queue has changed since: begin again and carry your edits over")  # fmt: skip


def _make_patched(tree: Path, queue: Queue) -> None:
    """Write the queue's result into a fresh tree, without a record: it is there to be edited."""
    contents = {path: (tree / path).read_bytes() if (tree / path).is_file() else None for path in queue.paths}
    for path, content in patched(contents, queue).items():
        if content is None:
            (tree / path).unlink()
        else:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(content)


def _make_repository(tree: Path, name: str) -> None:
    steps: Iterable[tuple[str, ...]] = (
        ("init", "--quiet"),
        ("add", "--all", "--force"),
        (*IDENTITY, "commit", "--quiet", f"--message={name} and its queue"),
        ("tag", BASE),
    )
    for words in steps:
        gitdiff.git(tree, *words)
    with (tree / ".git/info/exclude").open("a", encoding="utf-8") as file:
        file.write("__pycache__/\n*.pyc\n")


def _sweep(folder: Path, name: str) -> None:
    """Remove what a killed `end` of this very patch left in the queue: a patch that `series` does not name."""
    series = folder / "series"
    named = series.read_text(encoding="utf-8").split() if series.is_file() else []
    for file in folder.glob(f"*-{name}.patch"):
        if re.fullmatch(rf"\d{{4}}-{re.escape(name)}\.patch", file.name) and file.name not in named:
            file.unlink()
    for pattern in (f".????-{name}.patch.*.tmp", ".series.*.tmp"):
        for file in folder.glob(pattern):
            file.unlink()
