"""The patch queue on a tree: apply, reverse, inspect. All or nothing, fuzz 0, nothing done twice.

The work is split: `series` reads a queue, `hunks` computes new bytes in memory, `tree` moves a tree from one recorded
state to another so that a kill at any point leaves something that the next run finishes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from forge.series import Queue
from forge.tree import Change, Content, Record, Tree, digest, upstreams
from sparkforge.errors import TreeModifiedError

__all__ = ["Inspection", "Queue", "Result", "State", "apply", "inspect", "originals", "patched", "reverse"]


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
    return _inspect(Tree(root, queue.upstream), queue.for_tree(root))


def apply(root: Path, queue: Queue, *, dry_run: bool = False) -> Result:
    """Bring the tree at `root` to the state after `queue`, from upstream's state or from that of an earlier queue.

    With `dry_run` nothing is written, and the result says what would be. Raises TreeModifiedError for a tree edited by
    hand, PatchConflictError if a patch does not fit exactly, PatchFormatError at a symbolic link and BusyError while
    another process patches; the tree is then as it was.
    """
    tree, queue = Tree(root, queue.upstream), queue.for_tree(root)
    if tree.settled and _inspect(tree, queue).state is State.APPLIED:
        return _result(queue, changed=False)
    if dry_run:
        return _foresee(tree, queue)
    with tree.locked():
        begun = tree.interrupted
        tree.finish()
        now = _inspect(tree, queue)
        if now.state is not State.APPLIED:
            tree.move(*_target(tree, queue, now.record))
    return _result(queue, changed=begun or now.state is not State.APPLIED)


def reverse(root: Path, upstream: str | None = None, *, dry_run: bool = False) -> Result:
    """Put the tree at `root` back to upstream's bytes and remove the record. Needs no patch file.

    Without `upstream` every queue in the tree is reversed; with `dry_run` nothing is written. Raises TreeModifiedError
    for a tree edited by hand or whose stored originals are gone; it is then as it was.
    """
    any_of_them = Tree(root, upstream or "")  # the lock is the directory's, whatever the upstream
    trees = [Tree(root, name) for name in ([upstream] if upstream else upstreams(root))]
    if dry_run:
        return _reversed(trees)
    with any_of_them.locked():
        for tree in trees:
            tree.finish()
        done = _reversed(trees)
        for tree in trees:
            if record := tree.record:
                tree.move(_originals(tree, record), None)
    return done


def originals(root: Path, upstream: str) -> Callable[[str], Content]:
    """Return a reader of the tree at `root` as it was before its queue for `upstream`, if it holds one.

    Raises TreeModifiedError if a patched file was edited by hand.
    """
    tree = Tree(root, upstream)
    record = tree.record
    if tree.interrupted:
        raise TreeModifiedError(
            f"{root} cannot be judged", "a patch run was killed in it", "./inv patch --tree TREE finishes it"
        )
    if record is None:
        return tree.read
    tree.require_unedited(record.files)
    files = _originals(tree, record)
    return lambda path: files[path] if path in files else tree.read(path)


def _reversed(trees: list[Tree]) -> Result:
    """Return what reversing `trees` does, or raise where it cannot be done."""
    patches, files = list[str](), list[str]()
    for tree in trees:
        if record := tree.record:
            tree.require_unedited(record.files)
            _originals(tree, record)
            patches += [name for name, _ in record.patches]
            files += record.files
    return Result(bool(patches), tuple(patches), tuple(files))


def _foresee(tree: Tree, queue: Queue) -> Result:
    """Return what applying `queue` would do, computed in memory."""
    if not tree.interrupted:  # else the journal says where a killed run was going, and apply first goes there
        _target(tree, queue, tree.record)
    return _result(queue, changed=True)


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


def _target(tree: Tree, queue: Queue, record: Record | None) -> tuple[dict[str, Content], Record]:
    """Return the contents and the record that `queue` gives a tree that holds what `record` tells of."""
    files = dict[str, Content]()
    if record is not None:
        tree.require_unedited(record.files)
        files = _originals(tree, record)
    files |= {path: tree.read(path) for path in queue.paths if path not in files}
    target = patched(files, queue)
    changes = {path: Change(digest(files[path]), digest(target[path])) for path in queue.paths}
    patches = tuple((patch.name, patch.sha256) for patch in queue.patches)
    return target, Record(queue.upstream, queue.version, queue.sha256, patches, changes)


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
