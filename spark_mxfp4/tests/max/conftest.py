"""MAX's programs from the environment of `./test --max`, and the Mojo kernels' CPU parts as a C library."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from project import PACKAGE, PROJECT

SOURCES = PACKAGE / "max"


@pytest.fixture(scope="session")
def mojo():
    path = PROJECT / ".venv" / "max" / "bin" / "mojo"
    assert path.exists(), f"{path} is missing: ./test --max brings it"
    return path


@pytest.fixture(scope="session")
def compiled():
    """The folder of MAX's compiled models, which is kept because compiling a model takes minutes."""
    return PROJECT / ".cache" / "max"


@pytest.fixture(scope="session")
def host(mojo, tmp_path_factory):
    library = tmp_path_factory.mktemp("max") / "host.so"
    command = [
        mojo, "build", "--emit", "shared-lib", "-I", SOURCES, Path(__file__).with_name("host.mojo"), "-o", library,
    ]  # fmt: skip
    environment = {**os.environ, "MODULAR_TELEMETRY_ENABLED": "0"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(library))
