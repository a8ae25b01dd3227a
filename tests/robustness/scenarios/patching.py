"""Make a patched wheel from a locked queue, make it again if the cache has a damaged wheel, and lock a queue.

Also commit a queue to a developer's clone, and write a patch from that clone; disk operations of git fail too.
"""

import re
import zipfile
from functools import cache
from pathlib import Path

from lab.patches import authoring, checkout
from lab.patches.lock import lock_stack
from robustness import scenario
from robustness.scenario import BUSY, Scenario, cached, component, write
from robustness.scenarios import archives
from sparkforge.core.errors import PatchError, SparkforgeError, UsageError
from sparkforge.core.git import git
from sparkforge.patching import wheels
from sparkforge.patching.series import Queue
from sparkforge.pins import verify
from sparkforge.sources import fetch

HEADER = """\
Description: Change something
Origin: vendor, Sparkforge
Bug: https://example.org/1
Forwarded: no
Last-Update: 2026-11-21
Drop-when: contains pkg/a.py nothing of the kind
---
"""
BEFORE = {"pkg/a.py": "one\ntwo\nthree\n", "pkg/gone.py": "gone\n", "pkg/same.py": "same\n"}
CHANGES = """\
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,3 +1,3 @@
 one
-two
+{word}
 three
--- a/pkg/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-gone
--- /dev/null
+++ b/pkg/new/n.py
@@ -0,0 +1 @@
+new
"""


def queue(work, name, word):
    write(work / name / "up-1/series", "0001-change.patch\n")
    write(work / name / "up-1/0001-change.patch", HEADER + CHANGES.format(word=word))
    return work / name / "up-1"


NAME = "up-1-py3-none-any.whl"


@cache
def wheel():
    info = "up-1.dist-info"
    files = {name: text.encode() for name, text in BEFORE.items()} | {"pkg/big.bin": b"x" * 100_000}
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: up\nVersion: 1\n"
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\n"
    return archives.wheel(info, files)


@cache
def table():
    return scenario.table({"up": component("up", NAME, wheel(), patches="up-1")})


def _prepare(work):
    cached(NAME, wheel())
    write(work / "mine.txt", "mine")
    queue(work, "patches", "TWO")
    verify.PATH = work / "patched.toml"  # this process belongs to the scenario


def _prepare_locked(work):
    _prepare(work)
    lock_stack("s", table=table(), patches=work / "patches")
    _cached(work).unlink()


def _prepare_damaged(work):
    _prepare(work)
    lock_stack("s", table=table(), patches=work / "patches")
    _cached(work).write_bytes(_cached(work).read_bytes()[:-1])


def _cached(work):
    lock = verify.load_patched()[NAME]
    return fetch.cached(lock.file, lock.sha256)


def _make(work):
    wheels.patched(table().component("s", "up"), NAME, patches=work / "patches")


def _lock(work):
    lock_stack("s", table=table(), patches=work / "patches")


def _judge(_work):
    """The lock is complete or absent; a patched wheel in the cache is hashed before each use."""
    assert set(verify.load_patched()) <= {NAME}


def _is_patched(work):
    with zipfile.ZipFile(_cached(work)) as opened:
        assert opened.read("pkg/a.py") == b"one\nTWO\nthree\n"
        assert opened.read("pkg/new/n.py") == b"new\n"
        assert "pkg/gone.py" not in opened.namelist()


SECOND = """\
--- a/pkg/same.py
+++ b/pkg/same.py
@@ -1 +1 @@
-same
+SAME
"""
PATCHES = ("0001-change.patch", "0002-change.patch")
NEW = "0003-do-more.patch"
PERSON = ("user.name=A Person", "user.email=person@example.org")


def _git(work, *arguments):
    return git(work / "clone", "--no-optional-locks", *arguments, settings=PERSON).stdout


def _prepare_clone(work):
    """Make a clone at the release with a developer's work: a branch, and an uncommitted file."""
    _prepare(work)
    write(work / "patches/up-1" / PATCHES[1], HEADER + SECOND)
    write(work / "patches/up-1/series", "".join(f"{name}\n" for name in PATCHES))
    for name, text in BEFORE.items():
        write(work / "clone" / name, text)
    write(work / "clone/mine-committed.txt", "mine\n")
    _git(work, "init", "--quiet", "--initial-branch=main")
    _git(work, "add", "--all")
    _git(work, "commit", "--quiet", "--message=release")
    _git(work, "tag", "v1")
    _git(work, "checkout", "--quiet", "-b", "mine")
    _git(work, "commit", "--quiet", "--allow-empty", "--message=my own work")
    _git(work, "checkout", "--quiet", "main")
    write(work / "clone/mine-untracked.txt", "mine\n")


def _commit(work):
    """Run the command; if it gives instructions about half-written files of git, follow them and run it again."""
    tree = work / "clone"
    for _ in range(3):
        try:
            return checkout.commit_to_checkout(table(), "s", tree, work / "patches")
        except SparkforgeError as error:
            if lock := re.search(r"it left (/\S+\.lock)|Unable to create '(/\S+\.lock)': File exists", error.why):
                Path(lock[1] or lock[2]).unlink()
            elif "git stash" in error.fix:
                git(tree, "stash", "--quiet", settings=PERSON)
            elif "move away" in error.fix and "pkg/new/n.py" in error.why:
                (tree / "pkg/new/n.py").unlink()
            else:
                raise
    return checkout.commit_to_checkout(table(), "s", tree, work / "patches")


def _judge_clone(work):
    """The developer's branch and the release exist; our commits have the results of their patches."""
    _git(work, "rev-list", "--objects", "main", "mine")
    assert _git(work, "log", "--format=%s", "mine") == "my own work\nrelease\n"
    subjects = _git(work, "log", "--reverse", "--format=%s", "main").splitlines()
    assert subjects in (["release"], ["release", "Change something", "Change something"])
    if len(subjects) == 3:
        assert _git(work, "show", "main:pkg/same.py", "main:pkg/a.py") == "SAME\none\nTWO\nthree\n"


def _is_committed(work):
    _judge_clone(work)
    assert len(_git(work, "log", "--format=%s", "main").splitlines()) == 3
    assert _git(work, "status", "--porcelain", "--branch") == "## main\n?? mine-untracked.txt\n"
    assert _git(work, "worktree", "list").count("\n") == 1


def _prepare_edited(work):
    _prepare_clone(work)
    _commit(work)
    write(work / "clone/pkg/same.py", "SAME\nmore\n")


def _write_patch(work):
    try:
        fields = {"description": "Do more", "bug": "https://example.org/2", "drop_when": "contains pkg/same.py more"}
        order = authoring.PatchOrder("do-more", fields, "s", "up", str(work / "clone"))
        authoring.new_patch(order, table(), work / "patches")
    except UsageError as error:
        if "is in the queue already" not in str(error):
            raise


def _judge_queue(work):
    """The queue is unchanged, has the complete patch, or is refused with a reason; the clone is unchanged."""
    try:
        names = tuple(patch.name for patch in Queue.load(work / "patches/up-1").patches)
    except PatchError as error:
        assert f"`series` names files that are not there: {NEW}" in str(error)  # noqa: PT017 - it may also load
    else:
        assert names in {PATCHES, (*PATCHES, NEW)}
    assert (work / "clone/pkg/same.py").read_text() == "SAME\nmore\n"


def _is_written(work):
    queue = Queue.load(work / "patches/up-1")
    assert [patch.name for patch in queue.patches] == [*PATCHES, NEW]
    after = queue.apply({path: BEFORE[path].encode() if path in BEFORE else None for path in queue.paths})
    assert after["pkg/same.py"] == b"SAME\nmore\n"


SCENARIOS = [
    Scenario("patch-wheel", _prepare_locked, _make, _judge, _is_patched),
    Scenario("patch-damaged", _prepare_damaged, _make, _judge, _is_patched),
    Scenario("patch-lock", _prepare, _lock, _judge, _is_patched),
    Scenario("patch-clone", _prepare_clone, _commit, _judge_clone, _is_committed, kept=("clone/.git/*",),
             races=(0, BUSY), programs=True, cost=8),
    Scenario("patch-new", _prepare_edited, _write_patch, _judge_queue, _is_written, kept=("clone/.git/*",),
             volatile=(f"patches/up-1/{NEW}", "cache/members/*/index.json"), races=(0, BUSY), programs=True, cost=4),
]  # fmt: skip
