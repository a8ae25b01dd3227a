"""Laying the overlay over upstream's wheel: real libraries, made by the compiler; never half, never over another."""

import json
import shutil
import subprocess

import pytest
from expected import refused

from sparkforge.compile.vllm import overlay as vllm_overlay
from sparkforge.core import manifest
from sparkforge.core.errors import UsageError
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
        "stage": "vllm",
        "inputs": {},
        "outputs": outputs,
        "tools": {},
        "facts": {"vllm": "0.32.0"},
        "seconds": 1.0,
    }
    write_json(manifest.beside(path), {**document, "schema": manifest.SCHEMA})
    return path


@pytest.fixture
def tree(tmp_path):
    """A site-packages with upstream's wheel in it, hard-linked into a cache as uv does."""
    path = tmp_path / "site-packages"
    (path / "vllm-0.32.0.dist-info").mkdir(parents=True)
    for name in NAMES:
        library(path / name, 9)
        (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / name).hardlink_to(path / name)
    return path


def hashes(root):
    return {name: sha256_file(root / name) for name in NAMES}


def test_the_libraries_are_replaced_once_and_what_was_there_is_on_record(overlay, tree, tmp_path):
    before = hashes(tree)
    assert vllm_overlay.replace_libraries(overlay, tree) is True
    assert hashes(tree) == hashes(overlay)
    record = json.loads((tree / vllm_overlay.RECORD).read_text())
    assert record["files"] == {name: {"before": before[name], "after": hashes(overlay)[name]} for name in NAMES}
    assert hashes(tmp_path / "cache") == before, "a hard link is not written through"
    assert vllm_overlay.replace_libraries(overlay, tree) is False
    assert json.loads((tree / vllm_overlay.RECORD).read_text()) == record


def test_a_killed_run_is_finished_and_still_knows_what_upstream_had(overlay, tree, monkeypatch):
    before = hashes(tree)
    real, calls = shutil.copyfileobj, []

    def killed(source, target):
        if calls:
            raise KeyboardInterrupt
        calls.append(source)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", killed)
        with pytest.raises(KeyboardInterrupt):
            vllm_overlay.replace_libraries(overlay, tree)
    assert hashes(tree) not in (before, hashes(overlay))
    assert vllm_overlay.replace_libraries(overlay, tree) is True
    assert hashes(tree) == hashes(overlay)
    record = json.loads((tree / vllm_overlay.RECORD).read_text())["files"]
    assert {name: record[name]["before"] for name in NAMES} == before


def of_another_cpu(_overlay, tree):
    data = bytearray((tree / NAMES[1]).read_bytes())
    data[18:20] = (183 if data[18] == 62 else 62).to_bytes(2, "little")  # e_machine: EM_AARCH64, EM_X86_64
    (tree / NAMES[1]).unlink()
    (tree / NAMES[1]).write_bytes(data)


REFUSED = {
    r"for vllm 0\.32\.0, and there is 0\.31\.0": lambda _overlay, tree: (tree / "vllm-0.32.0.dist-info").rename(
        tree / "vllm-0.31.0.dist-info"
    ),
    r"it is for (aarch64|x86_64), and the overlay for (x86_64|aarch64)": of_another_cpu,
    "cannot be replaced": lambda _overlay, tree: (tree / NAMES[0]).write_bytes(b"no library"),
    "is gone or not the one that was made": lambda overlay, _tree: (overlay / NAMES[0]).write_bytes(b"x"),
    "it has no manifest of a build from source beside it": lambda overlay, _tree: manifest.beside(overlay).unlink(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_replaced(overlay, tree, reason):
    REFUSED[reason](overlay, tree)
    before = hashes(tree)
    with refused("compile.incomplete", reason):
        vllm_overlay.replace_libraries(overlay, tree)
    assert hashes(tree) == before
    assert not (tree / vllm_overlay.RECORD).exists()


def test_a_folder_that_is_not_there_is_named(overlay):
    with pytest.raises(UsageError, match="there is no such folder"):
        vllm_overlay.install_overlay(overlay, "/nowhere/site-packages")
