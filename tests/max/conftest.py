"""The Mojo kernels' CPU parts as a C library, built once; skipped where MAX is not installed, failed on CI."""

import ctypes
import os
import subprocess

import pytest

from sparkforge.core.paths import ROOT
from sparkforge.environments import Environment

MAX = Environment("max")
SOURCES = ROOT / "spark_mxfp4" / "max"


@pytest.fixture(scope="session")
def mojo():
    """The compiler of the environment that `./inv max.test` makes."""
    path = MAX.path / "bin" / "mojo"
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is missing: ./inv max.test brings it")
        pytest.skip("MAX is not installed: run ./inv max.test")
    return path


@pytest.fixture(scope="session")
def host(mojo, tmp_path_factory):
    """The library of spark_mxfp4/max/trial/host.mojo."""
    library = tmp_path_factory.mktemp("max") / "host.so"
    command = [mojo, "build", "--emit", "shared-lib", "-I", SOURCES, SOURCES / "trial" / "host.mojo", "-o", library]
    environment = {**os.environ, "MODULAR_TELEMETRY_ENABLED": "0"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(library))
