"""Applying the overlay to upstream's wheel, with real libraries by the compiler; other wheels are refused."""

import json
import shutil
import subprocess

import pytest
from expected import refused

from sparkforge.compile import stages
from sparkforge.core import manifest
from sparkforge.core.files import sha256_file, write_json

pytestmark = pytest.mark.needs("c++")
NAMES = ("vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so")


def library(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".cc")
    source.write_text(f'extern "C" int number() {{ return {number}; }}\n')
    subprocess.run([shutil.which("c++"), "-shared", "-fPIC", source, "-o", path], check=True)
    source.unlink()


@pytest.fixture
def overlay(tmp_path):
    path = tmp_path / "overlay"
    for number, name in enumerate(NAMES):
        library(path / name, number)
    outputs = {name: sha256_file(path / name) for name in NAMES}
    document = {
        "stage": "vllm", "inputs": {}, "outputs": outputs, "tools": {}, "facts": {"vllm": "0.32.0"}, "seconds": 1.0,
    }  # fmt: skip
    write_json(manifest.beside(path), {**document, "schema": manifest.SCHEMA})
    return path


@pytest.fixture
def tree(tmp_path):
    """A site-packages with upstream's wheel, hard-linked from a cache as by uv."""
    path = tmp_path / "site-packages"
    (path / "vllm-0.32.0.dist-info").mkdir(parents=True)
    for name in NAMES:
        library(path / name, 9)
        (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / name).hardlink_to(path / name)
    return path


def hashes(root):
    return {name: sha256_file(root / name) for name in NAMES}


def test_the_libraries_are_replaced_and_their_hashes_are_on_record(overlay, tree, tmp_path):
    before = hashes(tree)
    stages.install_overlay(overlay, str(tree))
    assert hashes(tree) == hashes(overlay)
    record = json.loads((tree / stages.RECORD).read_text())
    assert record["files"] == {name: {"after": sha256} for name, sha256 in hashes(overlay).items()}
    assert hashes(tmp_path / "cache") == before, "a hard link is not written through"


REFUSED = {
    r"for vllm 0\.32\.0, and there is 0\.31\.0": lambda _overlay, tree: (tree / "vllm-0.32.0.dist-info").rename(
        tree / "vllm-0.31.0.dist-info"
    ),
    f"has no {NAMES[1]}": lambda _overlay, tree: (tree / NAMES[1]).rename(tree / "elsewhere"),
    "a library was changed": lambda overlay, _tree: (overlay / NAMES[0]).write_bytes(b"x"),
    "it has no manifest of a build from source beside it": lambda overlay, _tree: manifest.beside(overlay).unlink(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsuitable_overlays_are_refused_and_nothing_is_replaced(overlay, tree, reason):
    REFUSED[reason](overlay, tree)
    before = sha256_file(tree / NAMES[0])
    with refused("compile.incomplete", reason):
        stages.install_overlay(overlay, str(tree))
    assert sha256_file(tree / NAMES[0]) == before
    assert not (tree / stages.RECORD).exists()
