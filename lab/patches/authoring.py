"""Write a new patch from a commit or the edits of a checkout, check it, and add it to the queue."""

from __future__ import annotations

import os
import shlex
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lab.patches import checkout, repository, status, upstream
from lab.patches.upstream import Release
from sparkforge import pins
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.errors import PatchError, UsageError
from sparkforge.core.files import fsync_directory, locked, write_atomic
from sparkforge.core.git import git
from sparkforge.core.manifest import remove
from sparkforge.patching.hunks import Content, read_files
from sparkforge.patching.series import FIELDS, PATCH_NAME, PATCHES, Patch, Queue
from sparkforge.pins import Pins
from sparkforge.sources import archive, fetch

PENDING = ".new"  # suffix of a patch's hidden temporary name, until `series` names the patch


@dataclass(frozen=True)
class PatchDraft:
    """A patch being written: its queue, and the release that it is for."""

    name: str
    folder: Path
    queue: Queue
    release: Release

    @property
    def scratch(self) -> Path:
        """The scratch copy, a git repository."""
        return paths.state() / "patch" / self.folder.name / self.name

    @property
    def file_name(self) -> str:
        """The patch's file name, one number above the last in the queue."""
        return f"{int(self.queue.patches[-1].name[:4]) + 1:04}-{self.name}.patch"


@dataclass(frozen=True)
class PatchOrder:
    """A patch `name` to write for a stack's upstream `of`, from the checkout `source` or one of its commits.

    Without `source` a scratch copy is made to edit; with `finish` the patch is written from the scratch copy, which is
    then removed. `fields` are description, bug, drop_when, and optionally origin and forwarded; several conditions in
    drop_when are joined by ` ; `.
    """

    name: str
    fields: dict[str, str]
    stack: str
    of: str = "vllm"
    source: str = ""
    commit: str = ""
    finish: bool = False


def new_patch(order: PatchOrder, table: Pins | None = None, patches: Path = PATCHES) -> None:
    """Write a patch into the queues under `patches`, or begin it.

    Raises UsageError for missing fields or edits, and the errors of `begin_patch` and `write_patch`.
    """
    name, source, fields = order.name, order.source, order.fields
    if (source and order.finish) or (order.commit and not source):
        why = "--commit is for --from DIR, --finish for the scratch copy"
        raise UsageError(
            "these options do not go together",
            why,
            f".venv/bin/python -m lab.patches new {name} --from DIR [--commit ID]",
        )
    with locked(paths.state() / "patch/.lock", "write a patch"):
        draft = prepare(table or pins.load(), name, order.stack, order.of, patches)
        if not (source or order.finish):
            begin_patch(draft)
            say(f"edit under {draft.scratch} (git diff shows your changes), then")
            finish_command = f".venv/bin/python -m lab.patches new {name} --finish"
            say(f"{finish_command} --description … --bug URL --drop-when 'contains PATH TEXT'")
            return
        file = write_patch(draft, Path(source), fields, order.commit) if source else finish_patch(draft, fields)
        say(f"wrote {file} and named it in series; next: .venv/bin/python -m lab.patches status, then ./inv test")


def prepare(table: Pins, name: str, stack: str, of: str, patches: Path = PATCHES) -> PatchDraft:
    """Find the queue and the release of the patch `name`, and remove the remains of a killed run.

    Raises UsageError for an invalid name or a name in use.
    """
    if not PATCH_NAME.fullmatch(f"0001-{name}.patch"):
        raise UsageError(f"{name!r} is no name for a patch", "it takes small letters, digits and single hyphens",
                         "name it by what it does, such as guard-option-on-old-torch")  # fmt: skip
    for pending in patches.glob(f"*/.????-*.patch{PENDING}"):
        _take_back(pending)
    component, queue, _ = status.chosen(table, stack, f"{of}-0", patches)
    folder = patches / queue.name
    draft = PatchDraft(name, folder, queue, upstream.release(table, component, queue.version))
    if present := [patch.name for patch in queue.patches if patch.name[5:] == f"{name}.patch"]:
        undo = f"; if it is that patch: rm -r {shlex.quote(str(draft.scratch))}" if draft.scratch.is_dir() else ""
        raise UsageError(f"{present[0]} is in the queue already", f"see {folder}", f"choose another name{undo}")
    return draft


def begin_patch(draft: PatchDraft) -> Path:
    """Make the scratch copy unless it exists: the release as a git repository, with the queue as commits.

    Raises the errors of `fetch` and `archive`, PatchError, and ProcessError without git.
    """
    for stale in draft.scratch.parent.glob(f".{draft.name}.*.tmp"):
        remove(stale)
    if not draft.scratch.exists():
        file = fetch.fetch(draft.release.package, draft.release.filename, draft.release.sha256, draft.release.size)
        archive.require_space_for(file, draft.scratch)
        temporary = draft.scratch.with_name(f".{draft.name}.{os.getpid()}.tmp")
        archive.unpack(file, temporary, top=draft.release.top)
        repository.make_repository(temporary, {}, str(draft.release))
        checkout.apply_mailbox(temporary, draft.queue)
        temporary.rename(draft.scratch)
        fsync_directory(draft.scratch.parent)
    return draft.scratch


def finish_patch(draft: PatchDraft, fields: dict[str, str]) -> Path:
    """Write the patch from the scratch copy and remove the copy; return the patch file. Raises as `write_patch`."""
    if not draft.scratch.is_dir():
        raise UsageError(
            f"{draft.name} was not begun",
            f"there is no {draft.scratch}",
            f".venv/bin/python -m lab.patches new {draft.name} makes it",
        )
    git(draft.scratch, "add", "--all")
    file = write_patch(draft, draft.scratch, fields)
    remove(draft.scratch)
    return file


def write_patch(draft: PatchDraft, tree: Path, fields: dict[str, str], commit: str = "") -> Path:
    """Write the patch into its queue from a checkout that holds the queue; return the patch file.

    The patch is one `commit`, or everything since the queue's last commit, uncommitted edits included. A commit's
    message is the description unless `fields` has one. Raises UsageError if nothing was edited or a
    field is missing, PatchError for changes that a patch may not contain or for a checkout of another queue; nothing is
    written then.
    """
    if not checkout.holds_queue(tree, draft.queue):
        fix = f".venv/bin/python -m lab.patches into {shlex.quote(str(tree))}, then carry your edits over"
        raise UsageError(f"{tree} does not hold the queue {draft.folder.name}", "it has none of its commits", fix)
    if commit:
        (single,) = checkout.commits(tree, commit, "--max-count=1")
        diff = repository.diff(tree, f"{single.id}^", single.id)
        fields = {"description": single.message, **fields}
    else:
        diff = repository.diff(tree, checkout.queue_commits(tree, draft.queue.upstream)[-1].id)
        if unknown := [path for state, path in checkout.changes(tree) if state == "??"]:
            say(f"not in the patch, since git does not know them (git add makes it): {', '.join(unknown)}")
    head = header(fields)
    if not diff:
        undo = f"; to give it up: rm -r {shlex.quote(str(tree))}" if tree == draft.scratch else ""
        raise UsageError(f"{draft.name} changes nothing", f"{tree} has no edits beyond the queue",
                         f"edit files in it, then the same command again{undo}")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="sparkforge-") as folder:
        candidate = Path(folder) / draft.file_name
        candidate.write_bytes(head + diff)
        contents = _require_right(draft, Patch.load(candidate))
    if not commit and (other := [path for path, data in read_files(tree, contents).items() if data != contents[path]]):
        raise PatchError(f"{draft.file_name} was not written", f"git's diff does not make {', '.join(other)}",
                         f"see `git -C {shlex.quote(str(tree))} diff`", code="patch.conflict")  # fmt: skip
    file, series = draft.folder / draft.file_name, draft.folder / "series"
    pending = file.with_name(f".{file.name}{PENDING}")
    names = series.read_text(encoding="utf-8")
    write_atomic(pending, head + diff)
    write_atomic(series, names + ("" if names.endswith("\n") else "\n") + file.name + "\n")
    pending.rename(file)  # if a run is killed before this line, the next run removes the patch; see `_take_back`
    fsync_directory(draft.folder)
    return file


def header(fields: dict[str, str]) -> bytes:
    """Return a DEP-3 header with its closing line. Raises UsageError naming the flags of missing fields."""
    today = datetime.now().astimezone().date().isoformat()
    values = {"Origin": "vendor, Sparkforge", "Forwarded": "no", "Last-Update": today}
    values |= {key.replace("_", "-").capitalize(): value.strip() for key, value in fields.items() if value.strip()}
    if missing := [name for name in FIELDS if name not in values]:
        flags = " ".join(f"--{name.lower()} …" for name in missing)
        raise UsageError("the patch has no header", f"it lacks {', '.join(missing)}", f"add {flags}")
    values["Drop-when"] = "\n".join(part.strip() for part in values["Drop-when"].split(" ; "))
    lines = [f"{name}: " + "\n ".join(line or "." for line in values[name].splitlines()) for name in FIELDS]
    return ("\n".join(lines) + "\n---\n").encode()


def _require_right(draft: PatchDraft, patch: Patch) -> dict[str, Content]:
    """Return the files after `patch`; raise unless it applies exactly after the queue and its Drop-when is not true."""
    names = {*draft.queue.paths, *(c.path for c in patch.changes), *(c.path for c in patch.drop_when)}
    read = upstream.reader(draft.release, names)
    if fulfilled := [condition for condition in patch.drop_when if condition.holds_for(read(condition.path))]:
        raise UsageError("the Drop-when is of no use", f"it holds on {draft.release.filename} already: {fulfilled[0]}",
                         "name a text that upstream will have, or lack, once it needs the patch no more")  # fmt: skip
    contents = draft.queue.apply({path: read(path) for path in names})
    try:
        return {change.path: change.apply(contents[change.path]) for change in patch.changes}
    except PatchError as error:
        raise PatchError(
            f"{draft.file_name} was not written", f"it does not apply after {draft.folder.name}: {error.why}",
            "make it the first commit after the queue (git rebase -i), without other edits", code="patch.conflict",
        ) from error  # fmt: skip


def _take_back(pending: Path) -> None:
    """Remove the temporary file of a killed run, and the patch's name from `series` if it is there."""
    series, name = pending.with_name("series"), pending.name.removeprefix(".").removesuffix(PENDING)
    if not pending.with_name(name).exists():
        lines = series.read_text(encoding="utf-8").splitlines(keepends=True)
        write_atomic(series, "".join(line for line in lines if line.strip() != name))
    pending.unlink()
