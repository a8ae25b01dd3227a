from dataclasses import dataclass, field

import pytest

from forge import update
from forge.pins import Component
from sparkforge.errors import PinError

TEXT = """\
[stacks.s.components.a]
version = "1.0"
files."a-1.0.tar.gz" = "1111"

[stacks."t-2.5".components.a]
version = "1.0"
files."a-1.0.tar.gz" = "1111"
"""


@dataclass
class Listed:
    filename: str
    version: str
    sha256: str = "2222"
    digests: dict = field(init=False)

    def __post_init__(self):
        self.digests = {"sha256": self.sha256} if self.sha256 else {}


def component(*files):
    pinned = dict.fromkeys(files, "1" * 64)
    return Component(version="1.0", kind="sdist", package="a", licence="MIT", why="test", files=pinned)


def test_the_newest_final_release_counts():
    assert update.newest(["1.0", "1.10", "1.9", "2.0rc1", "not a version", None]) == "1.10"
    assert update.newest(["2.0rc1", None]) is None


def test_files_are_paired_by_their_names():
    listed = [Listed("a-1.1.tar.gz", "1.1"), Listed("a-1.1-py3-none-any.whl", "1.1"), Listed("a-1.0.tar.gz", "1.0")]
    found = update.successor("s", "a", component("a-1.0.tar.gz", "a-1.0-py3-none-any.whl"), "1.1", listed)
    assert found.complete
    assert found.files["a-1.0.tar.gz"] == ("a-1.1.tar.gz", "2222")


def test_a_file_without_a_successor_or_without_a_hash_makes_it_incomplete():
    listed = [Listed("a-1.1.tar.gz", "1.1", sha256="")]
    found = update.successor("s", "a", component("a-1.0.tar.gz", "a-1.0-arm.whl"), "1.1", listed)
    assert found.missing == ("a-1.0.tar.gz", "a-1.0-arm.whl")
    assert update.diff([found], TEXT) == ""


def test_the_diff_changes_the_one_table_only():
    pinned = Component(
        version="1.0", kind="sdist", package="a", licence="MIT", why="test", files={"a-1.0.tar.gz": "1" * 64}
    )
    text = TEXT.replace("1111", "1" * 64)
    for stack, untouched in (("s", '[stacks."t-2.5"'), ("t-2.5", "[stacks.s.")):
        found = update.successor(stack, "a", pinned, "1.1", [Listed("a-1.1.tar.gz", "1.1")])
        lines = update.diff([found], text).splitlines()
        assert [line for line in lines if line.startswith(("-v", "-f", "+v", "+f"))] == [
            '-version = "1.0"',
            f'-files."a-1.0.tar.gz" = "{"1" * 64}"',
            '+version = "1.1"',
            '+files."a-1.1.tar.gz" = "2222"',
        ]
        assert not [line for line in lines if line.startswith(("-", "+")) and untouched in line]


def test_a_stack_that_is_not_pinned_is_refused():
    with pytest.raises(PinError, match="no stack nope"):
        update.show("nope")
