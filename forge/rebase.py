"""Carry a queue over to another version of its upstream, into a new folder under `patches/`: whole or not at all.

What conflicts is merged three ways: upstream's new file, its old file before the patch, and the same after it. What the
merge leaves open goes into a work folder, to be edited; the same command again takes the edited files. It starts over
each time and remembers nothing else, so a kill anywhere costs nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from forge import gitdiff, pins, status, upstream
from forge.fit import Misfit, fit
from forge.manifest import remove
from forge.patch import patched
from forge.pins import Pins
from forge.series import Patch, Queue
from forge.status import Verdict
from forge.tree import Content
from forge.upstream import Reader
from sparkforge import paths
from sparkforge.console import say
from sparkforge.errors import PatchConflictError, UsageError
from sparkforge.files import fsync_directory, locked, write_atomic

Files = dict[str, Content]
MARKER = re.compile(rb"^(<{7}|\|{7}|>{7}) ", re.MULTILINE)
BLOCK = re.compile(rb"^<{7} .*?^>{7} [^\n]*$", re.MULTILINE | re.DOTALL)
SHOWN = 30  # lines of a conflict in a message


@dataclass(frozen=True)
class Carried:
    """One patch in the new queue: its bytes (None: dropped), and what was done with it."""

    name: str
    data: bytes | None
    told: str

    def __str__(self) -> str:
        return f"{'-' if self.data is None else '✓'} {self.name}: {self.told}"


@dataclass(frozen=True)
class Job:
    """A rebase: the queue and its folder, how to read the old and the new release, the new version, where to edit."""

    queue: Queue
    folder: Path
    old: Reader
    new: Reader
    version: str
    work: Path
    drop: frozenset[str] = frozenset()

    @property
    def target(self) -> Path:
        """The new queue's folder."""
        return self.folder.parent / f"{self.queue.upstream}-{self.version}"


def show(to: str, stack: str = "spark", drop: str = "") -> None:
    """Carry a stack's queue to the version `to` (`0.33.0`, `flashinfer-0.7.2.post1`); `drop` names patches by number.

    Raises PatchConflictError for what is left to a person, UsageError if that version has a queue already.
    """
    table = pins.load()
    made = prepare(table, stack, to, frozenset(drop.replace(",", " ").split()))
    try:
        carried = run(made)
    except PatchConflictError as error:
        raise PatchConflictError(error.what, error.why, f"{error.fix}; then again: {_again(to, stack, drop)}") from None
    for one in carried:
        say(str(one))
    if all(one.data is None for one in carried):
        say(f"{made.queue.upstream} {made.version} needs no patch: take `patches` out of its table in pins.toml")
        return
    say(f"wrote {made.target}; next: read its diffs, then name {made.target.name} and the new version in pins.toml")


def prepare(table: Pins, stack: str, to: str, drop: frozenset[str], patches: Path = status.PATCHES) -> Job:
    """Find the queue, the old and the new release. Raises PinError, UsageError, and the errors of `upstream`."""
    component, queue, version = status.chosen(table, stack, to, patches)
    numbers = {patch.name[:4] for patch in queue.patches}
    if strangers := sorted(drop - numbers):
        raise UsageError(
            f"cannot drop {', '.join(strangers)}", f"the queue has {', '.join(sorted(numbers))}", "./inv patch.status"
        )
    old, new = (upstream.release(table, component, one) for one in (queue.version, version))
    folder = patches / f"{queue.upstream}-{queue.version}"
    upstream.reader(new, status.paths_of(queue))  # all at once; a file that only an edit adds is read when asked for
    return Job(queue, folder, upstream.reader(old, queue.paths), lambda path: upstream.reader(new, [path])(path),
               version, paths.state() / "rebase" / f"{queue.upstream}-{version}", drop)  # fmt: skip


def run(job: Job) -> list[Carried]:
    """Carry every patch over and write the new queue, unless all of it is dropped. Raises as `show` does."""
    with locked(job.work.with_name(f".{job.work.name}.lock"), f"write {job.target.name}"):
        for stale in (*job.folder.parent.glob(".rebase.*.tmp"), *job.work.glob(".*.tmp")):
            remove(stale)
        if job.target.exists():
            raise UsageError(
                f"cannot carry {job.folder.name} over", f"{job.target} is there already",
                f"to do it again: rm -r {job.target}; to look at it: ./inv patch.status --against {job.version}",
            )  # fmt: skip
        final: Files = {}
        carried = list(_carry(job, final))
        if any(one.data is not None for one in carried):
            _write(job, carried, final)
        remove(job.work)
    return carried


def _carry(job: Job, now: Files) -> Iterator[Carried]:
    """Carry patch by patch; `now` is filled with the new tree's files after all of them."""
    pristine: Files = {path: job.new(path) for path in status.paths_of(job.queue)}
    now |= pristine
    before: Files = {path: job.old(path) for path in job.queue.paths}
    for patch in job.queue.patches:
        after = before | {change.path: change.apply(before[change.path]) for change in patch.changes}
        if patch.name[:4] in job.drop:
            yield Carried(patch.name, None, "dropped, as asked")
        else:
            judgement, changed = status.judge_one(patch, pristine, now)
            if judgement.verdict is Verdict.CONFLICTS:
                told, changed = _merged(job, patch, before, after, now)
                yield _rewritten(job, patch, now, changed, told, renew=True)
            elif judgement.verdict is Verdict.UPSTREAM:
                yield Carried(patch.name, None, f"dropped, already upstream: {judgement.evidence}")
            elif judgement.verdict is Verdict.OFFSET:
                yield _rewritten(job, patch, now, changed, f"moved: {judgement.evidence}")
            else:
                yield Carried(patch.name, (job.folder / patch.name).read_bytes(), "applies as it is")
            now |= changed
        before = after


def _rewritten(job: Job, patch: Patch, now: Files, changed: Files, told: str, *, renew: bool = False) -> Carried:
    """Return `patch` with its header and the diff from `now` to `changed`; `renew` its date."""
    body = gitdiff.diff({path: now.get(path) for path in changed}, changed)
    if not body:
        return Carried(patch.name, None, "dropped: after your edit it changes nothing")
    head = (job.folder / patch.name).read_bytes().partition(b"\n---\n")[0]
    if renew:
        today = datetime.now().astimezone().date().isoformat()
        head = re.sub(rb"(?m)^Last-Update: .*$", f"Last-Update: {today}".encode(), head)
    return Carried(patch.name, head + b"\n---\n" + body, told)


def _merged(job: Job, patch: Patch, before: Files, after: Files, now: Files) -> tuple[str, Files]:
    """Merge a conflicting patch, or take it as a person edited it; return what was done and the files it changes."""
    merged, conflicts = dict[str, bytes](), list[Misfit]()
    result: Files = {}
    labels = (f"{job.queue.upstream} {job.version}", f"{job.queue.upstream} {job.queue.version}", patch.name)
    for change in patch.changes:
        path, ours = change.path, now[change.path]
        fitting = fit(change, ours)
        if not fitting.misfits:
            result[path] = fitting.content
            merged[path] = fitting.content or b""
            continue
        text, count = gitdiff.merge(ours or b"", before[path] or b"", after[path] or b"", labels)
        merged[path] = result[path] = text
        conflicts += _blocks(path, text)
        if not count and (ours is None or after[path] is None):  # a merge with nothing says nothing
            conflicts += [misfit for misfit in fitting.misfits if not misfit.line] or list(fitting.misfits)
    if not conflicts:
        return "merged three ways without a conflict; read it before you trust it", result
    place = job.work / f"{patch.name.removesuffix('.patch')}-{_key(merged, now)}"
    if not place.exists():
        _lay_out(place, merged, {conflict.path for conflict in conflicts})
    edited = _edited(job, patch, place, conflicts)
    now |= {path: job.new(path) for path in edited if path not in now}  # a person may change other files, too
    return "merged by hand", edited


def _edited(job: Job, patch: Patch, place: Path, conflicts: list[Misfit]) -> Files:
    """Return the files that a person left in `place`. Raises PatchConflictError while one has conflict markers."""
    files = sorted(file for file in place.rglob("*") if file.is_file())
    contents = {file.relative_to(place).as_posix(): file.read_bytes() for file in files}
    if open_ := [path for path, content in contents.items() if MARKER.search(content)]:
        for conflict in conflicts:
            say("\n    ".join([f"  {patch.name[:4]} {conflict}", *conflict.text.splitlines()]))
        raise PatchConflictError(
            f"{patch.name} does not apply to {job.queue.upstream} {job.version}",
            f"{len(conflicts)} conflicts are left in {', '.join(open_)}",
            f"edit the files under {place} (delete one to leave upstream's as it is, or --drop {patch.name[:4]})",
        )
    return dict(contents)


def _lay_out(place: Path, files: dict[str, bytes], asked: set[str]) -> None:
    """Write the files to look at, all of them or none; those `asked` about have at least one marker."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    for path, content in files.items():
        if path in asked and not MARKER.search(content):
            note = f"<<<<<<< delete this line when the file is right; upstream may have moved {path}\n".encode()
            content = note + content  # noqa: PLW2901
        write_atomic(temporary / path, content)
    temporary.rename(place)
    fsync_directory(place.parent)


def _key(merged: dict[str, bytes], now: Files) -> str:
    """Name what a person is asked to edit, so that edits of something else are never taken for it."""
    state = hashlib.sha256()
    for path, content in sorted(merged.items()):
        for part in (path.encode(), content, now[path] or b""):
            state.update(len(part).to_bytes(8) + part)
    return state.hexdigest()[:8]


def _blocks(path: str, text: bytes) -> Iterator[Misfit]:
    """Yield each conflict in a merged text, with the line where it begins."""
    for found in BLOCK.finditer(text):
        lines = found[0].decode(errors="replace").splitlines()
        more = [f"… {len(lines) - SHOWN} more lines"] if len(lines) > SHOWN else []
        line = text.count(b"\n", 0, found.start()) + 1
        yield Misfit(path, line, "both changed the same lines", "\n".join([*lines[:SHOWN], *more]))


def _write(job: Job, carried: list[Carried], final: Files) -> None:
    """Write the new queue beside its place, prove that it makes `final` of the new release, and rename it there."""
    temporary = job.folder.parent / f".rebase.{os.getpid()}.tmp"
    folder = temporary / job.target.name
    try:
        kept = [one for one in carried if one.data is not None]
        for one in kept:
            write_atomic(folder / one.name, one.data or b"")
        head = [
            f"# Applied in this order to {job.queue.upstream} {job.version}, each with -p1 and fuzz 0.",
            f"# Carried over from {job.folder.name}:",
            *(f"#   {one.name}: {one.told}" for one in carried),
        ]
        write_atomic(folder / "series", "\n".join([*head, *(one.name for one in kept)]) + "\n")
        queue = Queue.load(folder)
        if patched({path: job.new(path) for path in queue.paths}, queue) != {path: final[path] for path in queue.paths}:
            raise PatchConflictError(
                f"{job.target.name} was not written", "the carried patches do not make what was merged",
                "report this with the queue and the version",
            )  # fmt: skip
        folder.rename(job.target)
        fsync_directory(job.target.parent)
    finally:
        remove(temporary)


def _again(to: str, stack: str, drop: str) -> str:
    more = (f" --stack {stack}" if stack != "spark" else "") + (f" --drop {drop}" if drop else "")
    return f"./inv patch.rebase --to {to}{more}"
