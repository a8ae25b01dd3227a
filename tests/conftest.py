"""Fixtures and hooks for all tests: separate state and cache folders, the schedule of workers, and skipped tests."""

import functools
import itertools
import os
import random
import shutil
import signal
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from programs import require

from sparkforge import pins
from sparkforge.core import paths
from sparkforge.core.paths import ROOT

# With several workers (lab/suite.py) all tests of a file run on the same worker, and so do all files of a kind listed
# here: they share a server and its ports, the installed compilers (one process at a time), or source trees with their
# bytecode. The kinds that take longest come first. Tests on a container engine or a GPU run after test_road.py, which
# stops its server at the end.
KINDS = {
    "serves": ("engine/", "device/", *(f"integration/test_{name}.py" for name in ("bench", "road"))),
    "compiles": tuple(f"integration/test_{name}.py" for name in ("audit", "classic_failure", "kernels")),
    "runs vLLM": tuple(
        f"integration/test_{name}.py"
        for name in ("compile_once", "plan_kv", "serve_profiles", "submissions", "upstream_check", "validate_deep")
    ),
    "runs the scripted model": tuple(
        f"integration/test_{name}.py" for name in ("access", "conversations", "harmony_forms")
    ),
}

# Packages that `./inv test --fast` does not install: tests that import one of them are skipped.
LEFT_OUT = {"torch", "transformers", "safetensors", "triton", "vllm", "openai_harmony", "tokenizers", "kernels"}

# A git hook sets these variables. With them, git in a test would write into the repository that runs the hook.
for name in [name for name in os.environ if name.startswith("GIT_")]:
    del os.environ[name]


def kind(nodeid):
    """Return the kind of a test's file, or the file itself if it has no kind."""
    path = nodeid.partition("::")[0]
    return next((name for name, files in KINDS.items() if path.partition("tests/")[2].startswith(files)), path)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # set by pytest-xdist in its workers
        ranks = {name: rank for rank, name in enumerate(KINDS)}
        items.sort(key=lambda item: (ranks.get(kind(item.nodeid), 9), not item.get_closest_marker("integration")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.option.dist == "worksteal":  # no test of `--fast` shares a server or a compiler
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByKind(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return kind(nodeid)

    config.option.loadscopereorder = False  # else the files with most tests come first
    return ByKind(config, log)


@pytest.fixture(scope="session", autouse=True)
def certificates():
    """Read the default certificates once for all httpx clients; each client would take 10 ms."""
    with pytest.MonkeyPatch.context() as patch:
        read = httpx.create_ssl_context
        cached = functools.cache(lambda trust_env, *_files: read(trust_env=trust_env))

        def create(verify=True, cert=None, trust_env=True):
            files = map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR"))
            return cached(trust_env, *files) if verify is True and not cert else read(verify, cert, trust_env)

        patch.setattr("httpx._transports.default.create_ssl_context", create)
        yield


@pytest.fixture(scope="session")
def state_folders(tmp_path_factory):
    """Yield a folder for each test; `mktemp` would read the list of all folders for each of them."""
    parent = tmp_path_factory.mktemp("places")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_folders(state_folders, monkeypatch, request):
    if request.node.get_closest_marker("integration"):
        yield  # these tests download real files; the shared cache, verified by hash, avoids repeated downloads
        return
    folder = next(state_folders)
    for name in ("state", "cache"):
        (folder / name).mkdir(mode=0o700, parents=True)
        monkeypatch.setenv(f"SPARKFORGE_{name.upper()}", str(folder / name))
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def empty_root(tmp_path, monkeypatch):
    """An empty folder in place of the checkout: `tmp_path`/checkout."""
    root = tmp_path / "checkout"
    root.mkdir()
    monkeypatch.setattr(paths, "ROOT", root)
    return root


@pytest.fixture
def use_pins(monkeypatch):
    """Return a function that makes the code read another table of pins."""
    return lambda table: monkeypatch.setattr(pins, "load", lambda: table)


@pytest.fixture(scope="session")
def large_folder(tmp_path_factory):
    """Return a context manager: a new folder for hundreds of megabytes, removed at the end, also after a failure."""

    @contextmanager
    def large_folder(name):
        folder = tmp_path_factory.mktemp(name)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return large_folder


@pytest.fixture(scope="session")
def free_port():
    """Return a function that returns a free port, if possible below the range of ports for outgoing connections."""
    outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(20_000, outgoing) or range(20_000, 60_000)

    def free_port():
        while True:
            port = random.SystemRandom().choice(ports)
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port

    return free_port


@pytest.fixture(scope="session")
def ended():
    """Return a function: True as soon as a process has ended; False if it still runs after `seconds`.

    Sending SIGKILL returns before the process is gone. A zombie counts as ended: in a container it may never be reaped.
    """

    def ended(pid, seconds=30.0):
        deadline = time.monotonic() + seconds
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
        return True

    return ended


@pytest.fixture
def signals_not_ignored():
    """Make SIGINT and SIGHUP end the programs that a test starts, also where pytest itself ignores these signals.

    A program inherits ignored signals: SIGHUP under nohup, SIGINT if a shell started pytest in the background. A signal
    with a handler has its default action in a new program (execve(2)); the empty handler still ignores it in pytest.
    """
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def left_out(error):
    """Return the reason for skipping a test that raised `error`; empty if the test has failed."""
    if os.environ.get("SPARKFORGE_TEST_FAST") and isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        return f"--fast installs no {package}" if package in LEFT_OUT else ""
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule(module_path, parent):
    """Skip a file if its imports need a package that --fast does not install."""
    module = yield
    load = module._getobj

    def load_or_skip():
        try:
            return load()
        except module.CollectError as error:
            if reason := left_out(error.__cause__):
                pytest.skip(reason, allow_module_level=True)
            raise

    module._getobj = load_or_skip
    return module


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test if it imports a package that --fast does not install."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if reason := left_out(error):
            pytest.skip(reason)
        raise


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            require(program)


@pytest.fixture(scope="session")
def gb10_sheet():
    """Return a function of a stack: the recorded fact sheet of a GB10, as text, with the versions of that stack."""
    table = pins.load()
    recorded = (ROOT / "tests/unit/validate/sheets/gb10-from-public-documents.json").read_text(encoding="utf-8")

    def sheet(stack):
        text = recorded
        for name, component in table.stack(stack).components.items():
            text = text.replace(f'"{table.component(table.default, name).version}', f'"{component.version}')
        return text

    return sheet
