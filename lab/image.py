"""`python -m lab.image`: the container path: time to build and to start, size by layer, size of a Spark's image.

Measured from outside on the embedded image, with the engine that DOCKER_HOST names and the user's own Compose files
(SPARKFORGE_COMPOSE_FILES). The Spark's figures are a projection and are labelled so: the file lists of every locked
aarch64 wheel are read by range, without downloading the wheels.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import httpx
from packaging.requirements import Requirement

from lab import debian
from sparkforge import environments, pins
from sparkforge.bench.context import facts
from sparkforge.core import openai, paths
from sparkforge.core.console import Steps, say
from sparkforge.core.docker import docker
from sparkforge.core.documents import read_json
from sparkforge.core.errors import NetworkError, ServerError, UsageError
from sparkforge.core.files import require_writable, write_json
from sparkforge.core.openai import Endpoint
from sparkforge.core.process import run_unchecked
from sparkforge.core.program import exit_code
from sparkforge.image import build as image
from sparkforge.image import compose as docker_compose
from sparkforge.image import devices, trimming, versions
from sparkforge.image.devices import DOCKER_CPU
from sparkforge.image.reproducible import report_path
from sparkforge.pins import index, locks
from sparkforge.pins.wheels import TargetMachine, choose, requirements
from sparkforge.serve import settings

READY_SECONDS = 1200.0
CONTRACT = "tests/unit/image/test_compose.py"
TAIL = 1_000_000  # bytes of a wheel's end that hold its list of files; a larger list is fetched in a second range
PEER = {"what": "a source runner image reported for another project", "bytes": 18_500_000_000}
PYTHON = (3, 13)


def main(output: str) -> None:
    """Measure everything and write the JSON file. Raises the errors of the engine and of the index."""
    file = require_writable(paths.typed(output))
    _require_tests()
    steps, result = Steps(5), dict[str, Any]()
    measurements: dict[str, Callable[[], dict[str, Any]]] = {
        "cold": lambda: build("--no-cache"),
        "warm": build,
        "image": layers,
        "start": start,
        "spark": projection,
    }
    for name, measure in measurements.items():
        with steps.step(name) as update:
            result[name] = measure()
            update(f"{result[name].get('seconds', result[name].get('bytes'))}")
    result["contract"] = contract()
    result["reproducible"] = reproducible()
    write_json(file, {"schema": 1, "machine": facts(), **result})
    say(f"written to {file}")


def build(*options: str) -> dict[str, Any]:
    """Build the embedded image and return the seconds; `--no-cache` reuses only what was downloaded."""
    start = time.monotonic()
    stack = devices.stack_of(DOCKER_CPU)
    with versions.named(stack):
        image.build([*docker_compose.compose("build"), *options], stack=stack)
    return {"seconds": round(time.monotonic() - start, 1)}


def layers() -> dict[str, Any]:
    """Return the embedded image's size and each layer's, in bytes, the largest first."""
    name = docker_compose.resolve(_variables()).image
    size = int(docker(["image", "inspect", name, "--format", "{{.Size}}"]))
    lines = docker(
        ["history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", name]
    ).splitlines()
    sizes = [(int(float(bytes_)), command) for bytes_, _, command in (line.partition("\t") for line in lines)]
    return {
        "bytes": size,
        "layers": [{"bytes": bytes_, "by": command[:80]} for bytes_, command in sorted(sizes, reverse=True)[:8]],
    }


def start() -> dict[str, Any]:
    """Return the seconds from `compose up` to health and to the first token; takes the container down again."""
    env = _variables()
    service = docker_compose.resolve(env)
    url, model = f"http://{service.host}:{service.port}", settings.read(service.environment).model_id
    docker_compose.down(env)
    start = time.monotonic()
    try:
        docker_compose.up(env, paths.state() / "logs" / "bench-image.log", lambda _text: None)
        if not openai.wait_until(Endpoint(url).healthy, start + READY_SECONDS):
            why = f"{READY_SECONDS:g} s passed"
            raise ServerError("the container does not get healthy", why, "docker compose logs", code="server.start")
        healthy = time.monotonic() - start
        Endpoint(url, model, key="").first_token(READY_SECONDS)
        return {"healthy": round(healthy, 1), "seconds": round(time.monotonic() - start, 1)}
    finally:
        docker_compose.down(env)


def _variables() -> dict[str, str]:
    return docker_compose.variables(devices.stack_of(DOCKER_CPU))


def _require_tests() -> None:
    """Raise UsageError without the environment that the contract's tests run in: before an hour of measuring."""
    if not environments.TEST.python.is_file():
        why = f"the lines of the contract are counted by {CONTRACT}, and there is no {environments.TEST.python}"
        raise UsageError("there is nothing to count with", why, "./inv test, then .venv/bin/python -m lab.image")


def contract() -> dict[str, int]:
    """Return the number of lines of the Compose contract, and how many of them hold: the tests' own count."""
    result = paths.state() / "contract.xml"
    run_unchecked([environments.TEST.python, "-m", "pytest", "-q", CONTRACT, f"--junitxml={result}"], cwd=paths.ROOT)
    suite = next(ET.parse(result).iter("testsuite"))  # noqa: S314 - pytest wrote it just now
    lines = int(suite.attrib["tests"])
    return {"lines": lines, "held": lines - int(suite.attrib["failures"]) - int(suite.attrib["errors"])}


def reproducible() -> dict[str, Any]:
    """Return the last result of `./inv image.verify --reproduce` by stack; empty if there is none."""
    files = {stack: report_path(stack) for stack in pins.load().stacks}
    return {stack: read_json(file) for stack, file in files.items() if file.is_file()}


@dataclass
class Ranges(io.RawIOBase):
    """A file on an index, read by ranges: its end at once, the rest on demand."""

    http: httpx.Client
    url: str

    def __post_init__(self) -> None:
        """Fetch the end."""
        response = self.http.get(self.url, headers={"Range": f"bytes=-{TAIL}"})
        response.raise_for_status()
        self._end, size = response.content, response.headers.get("content-range", "").rpartition("/")[2]
        self._size = int(size) if size else len(self._end)
        self._at = 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, as files do."""
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return bytes from the end that was fetched, else by a request."""
        size, first = self._size - self._at if size < 0 else size, self._size - len(self._end)
        if self._at >= first:
            data = self._end[self._at - first : self._at - first + size]
        else:
            data = self.http.get(self.url, headers={"Range": f"bytes={self._at}-{self._at + size - 1}"}).content
        self._at += len(data)
        return data


def projection() -> dict[str, Any]:
    """Return the bytes of the Spark's tree: every file of every locked aarch64 wheel, and what the table cuts."""
    table = pins.load()
    inputs = table.image(table.default)
    files = wheel_files(inputs.locks["aarch64"])
    chosen = trimming.cuts(inputs.device)
    cut = dict.fromkeys((entry.name for entry in chosen), 0)
    for path, size in files.items():  # a file that two entries name is the first one's
        if first := next((entry.name for entry in chosen if trimming.is_cut(path, [entry])), ""):
            cut[first] += size
    packages = len(debian.read(debian.LOCKS / f"{inputs.device}-runtime-arm64.txt"))
    return {
        "projection": "sum of the files in the locked aarch64 wheels; no bytecode, kernels or Debian packages in it",
        "bytes": sum(files.values()) - sum(cut.values()),
        "untrimmed": sum(files.values()),
        "left out": cut,
        "Debian packages": packages,
        "peer": PEER,
    }


def wheel_files(lock: str) -> Mapping[str, int]:
    """Return path → bytes of all files that the lock's wheels for aarch64 install. Raises NetworkError."""
    with index.client() as http, ThreadPoolExecutor(6) as pool:
        sizes: dict[str, int] = {}
        for files in pool.map(lambda url: _files(url, http), wheels(locks.lock_path(lock), "aarch64", http)):
            sizes |= files
    return sizes


def wheels(lock: Path, machine: str, http: httpx.Client) -> list[str]:
    """Return the URL of each locked package's wheel for `machine`.

    Raises InputError for the first package without a file of a locked hash, NetworkError for one without a wheel.
    """
    target = TargetMachine(machine, PYTHON)

    def url(locked: tuple[Requirement, frozenset[str]]) -> str:
        """Ask the index for one package."""
        requirement, hashes = locked
        files = index.project_page(requirement.name, http).packages
        chosen = choose(requirement, hashes, files, target).filename
        if not chosen.endswith(".whl"):
            why = f"of the locked files only {chosen} does"
            raise NetworkError(f"no wheel of {requirement.name} fits", why, "./inv pins.lock", code="network.fetch")
        return next(file.url.partition("#")[0] for file in files if file.filename == chosen)

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(url, requirements(lock.read_text("utf-8"), target)))


def _files(url: str, http: httpx.Client) -> dict[str, int]:
    with zipfile.ZipFile(Ranges(http, url)) as wheel:
        return {member.filename: member.file_size for member in wheel.infolist()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.image", description=__doc__)
    parser.add_argument("--output", default="bench/results/image.json", help="JSON file for the figures")
    options = parser.parse_args()
    sys.exit(exit_code(lambda: main(options.output)))
