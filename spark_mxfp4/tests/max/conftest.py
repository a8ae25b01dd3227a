"""MAX's programs from the environment of `./test --max`, and the Mojo kernels' CPU parts as a C library."""

import ctypes
import json
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
def lines(mojo):
    """Return a function: a program of this folder, its arguments → the values that it prints as JSON in MAX's Python.

    MAX's compiled models are kept in a folder, because compiling a model takes minutes.
    """
    cache = str(PROJECT / ".cache" / "max")
    settings = {"MODULAR_TELEMETRY_ENABLED": "0", "MODULAR_CACHE_DIR": cache, "PYTHONPATH": str(PACKAGE.parent)}

    def lines(program, *arguments):
        command = [mojo.with_name("python"), Path(__file__).with_name(program), *arguments]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]

    return lines


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
