import hashlib
import shutil

import pytest
from expected import refused
from programs import write_files

from sparkforge.core import manifest, paths
from sparkforge.core.errors import UsageError
from sparkforge.sources import archive, fetch, offline, trees

FILES = {"CMakeLists.txt": "project(up)\n", "pkg/a.py": "x = 1\n", "pkg/b.py": "y = 2\n"}


def test_an_archive_is_unpacked_once_with_its_listing_and_manifest(kit):
    pins = kit.upstream(FILES)
    fetched = trees.fetch_sources("s", table=pins)
    unpacked = trees.tree_folder(pins.component("s", "up"), "up-1.tar.gz")
    assert [(tree.name, tree.state, tree.path) for tree in fetched] == [("up", "made", unpacked)]
    assert kit.snapshot(unpacked) == {path: text.encode() for path, text in FILES.items()}
    recorded = manifest.load(unpacked)
    assert recorded.inputs["up-1.tar.gz"].startswith(unpacked.name)
    assert recorded.outputs["listing"] == hashlib.sha256(archive.listing_path(unpacked).read_bytes()).hexdigest()
    shutil.rmtree(paths.cache())  # the next run reads no archive
    assert [tree.state for tree in trees.fetch_sources("s", table=pins)] == ["unchanged"]
    with refused("input.pins", r"pins.toml has s"):
        trees.fetch_sources("t", table=pins)


def test_a_needed_repository_that_cannot_be_had_is_missing_and_the_rest_is_kept(kit):
    sha256 = kit.seed("up-1.tar.gz", kit.sdist("up-1", {"CMakeLists.txt": kit.asks}))
    pins = kit.table({"up": kit.component({"up-1.tar.gz": sha256})}, {"dep": kit.dependency})
    fetched = trees.fetch_sources("s", table=pins)
    assert [(tree.name, tree.state) for tree in fetched] == [("up", "made"), ("dep", "missing")]
    with refused("network.fetch", r"1 of 2 sources are missing.*git init -q dep"):
        trees.require_all(fetched, pins.stacks["s"].git)
    assert [tree.state for tree in trees.fetch_sources("s", table=pins, git=False)] == ["unchanged", "left out"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in (offline.VARIABLE, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    (tmp_path / "bundle/files").mkdir(parents=True)
    return write_files(tmp_path / "bundle", {"index.json": "{}"})


def test_offline_takes_files_from_the_bundle_checks_them_and_asks_no_network(folder, kit):
    sha256 = hashlib.sha256(b"data").hexdigest()
    with pytest.raises(UsageError, match="not an unpacked bundle"):
        offline.use(folder / "files")
    offline.use(folder)
    with refused("network.fetch", "the bundle has no such file"):
        fetch.fetch("up", "f.whl", sha256)
    write_files(folder / "files" / sha256, {"f.whl": "dat4"})
    with refused("integrity.hash", "the bundle has"):
        fetch.fetch("up", "f.whl", sha256)
    assert not fetch.cached("f.whl", sha256).exists()
    (folder / "files" / sha256 / "f.whl").write_bytes(b"data")
    assert fetch.fetch("up", "f.whl", sha256).read_bytes() == b"data"
