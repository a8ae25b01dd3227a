"""Hash-locked requirement sets, `locks/NAME.txt`: their paths, and their installation by uv.

`./inv pins.lock` makes them (lab/locks.py).
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.core import installers
from sparkforge.core.console import say
from sparkforge.core.errors import InputError, NetworkError
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run_unchecked
from sparkforge.pins.index import pip_config
from sparkforge.pins.wheels import GLIBC

LOCKS = ROOT / "locks"
MAX = ("max", ROOT / "spark_mxfp4" / "locks")  # the only set in another folder, with the library's sets
INSTALL = (sys.executable, "-m", "uv", "pip", "install", "--require-hashes", "--no-deps", "--quiet")


@dataclass(frozen=True)
class WheelSet:
    """Wheels that are installed with a locked set: their folders, and requirement lines that name them by hash."""

    folders: tuple[Path, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)  # by package: instead of the line in the lock
    extra: tuple[str, ...] = ()  # packages that the lock lacks


def lock_path(name: str) -> Path:
    """Return the path of a locked set."""
    return (MAX[1] if name == MAX[0] else LOCKS) / f"{name}.txt"


def wheels_for(machine: str) -> list[str]:
    """Return uv's options to install only wheels for `machine`."""
    return ["--python-platform", f"{machine}-manylinux_2_{GLIBC}", "--only-binary", ":all:"]


def uv_environment() -> Mapping[str, str]:
    """Return uv's settings: only pip's index (uv reads no pip configuration), and pip's CA bundle."""
    config = pip_config()
    index = os.environ.get("UV_DEFAULT_INDEX") or config.index_url
    env = {"UV_DEFAULT_INDEX": index, "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "UV_NO_CONFIG": "1"}
    return {**env, "SSL_CERT_FILE": config.cert} if config.cert else env


def replace(text: str, replaced: Mapping[str, str]) -> str:
    """Return a locked set with other lines for the packages in `replaced`; markers stay. Raises InputError."""
    for package, line in replaced.items():
        requirement, _, hashes = line.partition(" ")
        text, count = re.subn(
            rf"^{re.escape(package)}==[^ ;]+( ;[^\\\n]*)? \\\n(?:    --hash=.*\n)+",
            lambda match: f"{requirement}{match[1] or ''} {hashes}\n",  # noqa: B023 - called at once
            text,
            flags=re.MULTILINE,
        )
        if count != 1:
            why = f"the locked set names it {count} times"
            raise InputError(f"{package} cannot be replaced", why, "./inv pins.lock", code="input.pins")
    return text


def install(
    python: Path,
    name: str,
    wheels: WheelSet | None = None,
    *,
    target: Path | None = None,
    machine: str = "",
    copy: bool = False,
) -> None:
    """Install a locked set and `wheels` into the environment of `python`, or into the folder `target`.

    With `machine` (`uname -m`) the wheels are for that machine; without, bytecode is compiled. `copy`, and a target
    folder, make copies instead of hard links into uv's cache: a hard link's ctime changes with every other link, and
    ccache then treats headers as modified. Raises NetworkError with the cause that uv printed.
    """
    wheels = wheels or WheelSet()
    command = [*INSTALL, "--python", str(python), "-r", "-"]
    command += [] if machine else ["--compile-bytecode"]
    if machine not in ("", os.uname().machine):
        command += wheels_for(machine)
    for folder in wheels.folders:
        command += ["--find-links", str(folder)]
    command += ["--target", str(target)] if target else []
    command += ["--link-mode", "copy"] if copy or target else []
    requirements = "\n".join([replace(lock_path(name).read_text(encoding="utf-8"), wheels.replaced), *wheels.extra])

    def attempt() -> str:
        process = run_unchecked(command, env=uv_environment(), stdin=requirements)
        return (process.stdout + process.stderr or f"exit code {process.returncode}") if process.returncode else ""

    if refused := installers.insist(attempt, say, f"locked set {name}"):
        failure = f"cannot install the locked set {name}"
        raise NetworkError(failure, refused.cause, refused.fix, code="network.fetch")
