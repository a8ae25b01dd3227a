"""The tiny checkpoint, served once by MAX: `python -m lab.test --max [--device gpu]`."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge import environments, pins
from sparkforge.core.paths import ROOT, state
from sparkforge.environments import Environment
from sparkforge.serve.settings import TINY_ID

MAX = Environment("max")


@dataclass
class Checkout:
    """This checkout's commands with a separate state folder; MAX's environment and compiled models are shared."""

    state: Path
    environment: dict[str, str]
    port: int

    @property
    def model(self):
        return self.state / "models" / TINY_ID

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self):
        return (self.state / "logs" / "server.log").read_text()

    def inv(self, *arguments):
        command = [ROOT / "inv", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=("cpu", "gpu"), help="what MAX serves on")


@pytest.fixture(scope="session")
def device(request):
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def compiled():
    environments.ensure(MAX, pins.load())
    return state() / "cache" / "max"


@pytest.fixture(scope="session")
def checkout(compiled, tmp_path_factory, free_port):
    folder = tmp_path_factory.mktemp("state")
    folder.chmod(0o700)
    (folder / "envs").symlink_to(MAX.path.absolute().parent)
    environment = {**os.environ, "SPARKFORGE_STATE": str(folder), "MODULAR_CACHE_DIR": str(compiled.absolute())}
    checkout = Checkout(folder, environment, free_port())
    yield checkout
    checkout.inv("down")


@pytest.fixture(scope="session")
def started(checkout, device):
    """The finished `./inv max.up`, which also wrote the model; all tests share its server."""
    return checkout.inv("max.up", "--port", str(checkout.port), "--device", device)
