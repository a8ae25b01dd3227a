"""torch by pip: from a folder that pip is configured with, never a file with another hash."""

import hashlib
import platform
import sys
import zipfile

import pytest

from forge import torch_cpu
from forge.pins import Component
from sparkforge.errors import FetchError, HashMismatchError

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
    monkeypatch.setattr(torch_cpu, "PYTORCH_CPU_INDEX", "http://127.0.0.1:1/")
    return folder


def pinned(sha256):
    return Component(
        version="2.13.0+cpu", kind="wheel", package="torch", licence="BSD-3-Clause", why="test", files={WHEEL: sha256}
    )


def test_it_comes_from_where_pip_looks_and_then_from_the_cache(folder):
    data = (folder / WHEEL).read_bytes()
    torch = pinned(hashlib.sha256(data).hexdigest())
    path = torch_cpu.fetch_torch(torch)
    assert path.read_bytes() == data
    (folder / WHEEL).unlink()
    assert torch_cpu.fetch_torch(torch) == path


def test_another_file_of_the_same_name_is_refused_and_not_kept(folder):
    with pytest.raises(HashMismatchError, match="pip config list"):
        torch_cpu.fetch_torch(pinned("0" * 64))
    assert not list(torch_cpu.fetch.cached(WHEEL, "0" * 64).parent.iterdir())


def test_none_anywhere_says_how_to_point_pip_at_one(folder):
    (folder / WHEEL).unlink()
    with pytest.raises(FetchError, match="PIP_FIND_LINKS"):
        torch_cpu.fetch_torch(pinned("0" * 64))
