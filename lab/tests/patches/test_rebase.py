"""Carrying a queue over to a new release: patches are copied, moved, merged, dropped, or left to a person."""

import re
from datetime import datetime

import pytest
from expected import refused

from lab.patches import rebase
from lab.tests.patches.conftest import NAMES
from sparkforge.core import paths
from sparkforge.core.errors import UsageError
from sparkforge.patching.series import Queue


def job(world, version="2.0", drop=()):
    return rebase.prepare(world.table, "s", f"up-{version}", frozenset(drop), world.patches)


def result(world, files):
    released = {path: text.encode() for path, text in present(files).items()}
    queue = Queue.load(world.patches / "up-2.0")
    after = released | queue.apply({path: released.get(path) for path in queue.paths})
    return {path: data.decode() for path, data in after.items() if data is not None}


def edited(world, old, new):
    return {**world.V1, "pkg/a.py": world.V1["pkg/a.py"].replace(old, new)}


def present(files):
    return {path: text for path, text in files.items() if text is not None}


def test_moved_patches_are_rewritten_and_those_that_upstream_has_are_dropped(kit, world):
    files = {**edited(world, "line 0", "x\nline 0"), "pkg/b.py": "value = 2\n", "pkg/n.py": "new\n"}
    world.release("2.0", files)
    carried = rebase.begin_rebase(job(world))
    assert [patch.action for patch in carried] == [
        "moved: pkg/a.py +1 lines", "moved: pkg/a.py +1 lines", "dropped, already upstream: its reverse applies",
    ]  # fmt: skip
    series = (world.patches / "up-2.0/series").read_text()
    assert f"#   {NAMES[2]}: dropped, already upstream: its reverse applies\n" in series
    moved = (world.patches / "up-2.0" / NAMES[0]).read_text()
    assert moved.startswith(kit.HEADER)
    assert "@@ -4,7 +4,7 @@" in moved
    patched = {**files, "pkg/a.py": files["pkg/a.py"].replace("line 5", "LINE FIVE")}
    assert result(world, files) == present(patched)


def test_patches_that_apply_are_the_same_bytes(world):
    world.release("2.0", world.V1)
    (world.folder / "installed").write_text("csrc pkg/data\n")
    rebase.begin_rebase(job(world))
    for name in [*NAMES, "installed"]:
        assert (world.patches / "up-2.0" / name).read_bytes() == (world.folder / name).read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        rebase.begin_rebase(job(world))


def test_a_common_patch_that_still_applies_is_named_and_not_copied(world):
    common = world.patches / "common"
    common.mkdir()
    for name in NAMES[:2]:
        (world.folder / name).rename(common / name)
    (world.folder / "series").write_text("".join(f"../common/{name}\n" for name in NAMES[:2]) + NAMES[2] + "\n")
    world.release("2.0", world.V1)
    rebase.begin_rebase(job(world))
    entries = [patch.entry for patch in Queue.load(world.patches / "up-2.0").patches]
    assert entries == [*(f"../common/{name}" for name in NAMES[:2]), NAMES[2]]
    assert {path.name for path in (world.patches / "up-2.0").iterdir()} == {"series", NAMES[2]}
    world.release("3.0", edited(world, "line 0", "x\nline 0"))
    rebase.begin_rebase(job(world, "3.0"))
    assert [patch.entry for patch in Queue.load(world.patches / "up-3.0").patches] == NAMES


def test_a_patch_with_changed_context_is_merged_three_ways_and_reported(kit, world):
    files = edited(world, "line 7", "line seven")
    world.release("2.0", files)
    carried = rebase.begin_rebase(job(world))
    assert [patch.action[:6] for patch in carried] == ["merged", "merged", "applie"]
    today = datetime.now().astimezone().date().isoformat()
    assert f"Last-Update: {today}\n" in (world.patches / "up-2.0" / NAMES[0]).read_text()
    assert result(world, files)["pkg/a.py"] == files["pkg/a.py"].replace("line 5", "LINE FIVE")


@pytest.fixture
def conflict(world):
    world.release("2.0", edited(world, "line 5", "line five, by upstream"))
    return world


def stopped(world, action, name):
    with refused("patch.conflict") as caught:
        action(job(world))
    assert caught.value.what == f"{name} does not apply to up 2.0"
    assert caught.value.fix.endswith(".venv/bin/python -m lab.patches rebase up-2.0 --stack s --continue")
    return paths.state() / "rebase/up-2.0"


def solve(kit, tree, text, file="pkg/a.py"):
    before = (tree / file).read_bytes()
    assert b"<<<<<<< " in before
    (tree / file).write_bytes(re.sub(rb"(?ms)^<{7} .*?^>{7} [^\n]*\n", text, before))
    assert kit.git(tree, "add", file).returncode == 0


def test_a_conflict_is_left_in_a_work_tree_and_continue_goes_on(kit, conflict, capsys):
    before = kit.snapshot(conflict.patches)
    tree = stopped(conflict, rebase.begin_rebase, NAMES[0])
    assert "line five, by upstream" in capsys.readouterr().err
    solve(kit, tree, b"solved\n")
    stopped(conflict, rebase.continue_rebase, NAMES[1])
    assert kit.snapshot(conflict.patches) == before
    solve(kit, tree, b"solved twice\n")
    carried = rebase.continue_rebase(job(conflict))
    assert [patch.action[:6] for patch in carried] == ["merged", "merged", "applie"]
    files = edited(conflict, "line 5", "line five, by upstream")
    assert result(conflict, files)["pkg/a.py"] == conflict.V1["pkg/a.py"].replace("line 5", "solved twice")
    assert not tree.exists()


def test_unresolved_files_are_named_and_nothing_changes(kit, conflict):
    tree = stopped(conflict, rebase.begin_rebase, NAMES[0])

    def refuse(message):
        before = kit.snapshot(tree / "pkg"), kit.snapshot(conflict.patches)
        with refused("patch.conflict", message):
            rebase.continue_rebase(job(conflict))
        assert (kit.snapshot(tree / "pkg"), kit.snapshot(conflict.patches)) == before

    refuse("not resolved, or not added")
    kit.git(tree, "add", "pkg/a.py")
    refuse("conflict markers are left at pkg/a.py")
    solve(kit, tree, b"solved\n")
    (tree / "pkg/notes.txt").write_text("my own\n")
    refuse("pkg/notes.txt: not resolved, or not added")


def test_the_same_command_again_keeps_what_a_person_did(kit, conflict):
    tree = stopped(conflict, rebase.begin_rebase, NAMES[0])
    solve(kit, tree, b"solved\n")
    with pytest.raises(UsageError, match="has already begun", check=lambda error: "--continue" in error.fix):
        rebase.begin_rebase(job(conflict))
    assert b"solved\n" in (tree / "pkg/a.py").read_bytes()


def test_a_person_may_use_git_alone_and_then_continue(kit, conflict):
    tree = stopped(conflict, rebase.begin_rebase, NAMES[0])
    assert kit.git(tree, "rebase", "--skip").returncode != 0  # the second patch conflicts too
    solve(kit, tree, b"solved\n")
    assert kit.git(tree, "-c", "core.editor=true", "rebase", "--continue").returncode == 0
    carried = rebase.continue_rebase(job(conflict))
    assert [patch.action for patch in carried] == [
        "dropped, as requested, or because it was empty", "merged: read it before you trust it", "applies as it is",
    ]  # fmt: skip
    assert [patch.name for patch in Queue.load(conflict.patches / "up-2.0").patches] == NAMES[1:]


def test_a_patch_can_be_dropped_by_number_or_by_editing_it_away(kit, conflict):
    tree = stopped(conflict, lambda world: rebase.begin_rebase(job(conflict, drop=["0001"])), NAMES[1])
    solve(kit, tree, b"line five, by upstream\n")
    carried = rebase.continue_rebase(job(conflict))
    assert [patch.in_queue for patch in carried] == [False, False, True]
    assert [patch.name for patch in Queue.load(conflict.patches / "up-2.0").patches] == [NAMES[2]]
    with pytest.raises(UsageError, match="cannot drop 0007"):
        job(conflict, drop=["0007"])


def test_a_rebase_that_was_not_begun_or_was_aborted_cannot_continue(kit, conflict):
    with pytest.raises(UsageError, match=r"no rebase to up-2\.0 is begun"):
        rebase.continue_rebase(job(conflict))
    tree = stopped(conflict, rebase.begin_rebase, NAMES[0])
    assert kit.git(tree, "rebase", "--abort").returncode == 0
    with pytest.raises(UsageError, match="was aborted"):
        rebase.continue_rebase(job(conflict))
    with pytest.raises(UsageError, match="--drop is for the beginning"):
        rebase.rebase_queue("up-2.0", "s", "0001", resume=True)


def test_a_commit_that_is_not_a_patch_is_refused(kit, conflict):
    tree = stopped(conflict, rebase.begin_rebase, NAMES[0])
    kit.git(tree, "rebase", "--skip")
    kit.git(tree, "rebase", "--skip")
    (tree / "pkg/b.py").write_text("my own\n")
    assert kit.git(tree, "commit", "--all", "--message=mine").returncode == 0
    with pytest.raises(UsageError, match="is not a patch of the queue"):
        rebase.continue_rebase(job(conflict))
    assert [path.name for path in conflict.patches.iterdir()] == ["up-1.0"]


def test_a_file_that_upstream_moved_is_left_to_a_person(kit, world):
    files = {**world.V1, "pkg/b.py": None, "pkg/c.py": "value = 1\nmore = 1\n"}
    world.release("2.0", files)
    tree = stopped(world, rebase.begin_rebase, NAMES[2])
    assert kit.git(tree, "rm", "--quiet", "pkg/b.py").returncode == 0
    (tree / "pkg/c.py").write_text("value = 2\nmore = 1\n")  # the new path of b.py
    kit.git(tree, "add", "pkg/c.py")
    rebase.continue_rebase(job(world))
    assert result(world, files)["pkg/c.py"] == "value = 2\nmore = 1\n"
    assert "-value = 1\n+value = 2\n more = 1\n" in (world.patches / "up-2.0" / NAMES[2]).read_text()


def test_no_queue_is_written_if_upstream_has_every_patch(world):
    world.release("2.0", edited(world, "line 11", "nothing of the kind"))
    assert {patch.in_queue for patch in rebase.begin_rebase(job(world))} == {False}
    assert [path.name for path in world.patches.iterdir()] == ["up-1.0"]
