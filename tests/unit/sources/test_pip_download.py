"""A wheel by pip: from a folder that pip is configured with, never a file with another hash."""

import hashlib
import platform
import sys
import zipfile

import pytest
from expected import refused

from sparkforge.core import installers
from sparkforge.pins import Component
from sparkforge.sources import pip_download

WHEEL = f"torch-2.13.0+cpu-cp3{sys.version_info[1]}-cp3{sys.version_info[1]}-linux_{platform.machine()}.whl"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a small wheel of torch's name, and pip told to look there and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        info = "torch-2.13.0+cpu.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def pinned(sha256, size=1000):
    return Component(
        version="2.13.0+cpu",
        kind="wheel",
        package="torch",
        index="http://127.0.0.1:1/",
        licence="BSD-3-Clause",
        why="test",
        files={WHEEL: {"sha256": sha256, "size": size}},
    )


def test_it_comes_from_where_pip_looks_and_then_from_the_cache(folder):
    data = (folder / WHEEL).read_bytes()
    torch = pinned(hashlib.sha256(data).hexdigest())
    path = pip_download.fetch_wheel(torch, WHEEL)
    assert path.read_bytes() == data
    (folder / WHEEL).unlink()
    assert pip_download.fetch_wheel(torch, WHEEL) == path


def test_another_file_of_the_same_name_is_refused_and_not_kept(folder):
    with refused("integrity.hash", "pip config list"):
        pip_download.fetch_wheel(pinned("0" * 64), WHEEL)
    assert not list(pip_download.fetch.cached(WHEEL, "0" * 64).parent.iterdir())


def test_a_file_larger_than_its_pin_is_refused_and_not_kept(folder):
    with zipfile.ZipFile(folder / WHEEL, "a") as wheel:
        wheel.writestr("torch/large", bytes(4 << 20))  # stored, not compressed
    data = (folder / WHEEL).read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    with refused("integrity.hash", "has 1000 bytes"):
        pip_download.fetch_wheel(pinned(sha256), WHEEL)
    assert not list(pip_download.fetch.cached(WHEEL, sha256).parent.iterdir())


def test_none_anywhere_says_how_to_point_pip_at_one(folder, monkeypatch):
    monkeypatch.setattr(installers, "WAITS", (0.01,))
    (folder / WHEEL).unlink()
    with refused("network.fetch", "PIP_FIND_LINKS"):
        pip_download.fetch_wheel(pinned("0" * 64), WHEEL)
