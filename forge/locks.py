"""Hash-locked requirement sets: `locks/NAME.in` → `locks/NAME.txt`, resolved by uv for each Python and machine served.

One index a set, hashes for every file. `test` is resolved first and constrains the others, so that what is tested is
what is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forge.index import pip_config
from sparkforge.errors import CommandError, FetchError
from sparkforge.files import write_atomic
from sparkforge.paths import ROOT
from sparkforge.process import run

LOCKS = ROOT / "locks"
NETWORK = "check the network, or set PIP_INDEX_URL to your mirror, then run the same command again"


@dataclass(frozen=True)
class LockSet:
    """One requirement set: what it is resolved with and within."""

    name: str
    override: str = ""
    constraint: str = ""
    omit: tuple[str, ...] = ()


_TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")  # overridden to "never"; see locks/embedded.in
SETS = (
    LockSet("test", override="embedded.override", omit=_TORCH),
    LockSet("embedded", override="embedded.override", constraint="test.txt", omit=_TORCH),
    LockSet("tools", constraint="test.txt"),
)


def lock_path(name: str) -> Path:
    """Return the path of a locked set."""
    return LOCKS / f"{name}.txt"


def compile_set(lock: LockSet, directory: Path = LOCKS) -> Path:
    """Resolve one set into `directory`; keeps the versions that stand there unless they must move."""
    output = directory / f"{lock.name}.txt"
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        f"{lock.name}.in",
        "--universal",
        "--python-version",
        "3.11",
        "--generate-hashes",
        "--quiet",
        "--no-header",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--annotation-style",
        "line",
        "--output-file",
        str(output),
    ]
    command += ["--override", lock.override] if lock.override else []
    command += ["--constraint", lock.constraint] if lock.constraint else []
    for package in lock.omit:
        command += ["--no-emit-package", package]
    run(command, cwd=LOCKS, env=uv_environment(), fix=NETWORK)
    header = f"# Made from locks/{lock.name}.in by `./inv pins.lock`; do not edit.\n"
    write_atomic(output, header + output.read_text(encoding="utf-8").removeprefix(header))
    return output


def compile_all() -> list[Path]:
    """Resolve every set, in the order in which they constrain each other."""
    return [compile_set(lock) for lock in SETS]


def uv_environment() -> Mapping[str, str]:
    """Return what uv must be told: pip's index (uv reads no pip configuration), no other, and pip's CA."""
    config = pip_config()
    env = {
        "UV_DEFAULT_INDEX": os.environ.get("UV_DEFAULT_INDEX", config.index_url),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "UV_NO_CONFIG": "1",
    }
    if config.cert:
        env["SSL_CERT_FILE"] = config.cert
    return env


def install(python: Path, name: str, *, find_links: tuple[Path, ...] = (), extra: tuple[str, ...] = ()) -> None:
    """Install a locked set and the requirement lines `extra` into the environment of `python`.

    Files of `find_links` are used where their hash is in the lock. Raises FetchError with uv's last lines.
    """
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--python",
        str(python),
        "--require-hashes",
        "--no-deps",
        "--quiet",
        "--compile-bytecode",
        "-r",
        str(lock_path(name)),
    ]
    for folder in find_links:
        command += ["--find-links", str(folder)]
    try:
        run([*command, "-r", "-"] if extra else command, env=uv_environment(), stdin="\n".join(extra) or None)
    except CommandError as error:
        raise FetchError(f"cannot install the locked set {name}", error.why, NETWORK) from error
