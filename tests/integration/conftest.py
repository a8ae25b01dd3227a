"""What several files use: the whole road, vLLM as upstream ships it and patched, a tiny checkpoint, a free port."""

import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge import patch
from forge.tree import record_name, store_name
from serve import tiny
from sparkforge.paths import ROOT

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".sparkforge", ".*_cache", "__pycache__", "*.egg-info", ".hypothesis"
)


@dataclass
class Checkout:
    """A fresh copy of the checkout and the port its server gets."""

    path: Path
    port: int

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self):
        return self.path / ".sparkforge"

    @property
    def environment(self):
        ours = ("SPARKFORGE_STATE", "PYTHONPATH", "OMP_NUM_THREADS")  # set for pytest (forge/suite.py), not by a user
        return {key: value for key, value in os.environ.items() if key not in ours}

    def inv(self, *args):
        command = ["./inv", *args]
        return subprocess.run(command, cwd=self.path, env=self.environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def free_port():
    """Return a function: a port that nobody has, and that no outgoing connection gets before it is used."""
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
def fresh(tmp_path_factory, free_port):
    path = tmp_path_factory.mktemp("fresh") / "checkout"
    shutil.copytree(ROOT, path, ignore=LEFT_OUT, symlinks=True)
    checkout = Checkout(path, free_port())
    yield checkout
    checkout.inv("down")
    shutil.rmtree(path / ".sparkforge", ignore_errors=True)  # gigabytes


@pytest.fixture(scope="session")
def killed_once(fresh):
    """Kill a first `./inv up` while it installs the environment: what it leaves must not be trusted."""
    command = ["./inv", "up", "--port", str(fresh.port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(command, cwd=fresh.path, env=fresh.environment, start_new_session=True, **quiet)
    environment = fresh.state / "envs" / "embedded"
    while first.poll() is None and len(list(environment.glob("lib/python*/site-packages/*"))) < 20:
        time.sleep(0.02)
    assert first.poll() is None, "it ended before it could be killed"
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (environment / ".complete.json").exists()
    return fresh


@pytest.fixture(scope="session")
def up(killed_once):
    """Bring it up and return it; the only line on stdout is the API's URL."""
    fresh = killed_once
    done = fresh.inv("up", "--port", str(fresh.port))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{fresh.url}/v1\n"
    fresh.told = done.stderr
    return fresh


@pytest.fixture(scope="session")
def validation(up):
    return json.loads((up.state / "validation.json").read_text())


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """The tiny checkpoint with random weights. Nobody writes into it."""
    return tiny.write_tiny(tmp_path_factory.mktemp("models") / "tiny", tiny.RANDOM)


def link_or_copy(source, target):
    """Hard links keep the 400 MB of binaries out of the copy; neither Python nor forge writes a file in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def vllm_trees(tmp_path_factory):
    """Copies of the installed vLLM: `upstream`, made by reversing for it may be patched already, and `patched`."""
    installed = Path(importlib.util.find_spec("vllm").origin).parent.parent
    record, store = record_name("vllm"), store_name("vllm")
    made = SimpleNamespace(upstream=tmp_path_factory.mktemp("upstream"), patched=tmp_path_factory.mktemp("patched"))
    for tree in (made.upstream, made.patched):
        shutil.copytree(installed / "vllm", tree / "vllm", copy_function=link_or_copy)
        if (installed / record).exists():
            shutil.copy2(installed / record, tree / record)
            shutil.copytree(installed / store, tree / store)
        patch.reverse(tree)
    patch.apply(made.patched, patch.Queue.load(ROOT / "patches" / "vllm-0.32.0"))
    return made
