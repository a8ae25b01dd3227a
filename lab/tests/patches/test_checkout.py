"""The queue as commits in a development checkout, with real git."""

import shutil
from datetime import UTC, datetime

import pytest
from expected import refused

from lab.patches import checkout
from lab.tests.patches.conftest import NAMES, commit_all, drop_last
from sparkforge.core.errors import PatchError, UsageError


def state(kit, tree):
    files = {path: data for path, data in kit.snapshot(tree).items() if not path.startswith(".git/")}
    outputs = (kit.git(tree, *arguments).stdout for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain")))
    return files, *outputs, (tree / ".git/rebase-apply").exists()


def commit(world, tree):
    return checkout.commit_to_checkout(world.table, "s", tree, world.patches)


def log(kit, tree, form):
    return kit.git(tree, "log", "--reverse", f"--format={form}", "v1.0..HEAD").stdout.decode()


def test_each_patch_becomes_a_commit_with_its_header(kit, world, clone):
    message = commit(world, clone)
    assert message.splitlines()[0].startswith(f"up-1.0 in {clone}: 3 commits on ")
    assert [line.strip() for line in message.splitlines()[1:4]] == NAMES
    files = {path: data.decode() for path, data in kit.snapshot(clone).items() if not path.startswith(".git/")}
    assert files == {"README": "read\n", **{path: text for path, text in world.AFTER[2].items() if text is not None}}
    header = kit.HEADER.removesuffix("---\n")
    (first, *_) = checkout.commits(clone, "v1.0..HEAD")
    patch = world.queue().patches[0]
    assert first.message == f"Change something\n\n{header}Sparkforge-Patch: up-1.0/{patch.name} {patch.sha256}"
    assert f"{first.header}\n" == header
    day = int(datetime(2026, 11, 21, tzinfo=UTC).timestamp())
    assert set(log(kit, clone, "%an <%ae> %at %ct").splitlines()) == {f"Sparkforge <sparkforge@localhost> {day} {day}"}


def test_the_commits_are_the_same_on_every_machine(kit, world, clone, tmp_path, monkeypatch):
    other = tmp_path / "other"
    kit.git(tmp_path, "clone", "--quiet", str(clone), str(other))
    commit(world, clone)
    kit.git(other, "config", "user.name", "Somebody")
    for name, value in {"GIT_AUTHOR_NAME": "X", "GIT_COMMITTER_DATE": "2001-01-01", "GIT_DIR": str(clone)}.items():
        monkeypatch.setenv(name, value)
    commit(world, other)
    assert log(kit, other, "%H") == log(kit, clone, "%H")


def test_a_second_time_nothing_is_done_even_below_own_work(kit, world, clone):
    commit(world, clone)
    (clone / "pkg/b.py").write_text("my own\n")
    commit_all(kit, clone, "mine")
    (clone / "pkg/a.py").write_text("not yet committed\n")
    before = state(kit, clone)
    assert commit(world, clone) == f"up-1.0 in {clone}: already there, 3 commits"
    assert state(kit, clone) == before


def edited(kit, world, tree):
    (tree / "pkg/other.py").write_text("edited\n")
    (tree / "new.py").write_text("new\n")
    kit.git(tree, "add", "new.py")


def wrong_version(kit, world, tree):
    (tree / "pkg/a.py").write_text("x\n" + world.V1["pkg/a.py"])
    commit_all(kit, tree, "release 1.1")


def in_the_way(kit, world, tree):
    (tree / "pkg/n.py").write_text("an untracked file that a patch makes\n")


def unfinished(kit, world, tree):
    mail = "From 0 Mon Sep 17 00:00:00 2001\nFrom: A <a@b>\nDate: Mon, 17 Sep 2001 00:00:00 +0000\nSubject: x\n\n---\n"
    (tree / "mail").write_text(f"{mail}--- a/nothing\n+++ b/nothing\n@@ -1 +1 @@\n-a\n+b\n")
    kit.git(tree, "-c", "user.name=A", "-c", "user.email=a@b", "am", "mail")
    assert (tree / ".git/rebase-apply").is_dir()


def locked(kit, world, tree):
    (tree / ".git/index.lock").write_text("")


def another_queue(kit, world, tree):
    commit(world, tree)
    drop_last(world)


REFUSED = {
    edited: (UsageError, r"has uncommitted changes · new\.py, pkg/other\.py"),
    wrong_version: (PatchError, r"is not up 1\.0 · it is at v1\.0-1-g\w+, and pkg/a\.py differ.* checkout v1\.0"),
    in_the_way: (PatchError, r"is not up 1\.0 .* pkg/n\.py differ"),
    unfinished: (UsageError, r"is not ready · a rebase, merge or `git am` in it is unfinished"),
    locked: (UsageError, r"is not ready · git runs in it, or was killed: it left .*/\.git/index\.lock · .*: rm "),
    another_queue: (PatchError, r"holds another queue than up-1\.0"),
}


@pytest.mark.parametrize("prepare", REFUSED)
def test_a_clone_that_is_not_the_clean_pinned_release_is_refused_unchanged(kit, world, clone, prepare):
    error, message = REFUSED[prepare]
    prepare(kit, world, clone)
    before = state(kit, clone)
    with pytest.raises(error, match=message):
        commit(world, clone)
    assert state(kit, clone) == before


@pytest.mark.parametrize("kind", ["missing", "no repository", "below one", "without a commit", "foreign"])
def test_a_folder_that_is_no_checkout_is_refused(kit, world, clone, tmp_path, kind):
    tree = tmp_path / "tree"
    if kind == "below one":
        tree = clone / "pkg"
    elif kind != "missing":
        kit.write(tree, {"README": "read\n"} if kind == "foreign" else world.V1)
    if kind in ("without a commit", "foreign"):
        kit.git(tree, "init", "--quiet")
    if kind == "foreign":
        commit_all(kit, tree, "something else")
    with pytest.raises(UsageError, match=r"is no git checkout|is no checkout that stack s patches"):
        commit(world, tree)


def test_if_git_makes_other_bytes_the_clone_is_unchanged(kit, world, clone):
    (clone / ".git/info/attributes").write_text("*.py text eol=crlf\n")
    before = state(kit, clone)
    with refused("patch.conflict", r"does not apply|was not committed"):
        commit(world, clone)
    assert state(kit, clone) == before
    assert kit.git(clone, "worktree", "list").stdout.count(b"\n") == 1


@pytest.mark.parametrize("add", [False, True])
def test_the_next_run_finishes_a_killed_run(kit, world, clone, add):
    kit.git(clone, "worktree", "add", "--quiet", "--detach", "--no-checkout", ".git/sparkforge-queue")
    (clone / "pkg/a.py").write_text(world.AFTER[2]["pkg/a.py"])  # as the last step makes them
    (clone / "pkg/n.py").write_text("new\n")
    if add:
        kit.git(clone, "add", "pkg")
    assert "3 commits on" in commit(world, clone)
    assert kit.git(clone, "status", "--porcelain").stdout == b""
    assert kit.git(clone, "worktree", "list").stdout.count(b"\n") == 1
    assert log(kit, clone, "%s") == "Change something\n" * 3


@pytest.mark.parametrize("whitespace", ["error", "error-all", "fix"])
def test_trailing_whitespace_in_a_patch_stays_whatever_git_is_told(kit, world, clone, tmp_path, whitespace):
    """If `git am` obeyed apply.whitespace, it would refuse the patch or change its bytes."""
    released = {**world.V1, "pkg/b.py": "value = 1\n"}
    patch = kit.diff(tmp_path / "spaces", released, {**released, "pkg/b.py": "value = 2  \n\tif x:\n        y \n\n\n"})
    shutil.rmtree(world.folder)
    kit.write_queue(world.folder, patch)
    kit.git(clone, "config", "apply.whitespace", whitespace)
    assert "1 commits on" in commit(world, clone)
    assert (clone / "pkg/b.py").read_bytes() == b"value = 2  \n\tif x:\n        y \n\n\n"
