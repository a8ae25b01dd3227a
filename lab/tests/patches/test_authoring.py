"""Write new patches that our own strict loader accepts."""

import pytest
from expected import refused

from lab.patches import authoring
from lab.tests.patches.conftest import commit_all, draft, drop_last
from sparkforge.core import paths
from sparkforge.core.errors import PatchError, UsageError
from sparkforge.patching.series import Queue

FIELDS = {"description": "Do more\nand say why", "bug": "https://example.org/2",
          "drop_when": "contains pkg/b.py more ; lacks pkg/b.py value"}  # fmt: skip
NAME = "0004-do-more.patch"


@pytest.fixture
def checkout(world):
    return authoring.begin_patch(draft(world))


def edit(checkout):
    (checkout / "pkg/b.py").write_text("value = 3\nno newline")
    (checkout / "pkg/deep").mkdir()
    (checkout / "pkg/deep/made.py").write_text("made\n")
    (checkout / "pkg/n.py").unlink()
    (checkout / "pkg/__pycache__").mkdir()
    (checkout / "pkg/__pycache__/b.cpython-311.pyc").write_bytes(b"\0")


def test_the_scratch_copy_is_the_patched_tree(kit, world, checkout):
    files = {path: data.decode() for path, data in kit.snapshot(checkout).items() if not path.startswith(".git/")}
    assert files == {path: text for path, text in world.AFTER[2].items() if text is not None}
    edit(checkout)
    assert authoring.begin_patch(draft(world)) == checkout  # a second call keeps the edits
    assert (checkout / "pkg/deep/made.py").exists()


def test_the_patch_gets_a_header_joins_the_queue_and_makes_the_same_bytes(kit, world, checkout, tmp_path):
    edit(checkout)
    paths = ("pkg/a.py", "pkg/b.py", "pkg/deep/made.py", "pkg/other.py")
    wanted = {path: (checkout / path).read_bytes() for path in paths}
    file = authoring.finish_patch(draft(world), FIELDS)
    assert file == world.folder / NAME
    added = world.queue().patches[-1]
    assert (added.name, added.header["Description"]) == (NAME, "Do more\nand say why")
    assert [str(condition) for condition in added.drop_when] == ["contains pkg/b.py more", "lacks pkg/b.py value"]
    assert [change.path for change in added.changes] == ["pkg/b.py", "pkg/deep/made.py", "pkg/n.py"]
    released = {path: text.encode() for path, text in world.V1.items() if text is not None}
    after = released | world.queue().apply({path: released.get(path) for path in world.queue().paths})
    assert {path: data for path, data in after.items() if data is not None} == wanted
    assert not checkout.exists()
    with pytest.raises(UsageError, match="in the queue already"):
        draft(world)


def test_commits_in_the_scratch_copy_count_too(kit, world, checkout):
    edit(checkout)
    commit_all(kit, checkout, "mine")
    authoring.finish_patch(draft(world), FIELDS)
    assert len(world.queue().patches) == 4


REFUSED = {
    "nothing edited": (lambda checkout: None, {}, UsageError, "changes nothing"),
    "no description": (edit, {"description": ""}, UsageError, "add --description"),
    "no bug and no Drop-when": (edit, {"bug": "", "drop_when": " "}, UsageError, "add --bug … --drop-when"),
    "a Drop-when of no kind": (edit, {"drop_when": "when merged"}, PatchError, "Drop-when that is not"),
    "a Drop-when that holds": (edit, {"drop_when": "contains pkg/b.py value"}, UsageError, "holds on up-1.0"),
    "a binary file": (lambda p: (p / "pkg/blob").write_bytes(b"\0\1\2"), {}, PatchError, "binary change"),
    "a program": (lambda checkout: (checkout / "pkg/b.py").chmod(0o755), {}, PatchError, "changes a file's mode"),
    "a link": (lambda checkout: (checkout / "pkg/l").symlink_to("/etc/passwd"), {}, PatchError, "touches a link"),
    "carriage returns": (lambda p: (p / "pkg/b.py").write_bytes(b"x\r\n"), {}, PatchError, "carriage returns"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_patches_are_refused_and_the_queue_is_unchanged(kit, world, checkout, case):
    change, fields, error, message = REFUSED[case]
    change(checkout)
    before = kit.snapshot(world.folder)
    with pytest.raises(error, match=message):
        authoring.finish_patch(draft(world), {**FIELDS, **fields})
    assert kit.snapshot(world.folder) == before


def test_a_queue_that_changed_meanwhile_is_noticed(kit, world, checkout):
    edit(checkout)
    drop_last(world)
    before = kit.snapshot(world.folder)
    with pytest.raises(PatchError):
        authoring.finish_patch(draft(world), FIELDS)
    assert kit.snapshot(world.folder) == before


@pytest.mark.parametrize("name", ["Capital", "../up", "a/b", "", "with space", "under_score", "-x"])
def test_a_bad_name_is_refused_before_anything_is_written(world, name):
    with pytest.raises(UsageError, match="is no name for a patch"):
        draft(world, name)
    assert not (paths.state() / "patch").exists()


def test_finishing_what_was_not_begun(world):
    with pytest.raises(UsageError, match="was not begun"):
        authoring.finish_patch(draft(world), FIELDS)


@pytest.mark.parametrize("named", [False, True])
def test_the_next_run_removes_what_a_killed_run_left(kit, world, named):
    before = kit.snapshot(world.folder)
    (world.folder / f".{NAME}.new").write_text("whole, but not in its place")
    if named:
        (world.folder / "series").write_bytes(before["series"] + f"{NAME}\n".encode())
        with pytest.raises(PatchError, match=f"names files that are not there: {NAME}"):
            Queue.load(world.folder)
    draft(world, "something-else")
    assert kit.snapshot(world.folder) == before


def test_a_patch_written_by_hand_under_the_same_name_is_not_removed(world):
    mine = world.folder / NAME
    mine.write_text("my own work, not yet in series")
    with refused("patch.format", "not in `series`"):
        draft(world)
    assert mine.read_text() == "my own work, not yet in series"
