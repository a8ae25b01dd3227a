"""Carry a queue over to another version of its upstream, into a new folder under `patches/`, completely or not at all.

A small git repository holds the files that the queue touches: the old release with the queue as commits, and the new
release. `git rebase` merges three ways. A person resolves conflicts in an ordinary work tree. Once there are none, the
new queue is written, after a check that it applies to the new release with fuzz 0.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lab.patches import checkout, repository, status, upstream
from lab.patches.status import Verdict
from lab.patches.upstream import Reader
from sparkforge import pins
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.errors import PatchError, UsageError
from sparkforge.core.files import fsync_directory, locked, write_atomic
from sparkforge.core.git import git
from sparkforge.core.manifest import remove
from sparkforge.patching.hunks import read_files
from sparkforge.patching.series import PATCHES, Patch, Queue
from sparkforge.pins import Pins

TODO = ".git/sparkforge-todo"


@dataclass(frozen=True)
class Carried:
    """One patch of the old queue: its line in `series`, its outcome, and whether the new queue has it."""

    name: str
    action: str
    in_queue: bool = True

    def __str__(self) -> str:
        return f"{'✓' if self.in_queue else '-'} {self.name}: {self.action}"


@dataclass(frozen=True)
class Rebase:
    """A rebase: the queue and its folder, readers of the old and the new release, the new version, the work tree.

    `command` is the user's command; `drop` are the numbers of patches to leave out.
    """

    queue: Queue
    folder: Path
    old: Reader
    new: Reader
    version: str
    work: Path
    command: str
    drop: frozenset[str] = frozenset()

    @property
    def target(self) -> Path:
        """The new queue's folder."""
        return self.folder.parent / f"{self.queue.upstream}-{self.version}"

    def locked(self) -> AbstractContextManager[None]:
        """Exclude other processes from the same rebase."""
        return locked(self.work.with_name(f".{self.work.name}.lock"), f"write {self.target.name}")


def rebase_queue(to: str, stack: str, drop: str = "", *, resume: bool = False) -> None:
    """Carry a stack's queue to the version `to` (`0.33.0`, `flashinfer-0.7.2.post1`); `drop` names patches by number.

    `resume` continues after a person has resolved the conflicts. Raises PatchError for conflicts, UsageError if that
    version has a queue already.
    """
    if resume and drop:
        raise UsageError("--drop is for the beginning", "with --continue the patches are commits already",
                         "git rebase --skip in the work tree drops the patch that conflicts")  # fmt: skip
    rebase = prepare(pins.load(), stack, to, frozenset(drop.replace(",", " ").split()))
    carried = continue_rebase(rebase) if resume else begin_rebase(rebase)
    for patch in carried:
        say(str(patch))
    if not any(patch.in_queue for patch in carried):
        say(f"{rebase.queue.upstream} {rebase.version} needs no patch: take `patches` out of its table in pins.toml")
        return
    name = rebase.target.name
    say(f"wrote {rebase.target}; next: read its diffs, then name {name} and the new version in pins.toml")


def prepare(table: Pins, stack: str, to: str, drop: frozenset[str], patches: Path = PATCHES) -> Rebase:
    """Find the queue, the old and the new release. Raises InputError, UsageError, and the errors of `upstream`."""
    component, queue, version = status.chosen(table, stack, to, patches)
    numbers = {patch.name[:4] for patch in queue.patches}
    if unknown := sorted(drop - numbers):
        raise UsageError(
            f"cannot drop {', '.join(unknown)}",
            f"the queue has {', '.join(sorted(numbers))}",
            ".venv/bin/python -m lab.patches status",
        )
    old, new = (upstream.release(table, component, number) for number in (queue.version, version))
    folder = patches / queue.name
    upstream.reader(new, status.paths_of(queue))  # all at once; files that only an edit adds are read later
    command = f".venv/bin/python -m lab.patches rebase {to} --stack {stack}"
    return Rebase(queue, folder, upstream.reader(old, queue.paths), lambda path: upstream.reader(new, [path])(path),
               version, paths.state() / "rebase" / f"{queue.upstream}-{version}", command, drop)  # fmt: skip


def begin_rebase(rebase: Rebase) -> list[Carried]:
    """Carry every patch over and write the new queue, unless all patches are dropped.

    Raises PatchError at a conflict, which is then in the work tree `rebase.work`, and UsageError if the new queue or a
    work tree exists already.
    """
    with rebase.locked():
        for stale in (
            *rebase.folder.parent.glob(".rebase.*.tmp"),
            *rebase.work.parent.glob(f".{rebase.work.name}.*.tmp"),
        ):
            remove(stale)
        _require_no_target(rebase)
        if rebase.work.exists():
            raise UsageError(
                f"the rebase to {rebase.work.name} has already begun", f"its conflicts are in {rebase.work}",
                f"{rebase.command} --continue; to start again: rm -r {shlex.quote(str(rebase.work))}",
            )  # fmt: skip
        tree = rebase.work.with_name(f".{rebase.work.name}.{os.getpid()}.tmp")
        try:
            _make_branches(rebase, tree)
            editor = [f"sequence.editor=cp {TODO}", *checkout.SETTINGS]
            options = ("--quiet", "--interactive", "--empty=drop", "--no-autostash", "--onto", "upstream")
            if git(tree, "rebase", *options, "old", "queue", settings=editor, ends=(0, 1)).returncode:
                tree.rename(rebase.work)
                fsync_directory(rebase.work.parent)
                raise _conflict(rebase)
            return _export(rebase, tree)
        finally:
            remove(tree)


def continue_rebase(rebase: Rebase) -> list[Carried]:
    """Continue a rebase whose conflicts a person has resolved, and write the new queue.

    Raises PatchError while conflicts are unresolved or at the next conflict, UsageError if no rebase was begun.
    """
    with rebase.locked():
        _require_no_target(rebase)
        if not rebase.work.is_dir():
            raise UsageError(f"no rebase to {rebase.work.name} is begun", f"there is no {rebase.work}", rebase.command)
        under_way = (rebase.work / ".git/rebase-merge").is_dir()
        if loose := [path for state, path in checkout.changes(rebase.work) if state[1] != " " or not under_way]:
            raise _conflict(rebase, f"{', '.join(loose)}: not resolved, or not added with git add")
        staged = git(rebase.work, "diff", "--cached", "--check", ends=(0, 2)).stdout
        if markers := [line.partition(": leftover")[0] for line in staged.splitlines() if ": leftover" in line]:
            raise _conflict(rebase, f"conflict markers are left at {', '.join(markers)}")
        editor = ["core.editor=true", *checkout.SETTINGS]
        if under_way and git(rebase.work, "rebase", "--continue", settings=editor, ends=(0, 1)).returncode:
            raise _conflict(rebase)
        if git(rebase.work, "merge-base", "--is-ancestor", "upstream", "HEAD", ends=(0, 1)).returncode:
            raise UsageError(f"the rebase in {rebase.work} was aborted", f"it is not at {rebase.version} any more",
                             f"rm -r {shlex.quote(str(rebase.work))}, then {rebase.command}")  # fmt: skip
        carried = _export(rebase, rebase.work)
        remove(rebase.work)
    return carried


def _require_no_target(rebase: Rebase) -> None:
    if rebase.target.exists():
        raise UsageError(
            f"cannot carry {rebase.folder.name} over", f"{rebase.target} is there already",
            f"to do it again: rm -r {rebase.target}; or see lab.patches status --against {rebase.version}",
        )  # fmt: skip


def _make_branches(rebase: Rebase, tree: Path) -> None:
    """Make the repository with branches `old` (old release), `queue` (the queue on it) and `upstream` (new release)."""
    names = rebase.queue.paths
    repository.make_repository(
        tree, {path: rebase.old(path) for path in names}, f"{rebase.queue.upstream} {rebase.queue.version}"
    )
    git(tree, "tag", "old")
    released = {path: rebase.new(path) for path in status.paths_of(rebase.queue)}
    repository.commit_files(tree, {path: released[path] for path in names}, f"{rebase.queue.upstream} {rebase.version}")
    git(tree, "checkout", "--quiet", "-b", "queue", "old")
    checkout.apply_mailbox(tree, rebase.queue)
    unneeded = {
        patch.name for patch in rebase.queue.patches
        if patch.name[:4] in rebase.drop or any(line.holds_for(released[line.path]) for line in patch.drop_when)
    }  # fmt: skip
    commits = checkout.commits(tree, "old..queue")
    picks = [f"pick {commit.id} {_file(commit)}\n" for commit in commits if _file(commit) not in unneeded]
    (tree / TODO).write_text("".join(picks) or "noop\n", encoding="utf-8")


def _file(commit: checkout.Commit) -> str:
    return commit.patch.rpartition("/")[2]


def _conflict(rebase: Rebase, why: str = "") -> PatchError:
    """Return the error for a rebase that waits for a person; without `why`, list the conflicts."""
    tree = rebase.work
    stopped = git(tree, "rev-parse", "--verify", "--quiet", "REBASE_HEAD", ends=(0, 1)).stdout.strip()
    (commit,) = checkout.commits(tree, stopped, "--max-count=1") if stopped else (checkout.Commit("", ""),)
    if not why:
        say(git(tree, "diff", "--no-color").stdout.rstrip("\n"))
        unmerged = git(tree, "-c", "core.quotePath=false", "diff", "--name-only", "--diff-filter=U").stdout.split("\n")
        why = f"conflicts are left in {', '.join(filter(None, unmerged))}"
    return PatchError(
        f"{_file(commit) or rebase.folder.name} does not apply to {rebase.queue.upstream} {rebase.version}",
        why,
        f"cd {shlex.quote(str(tree))}, edit the files, git add them (git rm one that is gone; git rebase --skip drops "
        f"the patch); then {rebase.command} --continue",
        code="patch.conflict",
    )


def _export(rebase: Rebase, tree: Path) -> list[Carried]:
    """Write the commits of `tree` as the new queue under a temporary name, check it, and rename it.

    Nothing is written if every patch is dropped.
    """
    wanted = read_files(tree, _tracked(tree, "HEAD"))
    temporary = rebase.folder.parent / f".rebase.{os.getpid()}.tmp"
    folder = temporary / rebase.target.name
    folder.mkdir(parents=True)
    (temporary / "common").symlink_to(rebase.folder.parent / "common")  # its series may name these patches
    try:
        carried = list(_carried(rebase, _with_base_files(rebase, tree, temporary / "tree"), folder))
        names = [patch.name for patch in carried if patch.in_queue]
        if names:
            head = [
                f"# Applied in this order to {rebase.queue.upstream} {rebase.version}, each with -p1 and fuzz 0.",
                f"# Carried over from {rebase.folder.name}:",
                *(f"#   {patch.name}: {patch.action}" for patch in carried),
            ]
            write_atomic(folder / "series", "\n".join([*head, *names]) + "\n")
            if (rebase.folder / "installed").is_file():
                write_atomic(folder / "installed", (rebase.folder / "installed").read_bytes())
            queue = Queue.load(folder)
            result = queue.apply({path: rebase.new(path) for path in queue.paths})
            if result != {path: wanted.get(path) for path in queue.paths}:
                raise PatchError(
                    f"{rebase.target.name} was not written", "the carried patches do not make what was merged",
                    "report this with the queue and the version", code="patch.conflict"
                )  # fmt: skip
            folder.rename(rebase.target)
            fsync_directory(rebase.target.parent)
    finally:
        remove(temporary)
    return carried


def _tracked(tree: Path, revision: str) -> list[str]:
    listing = git(tree, "ls-tree", "-r", "-z", "--name-only", revision).stdout
    return [name for name in listing.split("\0") if name]


def _with_base_files(rebase: Rebase, tree: Path, copy: Path) -> Path:
    """Return `tree`, or a copy whose base also has files of the new release that only the user's edits touch."""
    missing = {name: rebase.new(name) for name in {*_tracked(tree, "HEAD")} - {*_tracked(tree, "upstream")}}
    files = {name: content for name, content in missing.items() if content is not None}
    if not files:
        return tree
    shutil.copytree(tree, copy, symlinks=True)
    git(copy, "checkout", "--quiet", "-B", "edited")
    git(copy, "tag", "before", "upstream")
    git(copy, "checkout", "--quiet", "upstream")
    repository.commit_files(copy, files, "files that the edits add")
    onto = ("-X", "theirs", "--onto", "upstream", "before", "edited")
    git(copy, "rebase", "--quiet", *onto, settings=checkout.SETTINGS)
    return copy


def _carried(rebase: Rebase, tree: Path, folder: Path) -> Iterator[Carried]:
    """Write each patch with a commit in `tree` to `folder`, and yield the outcome of every patch, in order."""
    commits = {_file(commit): commit for commit in checkout.commits(tree, "upstream..HEAD")}
    if "" in commits:
        raise UsageError(f"{commits[''].id[:12]} is not a patch of the queue", f"its message has no {checkout.FIELD}:",
                         "squash it into the patch it belongs to (git rebase -i upstream)")  # fmt: skip
    pristine = {path: rebase.new(path) for path in status.paths_of(rebase.queue)}
    now = dict(pristine)
    for patch in rebase.queue.patches:
        judgement, fitted = status.judge_patch(patch, pristine, now)
        if not (commit := commits.get(patch.name)):
            upstreamed = judgement.verdict is Verdict.UPSTREAM
            why = f"already upstream: {judgement.evidence}" if upstreamed else "as requested, or because it was empty"
            yield Carried(patch.name, f"dropped, {why}", in_queue=False)
            continue
        data = f"{commit.header}\n---\n".encode() + repository.diff(tree, f"{commit.id}^", commit.id)
        write_atomic(folder / patch.name, data)
        changed = {
            change.path: change.apply(now[change.path] if change.path in now else rebase.new(change.path))
            for change in Patch.load(folder / patch.name).changes
        }
        action = f"moved: {judgement.evidence}"
        if changed != fitted:
            today = datetime.now().astimezone().date().isoformat()
            data = re.sub(rb"(?m)^Last-Update: .*$", f"Last-Update: {today}".encode(), data, count=1)
            action = "merged: read it before you trust it"
        elif judgement.verdict is Verdict.APPLIES:
            data, action = patch.text, "applies as it is"
        now |= changed
        if data == patch.text and patch.entry != patch.name:
            (folder / patch.name).unlink()  # the common patch applies to this release too
            yield Carried(patch.entry, action)
        else:
            write_atomic(folder / patch.name, data)
            yield Carried(patch.name, action)
