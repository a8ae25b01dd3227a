from dataclasses import dataclass, field

from expected import refused

from lab.upstream import releases, update
from sparkforge.pins import Component

TEXT = """\
[stacks.s.components.a]
version = "1.0"
files."a-1.0.tar.gz" = { sha256 = "1111", size = 10 }

[stacks."t-2.5".components.a]
version = "1.0"
files."a-1.0.tar.gz" = { sha256 = "1111", size = 10 }
"""


@dataclass
class Listed:
    filename: str
    version: str
    sha256: str = "2222"
    size: int | None = 20
    digests: dict = field(init=False)

    def __post_init__(self):
        self.digests = {"sha256": self.sha256} if self.sha256 else {}


def component(*files):
    pinned = {name: {"sha256": "1" * 64, "size": 10} for name in files}
    return Component(version="1.0", kind="sdist", package="a", licence="MIT", why="test", files=pinned)


def test_the_newest_final_release_counts():
    assert releases.newest(["1.0", "1.10", "1.9", "2.0rc1", "not a version", None]) == "1.10"
    assert releases.newest(["2.0rc1", None]) is None


def test_files_are_paired_by_their_names_and_each_needs_a_successor_with_a_hash():
    listed = [Listed("a-1.1.tar.gz", "1.1"), Listed("a-1.1-py3-none-any.whl", "1.1"), Listed("a-1.0.tar.gz", "1.0")]
    successor = update.successor("s", "a", component("a-1.0.tar.gz", "a-1.0-py3-none-any.whl"), "1.1", listed)
    assert successor.complete
    assert successor.files["a-1.0.tar.gz"] == ("a-1.1.tar.gz", "2222", 20)
    listed = [Listed("a-1.1.tar.gz", "1.1", sha256="")]
    successor = update.successor("s", "a", component("a-1.0.tar.gz", "a-1.0-arm.whl"), "1.1", listed)
    assert successor.missing == ("a-1.0.tar.gz", "a-1.0-arm.whl")
    assert update.diff([successor], TEXT) == ""


def test_the_diff_changes_the_one_table_only():
    pinned = component("a-1.0.tar.gz")
    text = TEXT.replace("1111", "1" * 64)
    for stack, untouched in (("s", '[stacks."t-2.5"'), ("t-2.5", "[stacks.s.")):
        successor = update.successor(stack, "a", pinned, "1.1", [Listed("a-1.1.tar.gz", "1.1")])
        lines = update.diff([successor], text).splitlines()
        assert [line for line in lines if line.startswith(("-v", "-f", "+v", "+f"))] == [
            '-version = "1.0"',
            f'-files."a-1.0.tar.gz" = {{ sha256 = "{"1" * 64}", size = 10 }}',
            '+version = "1.1"',
            '+files."a-1.1.tar.gz" = { sha256 = "2222", size = 20 }',
        ]
        assert not [line for line in lines if line.startswith(("-", "+")) and untouched in line]


def test_a_stack_that_is_not_pinned_is_refused():
    with refused("input.pins", "no stack nope"):
        update.print_updates("nope")
