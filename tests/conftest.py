"""What every test gets: a state and a cache of its own, and a word when a program that it needs is missing."""

import os
import shutil
import signal

import pytest

from forge import index

INSTALL = {
    "git": "sudo apt install git",
    "c++": "sudo apt install g++",
    "ninja": "sudo apt install ninja-build",
    "cmake": "sudo apt install cmake",
    "chromium": "sudo apt install chromium",
}

# Where pytest has several workers (forge/suite.py) a file stays with one of them, and so do the files of one kind here:
# they share a server and its ports, the installed compilers (one process at a time), or copies of a tree. The longest
# come first; what runs on an engine or a GPU comes when test_road.py has ended its server.
KINDS = {
    "serves": ("engine/", "device/", *(f"integration/test_{name}.py" for name in ("bench", "doctor", "road"))),
    "compiles": tuple(
        f"integration/test_{name}.py" for name in ("audit", "classic_failure", "kernels", "toolchain", "vllm_build")
    ),
    "asks vLLM": ("integration/test_routing_patch.py", "integration/test_validate_deep.py"),
}


def kind(nodeid):
    """Return the kind of a test's file; the file itself if it is of none."""
    path = nodeid.partition("::")[0]
    return next((name for name, files in KINDS.items() if path.partition("tests/")[2].startswith(files)), path)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # set by pytest-xdist in its workers
        ranks = {name: rank for rank, name in enumerate(KINDS)}
        items.sort(key=lambda item: (ranks.get(kind(item.nodeid), 9), not item.get_closest_marker("integration")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByKind(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return kind(nodeid)

    config.option.loadscopereorder = False  # else the files with most tests come first
    return ByKind(config, log)


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


@pytest.fixture
def nothing_is_ignored():
    """Let programs that a test starts feel SIGINT and SIGHUP, also where pytest itself was told to ignore them.

    A program inherits what is ignored: SIGHUP under nohup, SIGINT where a shell put us in the background. What has a
    handler it gets back as the default (execve(2)), and pytest itself still lets the signal pass.
    """
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def pytest_runtest_setup(item):
    """Skip a test whose program is missing, and say what installs it; on CI that is a failure."""
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            if shutil.which(program) is None:
                told = f"{program} is not installed: {INSTALL[program]}"
                if os.environ.get("CI"):
                    pytest.fail(told)
                pytest.skip(told)
