"""A made-up upstream: releases as sdists in the cache, and a queue of three patches for 1.0, two on one line."""

from types import SimpleNamespace

import pytest

from lab.patches import authoring
from sparkforge.patching.series import Queue
from sparkforge.pins import Component, Pins

NAMES = [f"000{number}-change-something.patch" for number in (1, 2, 3)]
LINES = "".join(f"line {number}\n" for number in range(12))
V1 = {"pkg/a.py": LINES, "pkg/b.py": "value = 1\n", "pkg/other.py": "untouched\n", "pkg/gone.py": None}
AFTER = (
    {**V1, "pkg/a.py": LINES.replace("line 5", "LINE 5")},
    {**V1, "pkg/a.py": LINES.replace("line 5", "LINE FIVE")},
    {**V1, "pkg/a.py": LINES.replace("line 5", "LINE FIVE"), "pkg/b.py": "value = 2\n", "pkg/n.py": "new\n"},
)


@pytest.fixture
def world(kit, tmp_path):
    """The upstream `up`: pinned in 1.0 with the queue `patches/up-1.0`; `release(version, files)` adds another."""

    def release(version, files):
        return kit.seed(f"up-{version}.tar.gz", kit.sdist(f"up-{version}", files))

    steps = [V1, *AFTER]
    diffs = [kit.diff(tmp_path / f"d{number}", steps[number], steps[number + 1]) for number in range(3)]
    folder = kit.write_queue(tmp_path / "patches" / "up-1.0", *diffs)
    component = Component(version="1.0", kind="sdist", package="up", licence="MIT", why="test", patches="up-1.0",
                          files={"up-1.0.tar.gz": {"sha256": release("1.0", V1), "size": "unknown"}})  # fmt: skip
    stacks = {"s": {"summary": "a stack", "components": {"up": component}}}
    return SimpleNamespace(
        V1=V1, AFTER=AFTER, folder=folder, patches=folder.parent, component=component, release=release,
        table=Pins.model_validate({"schema": 1, "default": "s", "stacks": stacks}), queue=lambda: Queue.load(folder),
    )  # fmt: skip


def draft(world, name="do-more"):
    return authoring.prepare(world.table, name, "s", "up", world.patches)


def drop_last(world):
    """Remove the queue's last patch."""
    (world.folder / NAMES[2]).unlink()
    series = world.folder / "series"
    series.write_text(series.read_text().replace(f"{NAMES[2]}\n", ""))


def commit_all(kit, tree, message):
    kit.git(tree, "add", "--all")
    person = ("-c", "user.name=A Person", "-c", "user.email=person@example.org")
    result = kit.git(tree, *person, "commit", "--quiet", f"--message={message}")
    assert result.returncode == 0, result.stderr


@pytest.fixture
def clone(kit, world, tmp_path):
    tree = kit.write(tmp_path / "my clone", {**world.V1, "README": "read\n"})
    kit.git(tree, "init", "--quiet")
    commit_all(kit, tree, "release 1.0")
    kit.git(tree, "tag", "v1.0")
    return tree
