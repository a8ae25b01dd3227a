"""Apply and reverse as commands: on a stack's unpacked sources, and on a tree that is named."""

import pytest

from forge import pins, queues, sources, status
from sparkforge.errors import UsageError


@pytest.fixture
def stack(world, monkeypatch):
    monkeypatch.setattr(pins, "load", lambda: world.table)
    named = status.queues
    monkeypatch.setattr(status, "queues", lambda table, stack: named(table, stack, world.patches))
    chosen = status.chosen
    monkeypatch.setattr(status, "chosen", lambda table, stack, against: chosen(table, stack, against, world.patches))
    return world


def test_sources_that_were_not_brought_are_asked_for(stack):
    with pytest.raises(UsageError) as caught:
        queues.show_apply("s")
    assert caught.value.fix.startswith("./inv sources --stack s")


def test_a_stacks_sources_are_patched_and_put_back_and_a_dry_run_writes_nothing(kit, stack, capsys):
    sources.unpack(stack.component, "up-1.0.tar.gz")
    place = sources.place(stack.component, "up-1.0.tar.gz")
    pristine = kit.snapshot(place)
    queues.show_apply("s", dry_run=True)
    assert kit.snapshot(place) == pristine
    assert "3 patches, 3 files changed (dry run: nothing was written)" in capsys.readouterr().err
    queues.show_apply("s")
    assert (place / "pkg/n.py").read_text() == "new\n"
    patched = kit.snapshot(place)
    queues.show_reverse("s", dry_run=True)
    assert kit.snapshot(place) == patched
    queues.show_reverse("s")
    assert kit.snapshot(place) == pristine


def test_a_named_tree_is_patched(kit, stack, tmp_path):
    tree = kit.write(tmp_path / "tree", stack.V1)
    queues.show_apply("s", str(tree), "up")
    assert (tree / "pkg/n.py").exists()
    queues.show_reverse("s", str(tree))
    assert not (tree / "pkg/n.py").exists()
