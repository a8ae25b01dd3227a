"""The whole road once: a copy of the checkout, without its state, brought up as a user does it."""

import json
import os
import shutil
import socket
import subprocess
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

    def inv(self, *args, **env):
        places = {"SPARKFORGE_STATE", "PYTHONPATH"}
        clean = {key: value for key, value in os.environ.items() if key not in places}
        return subprocess.run(
            ["./inv", *args], cwd=self.path, env={**clean, **env}, capture_output=True, text=True, check=False
        )


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
def up(fresh):
    """Bring `fresh` up and return it; its first line on stdout is the API's URL."""
    done = fresh.inv("up", "--port", str(fresh.port))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{fresh.url}/v1\n"
    fresh.told = done.stderr
    return fresh


@pytest.fixture(scope="session")
def validation(up):
    return json.loads((up.state / "validation.json").read_text())
