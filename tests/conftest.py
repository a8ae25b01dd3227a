"""What every test gets: a state and a cache of its own, and a word when a program that it needs is missing."""

import os
import shutil

import pytest

from forge import index

INSTALL = {
    "git": "sudo apt install git",
    "c++": "sudo apt install g++",
    "ninja": "sudo apt install ninja-build",
    "cmake": "sudo apt install cmake",
    "chromium": "sudo apt install chromium",
}


@pytest.fixture(autouse=True)
def own_places(tmp_path_factory, monkeypatch, request):
    if request.node.get_closest_marker("integration"):
        return  # these bring real files; the shared cache, verified by hash, saves downloading them again
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path_factory.mktemp("state")))
    monkeypatch.setenv("SPARKFORGE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def own_index():
    """Forget which package index a test had pip name: the next test may have another."""
    yield
    index.pip_config.cache_clear()


def pytest_runtest_setup(item):
    """Skip a test whose program is missing, and say what installs it; on CI that is a failure."""
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            if shutil.which(program) is None:
                told = f"{program} is not installed: {INSTALL[program]}"
                if os.environ.get("CI"):
                    pytest.fail(told)
                pytest.skip(told)
