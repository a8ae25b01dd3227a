"""Unpack the sources of a stack from the cache into a tree."""

from functools import cache

from robustness import scenario
from robustness.scenario import BUSY, Scenario, cached, component, write
from robustness.scenarios import archives, patching
from sparkforge.core import manifest
from sparkforge.sources import trees

FILES = {**{name: text.encode() for name, text in patching.BEFORE.items()}, "CMakeLists.txt": b"project(up)\n"}
ARCHIVE = archives.tar("up-1", FILES)


@cache
def table():
    return scenario.table({"up": component("up", "up-1.tar.gz", ARCHIVE, "sdist")})


def _tree():
    return trees.tree_folder(table().component("s", "up"), "up-1.tar.gz")


def _prepare(work):
    cached("up-1.tar.gz", ARCHIVE)
    write(work / "state/sources/mine.txt", "mine")
    write(_tree().parent / "mine-000000000000/a.py", "mine")


def _bring(work):
    trees.fetch_sources("s", table=table())


def _judge(work):
    """A tree with a valid manifest has upstream's bytes."""
    if manifest.load(_tree()) and _tree().exists():
        for path, content in FILES.items():
            assert (_tree() / path).read_bytes() == content, path


SCENARIOS = [Scenario("sources", _prepare, _bring, _judge, volatile=("*.manifest.json",), races=(0, BUSY))]
