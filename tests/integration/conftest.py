"""The whole road once: a copy of the checkout, without its state, brought up as a user does it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

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
        return {key: value for key, value in os.environ.items() if key not in ("SPARKFORGE_STATE", "PYTHONPATH")}

    def inv(self, *args):
        command = ["./inv", *args]
        return subprocess.run(command, cwd=self.path, env=self.environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    path = tmp_path_factory.mktemp("fresh") / "checkout"
    shutil.copytree(ROOT, path, ignore=LEFT_OUT, symlinks=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    checkout = Checkout(path, port)
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
