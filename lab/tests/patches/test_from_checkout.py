"""Patches that are written from a checkout of upstream which holds the queue, with real git."""

import pytest

from lab.patches import authoring
from lab.tests.patches.conftest import commit_all, draft
from lab.tests.patches.test_checkout import commit, state
from sparkforge.core.errors import PatchError, UsageError

FIELDS = {"bug": "https://example.org/2", "drop_when": "contains pkg/b.py more"}


def test_the_edits_beyond_the_queue_become_a_patch(kit, world, clone, capsys):
    commit(world, clone)
    (clone / "pkg/other.py").write_text("touched\n")
    commit_all(kit, clone, "mine")
    (clone / "pkg/b.py").write_text("value = 3\n")
    (clone / "notes.txt").write_text("mine\n")
    before = state(kit, clone)
    file = authoring.write_patch(draft(world), clone, {**FIELDS, "description": "Do more"})
    assert file == world.folder / "0004-do-more.patch"
    assert [change.path for change in world.queue().patches[-1].changes] == ["pkg/b.py", "pkg/other.py"]
    assert "git does not know them (git add makes it): notes.txt" in " ".join(capsys.readouterr().err.split())
    assert state(kit, clone) == before


def test_one_commit_becomes_a_patch_with_its_message_as_the_description(kit, world, clone):
    commit(world, clone)
    (clone / "pkg/other.py").write_text("touched\n")
    commit_all(kit, clone, "Touch the other\n\nIt was untouched.\n\nFor long.")
    (clone / "pkg/b.py").write_text("value = 3\n")
    commit_all(kit, clone, "Something else")
    authoring.write_patch(draft(world), clone, FIELDS, commit="HEAD~1")
    patch = world.queue().patches[-1]
    assert patch.header["Description"] == "Touch the other\n.\nIt was untouched.\n.\nFor long."
    assert [change.path for change in patch.changes] == ["pkg/other.py"]


def test_a_patch_of_a_program_contains_no_mode(kit, world, clone):
    (clone / "pkg/other.py").chmod(0o755)
    commit_all(kit, clone, "release 1.0, with a program")
    commit(world, clone)
    (clone / "pkg/other.py").write_text("touched\n")
    authoring.write_patch(draft(world), clone, {**FIELDS, "description": "Do more"})
    assert [change.path for change in world.queue().patches[-1].changes] == ["pkg/other.py"]


def test_a_commit_that_needs_another_one_is_refused(kit, world, clone):
    commit(world, clone)
    for text in ("touched\n", "touched twice\n"):
        (clone / "pkg/other.py").write_text(text)
        commit_all(kit, clone, text)
    before = kit.snapshot(world.folder)
    with pytest.raises(PatchError, match=r"it does not apply after up-1\.0") as caught:
        authoring.write_patch(draft(world), clone, FIELDS, commit="HEAD")
    assert "git rebase -i" in caught.value.fix
    assert kit.snapshot(world.folder) == before


def test_a_checkout_without_the_queue_is_refused(kit, world, clone):
    (clone / "pkg/b.py").write_text("value = 3\n")
    with pytest.raises(UsageError, match=r"does not hold the queue up-1\.0.*lab\.patches into"):
        authoring.write_patch(draft(world), clone, {**FIELDS, "description": "Do more"})
