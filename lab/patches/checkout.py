"""A patch queue as git commits in a development checkout.

The commits are made in a separate work tree with its own index, and reach the checkout in one step. If `git am` is
killed or the disk fails, the user's checkout is not affected.

Each patch is a commit with a fixed author and date. Its message is the patch's DEP-3 header and one more field,
`Sparkforge-Patch: QUEUE/FILE SHA256`, which identifies the commit; the field is removed when the commit becomes a file.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, time
from email.utils import format_datetime
from pathlib import Path

from lab.patches import status, upstream
from sparkforge.core.errors import PatchError, UsageError
from sparkforge.core.files import locked
from sparkforge.core.git import git
from sparkforge.core.manifest import remove
from sparkforge.patching import series
from sparkforge.patching.hunks import read_files
from sparkforge.patching.series import Patch, Queue
from sparkforge.pins import Component, Pins

FIELD = "Sparkforge-Patch"
HEADER = re.compile(rf"^(Description: .*?)\n{FIELD}: (\S+) (\S+)$", re.MULTILINE | re.DOTALL)
NAME, EMAIL = "Sparkforge", "sparkforge@localhost"
# The repository's configuration must not change a commit or run a program.
SETTINGS = (
    f"user.name={NAME}", f"user.email={EMAIL}", "commit.gpgsign=false", "core.hooksPath=/dev/null",
    "apply.whitespace=nowarn", "apply.ignoreWhitespace=no", "i18n.commitEncoding=UTF-8",
)  # fmt: skip
AM = (
    "am", "--quiet", "--patch-format=mbox", "--keep", "--no-keep-cr", "--no-3way", "--no-scissors", "--no-gpg-sign",
    "--no-message-id", "--committer-date-is-author-date",
)  # fmt: skip
BESIDE = "sparkforge-queue"  # name of the work tree in a checkout's .git
SESSIONS = ("rebase-apply", "rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD")


@dataclass(frozen=True)
class Commit:
    """A commit: its id, its message, and, if it is a patch of a queue, the patch's name (`QUEUE/FILE`)."""

    id: str
    message: str
    patch: str = ""
    sha256: str = ""
    header: str = ""


def commit_to_checkout(table: Pins, stack: str, tree: Path, patches: Path = series.PATCHES) -> str:
    """Commit a queue to a checkout of the pinned release unless it is there; return a message about it.

    The checkout's files select one of the stack's queues. Raises UsageError for a folder that is no checkout of the
    release, or has uncommitted changes or an unfinished merge, and PatchError for a checkout with another queue or of
    another version. The checkout is then unchanged. If git fails or is killed in the last step, the next run finishes
    the step or names the obstacle.
    """
    _require_repository(tree)
    with locked(_git_path(tree, "sparkforge.lock"), f"put a queue into {tree}"):
        return _commit(table, stack, tree, patches)


def _commit(table: Pins, stack: str, tree: Path, patches: Path) -> str:
    """Do the work of `commit_to_checkout`, which holds the lock."""
    component, queue = _queue_of(table, stack, tree, patches)
    if holds_queue(tree, queue):
        return f"{queue.name} in {tree}: already there, {len(queue.patches)} commits"
    read = upstream.reader(upstream.release(table, component), queue.paths)
    released = {path: read(path) for path in queue.paths}
    patched, present = queue.apply(released), read_files(tree, queue.paths)
    # A run that was killed in the last step may have left some files already patched.
    already_patched = [
        path for path in queue.paths if present[path] != released[path] and present[path] == patched[path]
    ]
    _require_idle(tree, already_patched)
    head = git(tree, "rev-parse", "--short=12", "HEAD").stdout.strip()
    if other := [path for path in queue.paths if present[path] not in (released[path], patched[path])]:
        tags = git(tree, "describe", "--tags", "--always", "HEAD").stdout.strip()
        raise PatchError(
            f"{tree} is not {queue.upstream} {queue.version}",
            f"it is at {tags}, and {', '.join(other)} differ from the release",
            f"check out the release's tag (git -C {shlex.quote(str(tree))} checkout v{queue.version}) and move away "
            "the files among these that git does not know, then again",
            code="patch.conflict",
        )
    beside = _git_path(tree, BESIDE)
    try:
        _remove_beside(tree)  # left by a killed run
        git(tree, "worktree", "add", "--quiet", "--detach", "--no-checkout", beside, "HEAD", settings=SETTINGS)
        git(beside, "read-tree", "HEAD")
        git(beside, "checkout-index", "--quiet", "--", *(path for path in released if released[path] is not None))
        apply_mailbox(beside, queue)
        if read_files(beside, queue.paths) != patched:
            raise PatchError(
                f"the queue {queue.name} was not committed", "git's result differs from that of the patches",
                f"look for filters and line ends in {tree}/.gitattributes", code="patch.conflict"
            )  # fmt: skip
        last = git(beside, "rev-parse", "HEAD").stdout.strip()
    finally:
        _remove_beside(tree)
    for path in already_patched:
        git(tree, "reset", "--quiet", "--", path)
        (tree / path).unlink(missing_ok=True)
        if released[path] is not None:
            git(tree, "checkout-index", "--quiet", "--", path)
    git(tree, "merge", "--quiet", "--ff-only", last, settings=SETTINGS)
    undo = f"git -C {shlex.quote(str(tree))} reset --keep {head}"
    names = "".join(f"\n  {patch.name}" for patch in queue.patches)
    return f"{queue.name} in {tree}: {len(queue.patches)} commits on {head}{names}\nto undo it: {undo}"


def _remove_beside(tree: Path) -> None:
    """Remove our work tree and git's record of it."""
    for name in (BESIDE, f"worktrees/{BESIDE}"):
        remove(_git_path(tree, name))


def holds_queue(tree: Path, queue: Queue) -> bool:
    """Tell whether the commits of `tree` are exactly `queue`. Raises PatchError if they are another queue."""
    present = sorted((commit.patch, commit.sha256) for commit in queue_commits(tree, queue.upstream))
    if present and present != [(f"{queue.name}/{patch.name}", patch.sha256) for patch in queue.patches]:
        raise PatchError(
            f"{tree} holds another queue than {queue.name}",
            f"its commits are {', '.join(name for name, _ in present)}, and some differ from the files of those names",
            "start again from the release's tag, then carry your own commits over (git rebase --onto)",
            code="patch.modified",
        )
    return bool(present)


def queue_commits(tree: Path, name: str) -> list[Commit]:
    """Return the commits of `tree` that are patches for the upstream `name`, oldest first."""
    marked = commits(tree, "HEAD", f"--grep=^{FIELD}: ")
    return [commit for commit in marked if status.target(commit.patch.partition("/")[0])[0] == name]


def commits(tree: Path, revisions: str, *options: str) -> list[Commit]:
    """Return the commits that `revisions` names, oldest first."""
    log = git(tree, "log", "--reverse", "--format=%H%n%B%x00", *options, revisions, "--").stdout
    result = []
    for entry in filter(None, (entry.strip() for entry in log.split("\0"))):
        identity, _, message = entry.partition("\n")
        header = HEADER.search(message)
        result.append(Commit(identity, message, *(header.group(2, 3, 1) if header else ())))
    return result


def mail(queue: str, patch: Patch) -> bytes:
    """Return a patch of `queue`, a folder's name, as a mail that `git am` reads."""
    head, _, diff = patch.text.partition(b"\n---\n")
    date = datetime.combine(datetime.fromisoformat(patch.header["Last-Update"]).date(), time(), UTC)
    lines = (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001", f"From: {NAME} <{EMAIL}>", f"Date: {format_datetime(date)}",
        f"Subject: {patch.header['Description'].splitlines()[0]}", "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=UTF-8", "Content-Transfer-Encoding: 8bit", "", head.decode(),
        f"{FIELD}: {queue}/{patch.name} {patch.sha256}", "---", "",
    )  # fmt: skip
    return "\n".join(lines).encode() + diff


def apply_mailbox(tree: Path, queue: Queue) -> None:
    """Commit each patch of the queue with `git am` to `tree`, a private work tree. Raises PatchError."""
    with tempfile.TemporaryDirectory(prefix="sparkforge-") as scratch:
        mailbox = Path(scratch).resolve() / "mailbox"
        mailbox.write_bytes(b"\n".join(mail(queue.name, patch) for patch in queue.patches))
        result = git(tree, *AM, mailbox, settings=SETTINGS, ends=range(256))
    if result.returncode:
        why = " ".join((result.stderr or result.stdout).split())
        raise PatchError(f"the queue {queue.name} does not apply to {queue.upstream} {queue.version}", why,
                         "nothing was changed; lab.patches status says which", code="patch.conflict")  # fmt: skip


def changes(tree: Path) -> list[tuple[str, str]]:
    """Return (state, path) of uncommitted files, untracked ones included; the state is git's two letters."""
    lines = git(tree, "status", "--porcelain", "--untracked-files=all", settings=["core.quotePath=false"]).stdout
    return [(line[:2], line[3:]) for line in lines.splitlines()]


def _require_repository(tree: Path) -> None:
    """Raise UsageError for a folder that is not the top of a git repository with a commit."""
    if not tree.is_dir():
        raise UsageError(f"{tree} is no git checkout", "there is no such folder", "name the folder that you cloned")
    result = git(tree, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", ends=(0, 1, 128))
    if result.returncode or not (tree / ".git").exists():
        why = " ".join(result.stderr.split()) or "it has no .git, or no commit"
        raise UsageError(f"{tree} is no git checkout", why, "name the top folder of a clone")


def _git_path(tree: Path, name: str) -> Path:
    """Return where git keeps `name` of a checkout, which may share its repository with others."""
    return tree / git(tree, "rev-parse", "--git-path", name).stdout.rstrip("\n")


def _queue_of(table: Pins, stack: str, tree: Path, patches: Path) -> tuple[Component, Queue]:
    """Return the stack's queue whose files `tree` has. Raises UsageError unless there is exactly one."""
    queues = series.queues(table, stack, patches)
    present = [
        (component, queue) for component, queue in queues if any((tree / path).is_file() for path in queue.paths)
    ]
    if len(present) != 1:
        known = ", ".join(f"{queue.upstream} {queue.version}" for _, queue in queues) or "none"
        raise UsageError(f"{tree} is no checkout that stack {stack} patches", f"its queues are for: {known}",
                         "name the top folder of a clone of one of them")  # fmt: skip
    return present[0]


def _require_idle(tree: Path, already_patched: Collection[str]) -> None:
    """Raise UsageError if git is running in `tree`, or tracked files other than `already_patched` are changed."""
    if (lock := _git_path(tree, "index.lock")).exists():
        raise UsageError(f"{tree} is not ready", f"git runs in it, or was killed: it left {lock}",
                         f"if no git runs: rm {shlex.quote(str(lock))}, then the same command again")  # fmt: skip
    if any(_git_path(tree, name).exists() for name in SESSIONS):
        raise UsageError(f"{tree} is not ready", "a rebase, merge or `git am` in it is unfinished",
                         "finish or abort it (git status says how), then the same command again")  # fmt: skip
    if dirty := [path for state, path in changes(tree) if state != "??" and path not in already_patched]:
        raise UsageError(f"{tree} has uncommitted changes", ", ".join(dirty[:5]),
                         "commit or stash them (git stash), then the same command again")  # fmt: skip
