"""Carrying a queue over: what is moved, merged, dropped, left to a person; and SIGKILL at every write."""

import contextlib
import re
import shutil
from datetime import datetime

import pytest

from forge import patch, rebase
from forge.series import Queue
from sparkforge import paths
from sparkforge.errors import PatchConflictError, UsageError

NAMES = [f"000{number}-change-something.patch" for number in (1, 2, 3)]


def job(world, version="2.0", drop=()):
    return rebase.prepare(world.table, "s", f"up-{version}", frozenset(drop), world.patches)


def result(kit, world, tmp_path, files):
    """Apply the new queue to the new release and return the tree's files."""
    tree = kit.write(tmp_path / "result", files)
    patch.apply(tree, Queue.load(world.patches / "up-2.0"))
    found = {path: data.decode() for path, data in kit.snapshot(tree).items() if not path.startswith(".sparkforge")}
    shutil.rmtree(tree)
    return found


def edited(world, old, new):
    return {**world.V1, "pkg/a.py": world.V1["pkg/a.py"].replace(old, new)}


def present(files):
    return {path: text for path, text in files.items() if text is not None}


def test_what_applies_is_copied_what_moved_is_rewritten_what_upstream_has_is_dropped(kit, world, tmp_path):
    files = {**edited(world, "line 0", "x\nline 0"), "pkg/b.py": "value = 2\n", "pkg/n.py": "new\n"}
    world.release("2.0", files)
    carried = rebase.run(job(world))
    assert [one.told for one in carried] == [
        "moved: pkg/a.py +1 lines", "moved: pkg/a.py +1 lines", "dropped, already upstream: its reverse applies",
    ]  # fmt: skip
    series = (world.patches / "up-2.0/series").read_text()
    assert f"#   {NAMES[2]}: dropped, already upstream: its reverse applies\n" in series
    moved = (world.patches / "up-2.0" / NAMES[0]).read_text()
    assert moved.startswith(kit.HEADER)
    assert "@@ -4,7 +4,7 @@" in moved
    assert result(kit, world, tmp_path, files) == present(
        {**files, "pkg/a.py": files["pkg/a.py"].replace("line 5", "LINE FIVE")}
    )


def test_patches_that_apply_are_the_same_bytes(world):
    world.release("2.0", world.V1)
    rebase.run(job(world))
    for name in NAMES:
        assert (world.patches / "up-2.0" / name).read_bytes() == (world.folder / name).read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        rebase.run(job(world))


def test_a_changed_context_is_merged_three_ways_and_said_so(kit, world, tmp_path):
    files = edited(world, "line 7", "line seven")
    world.release("2.0", files)
    carried = rebase.run(job(world))
    assert [one.told[:17] for one in carried] == ["merged three ways", "merged three ways", "applies as it is"]
    today = datetime.now().astimezone().date().isoformat()
    assert f"Last-Update: {today}\n" in (world.patches / "up-2.0" / NAMES[0]).read_text()
    assert result(kit, world, tmp_path, files)["pkg/a.py"] == files["pkg/a.py"].replace("line 5", "LINE FIVE")


@pytest.fixture
def conflict(world):
    """Release 2.0 changed the very line that the first two patches change."""
    world.release("2.0", edited(world, "line 5", "line five, by upstream"))
    return world


def solve(caught, text):
    """Do what the message says: edit the file with markers, here by putting `text` for every conflict."""
    place = re.search(r"edit the files under (\S+)", caught.value.fix)[1]
    (file,) = (path for path in paths.state().rglob("a.py") if str(path).startswith(place))
    found = file.read_bytes()
    assert b"<<<<<<< up 2.0\nline five, by upstream\n" in found or b"<<<<<<< up 2.0\nsolved" in found
    file.write_bytes(re.sub(rb"(?ms)^<{7} .*?^>{7} [^\n]*\n", text, found))


def test_a_conflict_is_left_to_a_person_and_the_same_command_goes_on(kit, conflict, tmp_path, capsys):
    before = kit.snapshot(conflict.patches)
    for number, text in ((1, b"solved\n"), (2, b"solved twice\n")):
        with pytest.raises(PatchConflictError) as caught:
            rebase.run(job(conflict))
        assert caught.value.what == f"{NAMES[number - 1]} does not apply to up 2.0"
        assert "pkg/a.py:6: both changed the same lines" in capsys.readouterr().err
        assert kit.snapshot(conflict.patches) == before
        with pytest.raises(PatchConflictError) as again:  # nothing edited: the same answer, the same file
            rebase.run(job(conflict))
        assert again.value.args == caught.value.args
        solve(caught, text)
    assert [one.told for one in rebase.run(job(conflict))] == ["merged by hand", "merged by hand", "applies as it is"]
    files = edited(conflict, "line 5", "line five, by upstream")
    assert result(kit, conflict, tmp_path, files)["pkg/a.py"] == conflict.V1["pkg/a.py"].replace(
        "line 5", "solved twice"
    )
    assert not list((paths.state() / "rebase").glob("up-2.0*"))  # the work folder is gone


def test_a_patch_can_be_dropped_by_number_or_by_editing_it_away(conflict):
    with pytest.raises(PatchConflictError) as caught:
        rebase.run(job(conflict, drop=["0001"]))
    solve(caught, b"line five, by upstream\n")
    carried = rebase.run(job(conflict, drop=["0001"]))
    assert [one.told for one in carried] == [
        "dropped, as asked", "dropped: after your edit it changes nothing", "applies as it is",
    ]  # fmt: skip
    assert [one.name for one in Queue.load(conflict.patches / "up-2.0").patches] == [NAMES[2]]
    with pytest.raises(UsageError, match="cannot drop 0007"):
        job(conflict, drop=["0007"])


def test_edits_of_another_conflict_are_never_taken(conflict):
    with pytest.raises(PatchConflictError) as caught:
        rebase.run(job(conflict))
    solve(caught, b"solved\n")
    conflict.release("3.0", edited(conflict, "line 5", "quite another"))
    shutil.copytree(paths.state() / "rebase/up-2.0", paths.state() / "rebase/up-3.0")
    with pytest.raises(PatchConflictError, match=r"0001-\S+ does not apply to up 3\.0"):
        rebase.run(job(conflict, "3.0"))


def test_a_file_that_upstream_moved_asks_a_person(kit, world, tmp_path):
    files = {**world.V1, "pkg/b.py": None, "pkg/c.py": "value = 1\n"}
    world.release("2.0", files)
    with pytest.raises(PatchConflictError, match=r"pkg/b\.py"):
        rebase.run(job(world))
    (left,) = (paths.state() / "rebase").rglob("b.py")
    left.unlink()
    left.with_name("c.py").write_text("value = 2\n")  # where the file went
    rebase.run(job(world))
    assert result(kit, world, tmp_path, files)["pkg/c.py"] == "value = 2\n"


def test_a_queue_that_upstream_has_wholly_is_not_written(world):
    world.release("2.0", edited(world, "line 11", "nothing of the kind"))
    assert {one.data for one in rebase.run(job(world))} == {None}
    assert [path.name for path in world.patches.iterdir()] == ["up-1.0"]


def test_killed_before_any_write_the_queue_is_whole_or_absent_and_the_next_run_ends_right(kit, world, tmp_path):
    files = edited(world, "line 0", "x\nline 0")
    world.release("2.0", files)
    target, count = world.patches / "up-2.0", 0
    rebase.run(job(world))
    whole = kit.snapshot(world.patches)
    shutil.rmtree(target)
    while kit.killed_before(count, lambda: rebase.run(job(world))):
        if target.exists():
            assert kit.snapshot(target) == {
                k.removeprefix("up-2.0/"): v for k, v in whole.items() if k.startswith("up-2.0")
            }
            shutil.rmtree(target)
        rebase.run(job(world))
        assert kit.snapshot(world.patches) == whole
        shutil.rmtree(target)
        count += 1
    assert count > 20


def test_killed_while_the_files_to_edit_are_laid_out(kit, conflict):
    home = paths.state() / "rebase"

    def ask():
        with contextlib.suppress(PatchConflictError):
            rebase.run(job(conflict))

    ask()
    whole = kit.snapshot(home)
    count = 0
    while True:
        shutil.rmtree(home)
        killed = kit.killed_before(count, ask)
        for place in home.glob("up-2.0/0001*"):
            assert kit.snapshot(place) == {
                path.split("/", 2)[2]: data for path, data in whole.items() if "/0001" in path
            }
        ask()
        assert kit.snapshot(home) == whole
        if not killed:
            break
        count += 1
    assert count > 5
