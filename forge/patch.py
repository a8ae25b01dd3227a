"""The patch queue on a tree: apply, reverse, inspect. All or nothing, fuzz 0, nothing done twice.

The work is split: `series` reads a queue, `hunks` computes new bytes in memory, `tree` moves a tree from one recorded
state to another so that a kill at any point leaves something that the next run finishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from forge.series import Queue
from forge.tree import Change, Content, Record, Tree, digest
from sparkforge.errors import PatchConflictError

__all__ = ["Inspection", "Queue", "Result", "State", "apply", "inspect", "patched", "reverse"]


class State(Enum):
    """How a tree stands to a queue."""

    CLEAN = "clean"  # no queue in it
    APPLIED = "applied"  # this queue, every file intact
    PARTIAL = "partial"  # a run was killed, or some files were put back: the next apply finishes
    MODIFIED = "modified"  # a file is neither as upstream nor as the queue left it
    OTHER_QUEUE = "other-queue"  # intact, but another version of the queue: the next apply replaces it


@dataclass(frozen=True)
class Inspection:
    """A tree's state, its record if it has one, and the files that were edited by hand."""

    state: State
    record: Record | None
    edited: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What a command did: `changed` is False if there was nothing to do. `files` are relative to the tree."""

    changed: bool
    patches: tuple[str, ...]
    files: tuple[str, ...]

    def __str__(self) -> str:
        counts = f"{len(self.patches)} patches, {len(self.files)} files"
        return f"{counts} changed" if self.changed else f"unchanged ({counts})"


def inspect(root: Path, queue: Queue) -> Inspection:
    """Judge the tree at `root` by the hashes of its recorded files; changes nothing."""
    return _inspect(Tree(root), queue)


def apply(root: Path, queue: Queue) -> Result:
    """Bring the tree at `root` to the state after `queue`, from upstream's state or from that of an earlier queue.

    Raises TreeModifiedError for a tree edited by hand, PatchConflictError if a patch does not fit exactly,
    PatchFormatError at a symbolic link and BusyError while another process patches; the tree is then as it was.
    """
    tree = Tree(root)
    if tree.settled and _inspect(tree, queue).state is State.APPLIED:
        return _result(queue, changed=False)
    with tree.locked():
        begun = tree.interrupted
        tree.finish()
        now = _inspect(tree, queue)
        if now.state is not State.APPLIED:
            _advance(tree, queue, now.record)
    return _result(queue, changed=begun or now.state is not State.APPLIED)


def reverse(root: Path) -> Result:
    """Put the tree at `root` back to upstream's bytes and remove the record. Needs no patch file.

    Raises TreeModifiedError for a tree edited by hand or whose stored originals are gone; it is then as it was.
    """
    tree = Tree(root)
    with tree.locked():
        tree.finish()
        record = tree.record
        if record is None:
            return Result(changed=False, patches=(), files=())
        tree.require_unedited(record.files)
        tree.move(_originals(tree, record), None)
    return Result(changed=True, patches=tuple(name for name, _ in record.patches), files=tuple(record.files))


def _inspect(tree: Tree, queue: Queue) -> Inspection:
    record = tree.record
    if tree.interrupted:
        return Inspection(State.PARTIAL, record)
    if record is None:
        return Inspection(State.CLEAN, None)
    if edited := tuple(tree.edited(record.files)):
        return Inspection(State.MODIFIED, record, edited)
    if any(digest(tree.read(path)) != change.after for path, change in record.files.items()):
        return Inspection(State.PARTIAL, record)
    return Inspection(State.APPLIED if record.queue_sha256 == queue.sha256 else State.OTHER_QUEUE, record)


def _advance(tree: Tree, queue: Queue, record: Record | None) -> None:
    """Move the tree from the queue that `record` tells of, or from none, to `queue`."""
    originals: dict[str, Content] = {}
    if record is not None:
        if record.upstream != queue.upstream:
            raise PatchConflictError(
                f"{tree.root} cannot take patches for {queue.upstream}", f"it holds a queue for {record.upstream}",
                "reverse that queue first (docs/patches.md)",
            )
        tree.require_unedited(record.files)
        originals = _originals(tree, record)
    originals |= {path: tree.read(path) for path in queue.paths if path not in originals}
    target = patched(originals, queue)
    files = {path: Change(digest(originals[path]), digest(target[path])) for path in queue.paths}
    patches = tuple((patch.name, patch.sha256) for patch in queue.patches)
    tree.move(target, Record(queue.upstream, queue.version, queue.sha256, patches, files))


def patched(originals: dict[str, Content], queue: Queue) -> dict[str, Content]:
    """Return `originals` (path → bytes) after every patch of `queue`, in memory. Raises PatchConflictError."""
    contents = dict(originals)
    for patch in queue.patches:
        for change in patch.changes:
            contents[change.path] = change.apply(contents[change.path])
    return contents


def _originals(tree: Tree, record: Record) -> dict[str, Content]:
    return {path: tree.original(path, change.before) for path, change in record.files.items()}


def _result(queue: Queue, *, changed: bool) -> Result:
    return Result(changed, tuple(patch.name for patch in queue.patches), queue.paths)
