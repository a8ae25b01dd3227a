"""`./inv bench.image`: the container path: time to build and to start, size by layer, what a Spark's image would weigh.

Measured from outside on the embedded image, with the engine that DOCKER_HOST names and the user's own Compose files
(SPARKFORGE_COMPOSE_FILES). The Spark's figures are a projection and are called one: the file lists of every locked
aarch64 wheel are read by range, without the wheels.
"""

from __future__ import annotations

import io
import json
import re
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import httpx
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from bench.machine import facts
from forge import debian, envs, image, index, locks, rootfs, trimming
from forge.reproducible import DEVICES
from serve import client, docker_compose, settings
from serve.device import DOCKER_CPU
from sparkforge import paths
from sparkforge.console import Steps, say
from sparkforge.docker_cli import docker
from sparkforge.errors import FetchError, UsageError
from sparkforge.files import require_writable, write_json
from sparkforge.process import run

READY_SECONDS = 1200.0
CONTRACT = "tests/unit/container/test_compose.py"
TAIL = 1_000_000  # bytes of a wheel's end that hold its list of files; a larger list is fetched in a second range
PEER = {"what": "a source runner image reported for another project", "bytes": 18_500_000_000}
PYTHON = (3, 13)


def main(output: str) -> None:
    """Measure everything and write the JSON file. Raises the errors of the engine and of the index."""
    place = require_writable(paths.typed(output))
    _require_tests()
    steps, told = Steps(5), dict[str, Any]()
    for name, work in (
        ("cold", lambda: {"seconds": timed(lambda: build(no_cache=True))}),
        ("warm", lambda: {"seconds": timed(lambda: build(no_cache=False))}),
        ("image", layers),
        ("start", start),
        ("spark", projection),
    ):
        with steps.step(name) as tell:
            told[name] = work()
            tell(f"{told[name].get('seconds', told[name].get('bytes'))}")
    told["contract"] = contract()
    told["reproducible"] = reproducible()
    write_json(place, {"schema": 1, "machine": facts(), **told})
    say(f"written to {place}")


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds `work` takes."""
    begun = time.monotonic()
    work()
    return round(time.monotonic() - begun, 1)


def build(*, no_cache: bool) -> None:
    """Build the embedded image; without cache nothing of an earlier build counts but what was downloaded."""
    words = docker_compose.compose(DOCKER_CPU, "build")
    image.build([*words, "--no-cache"] if no_cache else words)


def layers() -> dict[str, Any]:
    """Return the embedded image's size and each layer's, in bytes, the largest first."""
    name = docker_compose.resolve(DOCKER_CPU, {}).image
    size = int(docker(["image", "inspect", name, "--format", "{{.Size}}"]))
    lines = docker(
        ["history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", name]
    ).splitlines()
    found = [(int(float(size)), told) for size, _, told in (line.partition("\t") for line in lines)]
    return {
        "bytes": size,
        "layers": [{"bytes": size, "by": told[:80]} for size, told in sorted(found, reverse=True)[:8]],
    }


def start() -> dict[str, Any]:
    """Return the seconds from `compose up` to health and to the first token; takes the container down again."""
    service = docker_compose.resolve(DOCKER_CPU, {})
    url, model = f"http://{service.host}:{service.port}", settings.read(service.environment).model_id
    docker_compose.down(DOCKER_CPU, {})
    begun = time.monotonic()
    try:
        docker_compose.up(DOCKER_CPU, {}, paths.state() / "logs" / "bench-image.log", lambda _text: None)
        while not client.healthy(url):
            if time.monotonic() - begun > READY_SECONDS:
                raise FetchError(
                    "the container does not get healthy", f"{READY_SECONDS:g} s passed", "docker compose logs"
                )
            time.sleep(0.25)
        healthy = time.monotonic() - begun
        client.first_token(url, model, READY_SECONDS)
        return {"healthy": round(healthy, 1), "seconds": round(time.monotonic() - begun, 1)}
    finally:
        docker_compose.down(DOCKER_CPU, {})


def _require_tests() -> None:
    """Raise UsageError without the environment that the contract's tests run in: before an hour of measuring."""
    if not envs.TEST.python.is_file():
        why = f"the lines of the contract are counted by {CONTRACT}, and there is no {envs.TEST.python}"
        raise UsageError("there is nothing to count with", why, "./inv test --fast, then ./inv bench.image")


def contract() -> dict[str, int]:
    """Return how many lines of the Compose contract hold, of how many: the tests' own count."""
    result = paths.state() / "contract.xml"
    run([envs.TEST.python, "-m", "pytest", "-q", CONTRACT, f"--junitxml={result}"], cwd=paths.ROOT, check=False)
    suite = next(ET.parse(result).iter("testsuite"))  # noqa: S314 - pytest wrote it just now
    lines = int(suite.attrib["tests"])
    return {"lines": lines, "held": lines - int(suite.attrib["failures"]) - int(suite.attrib["errors"])}


def reproducible() -> dict[str, Any]:
    """Return what the last `./inv verify-reproducible` found, by device; empty if there was none."""
    places = {device: paths.state() / f"reproducible-{device}.json" for device in DEVICES}
    return {
        device: json.loads(found.read_text(encoding="utf-8")) for device, found in places.items() if found.is_file()
    }


@dataclass
class Ranges(io.RawIOBase):
    """A file on an index, read by ranges: its end at once, the rest when asked for."""

    http: httpx.Client
    url: str

    def __post_init__(self) -> None:
        """Fetch the end."""
        reply = self.http.get(self.url, headers={"Range": f"bytes=-{TAIL}"})
        reply.raise_for_status()
        self._end, whole = reply.content, reply.headers.get("content-range", "").rpartition("/")[2]
        self._size = int(whole) if whole else len(self._end)
        self._at = 0

    def seekable(self) -> bool:
        """Whole files can be sought in."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, as files do."""
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return bytes from the end that is here, else by a request."""
        size, first = self._size - self._at if size < 0 else size, self._size - len(self._end)
        if self._at >= first:
            data = self._end[self._at - first : self._at - first + size]
        else:
            data = self.http.get(self.url, headers={"Range": f"bytes={self._at}-{self._at + size - 1}"}).content
        self._at += len(data)
        return data


def projection() -> dict[str, Any]:
    """Return the bytes of the Spark's tree: every file of every locked aarch64 wheel, and what the table cuts."""
    files = wheel_files("spark", "aarch64")
    chosen = trimming.cuts(rootfs.CUDA)
    cut = dict.fromkeys((one.name for one in chosen), 0)
    for path, size in files.items():  # a file that two entries name is the first one's
        if first := next((one.name for one in chosen if trimming.is_cut(path, [one])), ""):
            cut[first] += size
    packages = len(debian.read(debian.LOCKS / "cuda-runtime-arm64.txt"))
    return {
        "projection": "sum of the files in the locked aarch64 wheels; no bytecode, kernels or Debian packages in it",
        "bytes": sum(files.values()) - sum(cut.values()),
        "untrimmed": sum(files.values()),
        "left out": cut,
        "Debian packages": packages,
        "peer": PEER,
    }


def wheel_files(lock: str, machine: str) -> Mapping[str, int]:
    """Return path → bytes of all files that the lock's wheels for `machine` install. Raises FetchError."""
    with index.client() as http, ThreadPoolExecutor(6) as pool:
        found: dict[str, int] = {}
        for files in pool.map(lambda url: _files(url, http), wheels(locks.lock_path(lock), machine, http)):
            found |= files
    return found


def wheels(lock: Path, machine: str, http: httpx.Client) -> list[str]:
    """Return the address of the wheel that each package of a lock has for `machine`, under a locked hash.

    Raises FetchError for the first package that the index has none of.
    """
    blocks = [
        block for block in re.split(r"\n(?=[A-Za-z0-9])", lock.read_text("utf-8")) if "==" in block.split("\n")[0]
    ]
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(35, 16, -1)]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    tags = [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", platforms),
    ]
    ranks = {tag: rank for rank, tag in enumerate(tags)}
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda block: _wheel(block, ranks, http), blocks))


def _wheel(block: str, ranks: Mapping[Any, int], http: httpx.Client) -> str:
    package, hashes = block.partition("==")[0].partition("[")[0], set(re.findall(r"sha256:([0-9a-f]{64})", block))
    best: Sequence[tuple[int, str]] = sorted(
        (
            min(ranks[tag] for tag in parse_wheel_filename(entry.filename)[3] if tag in ranks),
            entry.url.partition("#")[0],
        )
        for entry in index.project_page(package, http).packages
        if entry.filename.endswith(".whl")
        and entry.digests.get("sha256") in hashes
        and any(tag in ranks for tag in parse_wheel_filename(entry.filename)[3])
    )
    if not best:
        raise FetchError(f"no wheel of {package} fits", "the index lists none with a locked hash", "./inv pins.lock")
    return best[0][1]


def _files(url: str, http: httpx.Client) -> dict[str, int]:
    with zipfile.ZipFile(Ranges(http, url)) as wheel:
        return {member.filename: member.file_size for member in wheel.infolist()}
