"""Kernels from a folder or a hub repository: calls of the package `kernels`, and its absence.

test_hub_repository.py uses the real package.
"""

import sys
from types import SimpleNamespace

import pytest

from spark_mxfp4 import registry
from spark_mxfp4.kernels import hub as hub_kernels
from spark_mxfp4.kernels.hub import KernelSource


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("./mine", KernelSource("./mine", "", "moe")),
        ("/opt/kernels/moe#fast", KernelSource("/opt/kernels/moe", "", "fast")),
        ("~/k@2#f", KernelSource("~/k@2", "", "f")),
        ("owner/name@1", KernelSource("owner/name", "1", "moe")),
        ("owner/name@v1.2#f", KernelSource("owner/name", "v1.2", "f")),
    ],
)
def test_names_are_split(name, source):
    assert hub_kernels.parse(name) == source
    assert source.is_folder == (name[0] in "./~")


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ValueError, match=r"the package 'kernels' is missing · pip install 'kernels>=0\.17,<0\.18'"):
        registry.load("owner/name@1")


@pytest.fixture
def hub(monkeypatch):
    asked = []

    def get_kernel(repository, **options):
        asked.append((repository, options))
        return SimpleNamespace(moe=lambda *_: "moe", fast=lambda *_: "fast")

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel, get_local_kernel=get_kernel))
    return asked


def test_a_number_is_a_version_anything_else_a_revision_and_code_is_trusted_only_when_asked(hub, monkeypatch):
    assert registry.load("owner/name@1").run(*[None] * 4) == "moe"
    assert registry.load("owner/name@b5c939d#fast").run(*[None] * 4) == "fast"
    monkeypatch.setenv("SPARK_MXFP4_TRUST_REMOTE_CODE", "1")
    registry.load("owner/name@1")
    assert hub == [
        ("owner/name", {"version": 1, "trust_remote_code": False}),
        ("owner/name", {"revision": "b5c939d", "trust_remote_code": False}),
        ("owner/name", {"version": 1, "trust_remote_code": True}),
    ]


def test_a_folder_is_passed_as_one_path(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registry.load("./mine")
    assert hub == [(tmp_path / "mine", {})]
