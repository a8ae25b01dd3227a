"""MAX's programs, skipped where MAX is not installed and failed on CI; and the tiny checkpoint, served once."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge.core.paths import ROOT
from sparkforge.environments import Environment
from sparkforge.models import tiny
from sparkforge.serve import modular
from sparkforge.serve.settings import TINY_ID

MAX = Environment("max")


@dataclass
class Checkout:
    """This checkout's commands with a state of its own, MAX's environment and compiled models apart."""

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


@pytest.fixture(scope="session")
def mojo():
    """The compiler of the environment that `./inv max.test` makes."""
    path = MAX.path / "bin" / "mojo"
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is missing: ./inv max.test brings it")
        pytest.skip("MAX is not installed: run ./inv max.test")
    return path.absolute()


@pytest.fixture(scope="session")
def compiled():
    """The folder of MAX's compiled models, which stays: a model takes minutes."""
    return MAX.path.parents[1] / "cache" / "max"


@pytest.fixture(scope="session")
def checkout(mojo, compiled, tmp_path_factory, free_port):
    """A state with the tiny checkpoint, in which no server runs yet; `inv down` ends what a test has left."""
    state = tmp_path_factory.mktemp("state")
    state.chmod(0o700)
    (state / "envs").symlink_to(mojo.parents[2])
    tiny.write_tiny(state / "models" / TINY_ID)
    environment = {**os.environ, "SPARKFORGE_STATE": str(state), "MODULAR_CACHE_DIR": str(compiled)}
    checkout = Checkout(state, environment, free_port())
    yield checkout
    checkout.inv("down")


@pytest.fixture(scope="session")
def device():
    """What MAX serves on: `./inv max.test --device` says it."""
    return os.environ.get(modular.DEVICE_OF_TESTS, "cpu")


@pytest.fixture(scope="session")
def started(checkout, device):
    """The finished `./inv max.up` whose server all tests share."""
    return checkout.inv("max.up", "--port", str(checkout.port), "--device", device)
