"""Hash-locked requirement sets: `locks/NAME.in` → `locks/NAME.txt`, resolved by uv for each Python and machine served.

One index a set, hashes for every file. `test` is resolved first and constrains the others, so that what is tested is
what is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forge.index import pip_config
from sparkforge.errors import CommandError, FetchError, PinError
from sparkforge.files import write_atomic
from sparkforge.paths import ROOT
from sparkforge.process import run

LOCKS = ROOT / "locks"
NETWORK = "check the network, or set PIP_INDEX_URL to your mirror, then run the same command again"


# Every Python and machine at once, or one foreign machine that is only installed on, never resolved on.
EVERYWHERE = ("--universal", "--python-version", "3.11")
AARCH64 = ("--python-platform", "aarch64-manylinux_2_35", "--python-version", "3.13", "--only-binary", ":all:")
AMD64 = ("--python-platform", "x86_64-manylinux_2_35", *AARCH64[2:])


@dataclass(frozen=True)
class LockSet:
    """One requirement set: whom it is resolved for, and with which overrides and constraints.

    `source` names the .in file if it is another set's: the same requirements, for another machine.
    """

    name: str
    target: tuple[str, ...] = EVERYWHERE
    override: str = ""
    constraint: str = ""
    omit: tuple[str, ...] = ()
    source: str = ""

    @property
    def requirements(self) -> str:
        """The file that it is resolved from."""
        return f"{self.source or self.name}.in"

    @property
    def inputs(self) -> list[Path]:
        """The files that its resolution reads."""
        names = [self.requirements, *filter(None, (self.override, self.constraint))]
        lines = (LOCKS / self.requirements).read_text(encoding="utf-8").splitlines()
        included = [line.split()[1] for line in lines if line.startswith("-r ")]
        return [LOCKS / name for name in [*names, *included]]

    def header(self) -> str:
        """The locked file's first line: what made it, and from which inputs."""
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in self.inputs)).hexdigest()
        return f"# Made from locks/{self.requirements} by `./inv pins.lock`; do not edit. Inputs: sha256 {digest}\n"


_TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")  # overridden to "never"; see locks/embedded.in
SETS = (
    LockSet("test", override="embedded.override", omit=_TORCH),
    LockSet("embedded", override="embedded.override", constraint="test.txt", omit=_TORCH),
    LockSet("tools", constraint="test.txt"),
    LockSet("toolchain"),
    LockSet("spark", target=AARCH64, constraint="toolchain.txt"),
    LockSet("spark-amd64", target=AMD64, constraint="toolchain.txt", source="spark"),
    LockSet("dev"),
    LockSet("build-vllm", constraint="toolchain.txt"),
    LockSet("kernels"),
)


def lock_path(name: str) -> Path:
    """Return the path of a locked set."""
    return LOCKS / f"{name}.txt"


def drifted() -> list[str]:
    """Return the names of the sets whose inputs have changed since they were locked."""
    return [lock.name for lock in SETS if not _text(lock_path(lock.name)).startswith(lock.header())]


def require_current() -> None:
    """Raise PinError if a set is older than its inputs."""
    if old := drifted():
        raise PinError(f"locks are out of date: {', '.join(old)}", "their inputs changed since", "./inv pins.lock")


def compile_set(lock: LockSet) -> Path:
    """Resolve one set; keeps the versions that stand there unless they must move. Raises CommandError."""
    output = lock_path(lock.name)
    with tempfile.TemporaryDirectory(dir=LOCKS) as folder:
        work = Path(folder) / output.name  # uv writes in place; a killed run must not leave half a lock
        if output.exists():
            shutil.copyfile(output, work)
        command = [sys.executable, "-m", "uv", "pip", "compile", lock.requirements, *lock.target, *_FORM]
        command += ["--override", lock.override] if lock.override else []
        command += ["--constraint", lock.constraint] if lock.constraint else []
        omitted = [word for package in lock.omit for word in ("--no-emit-package", package)]
        run([*command, *omitted, "--output-file", work], cwd=LOCKS, env=uv_environment(), fix=NETWORK)
        locked = [line for line in _text(work).splitlines(keepends=True) if not line.startswith("#")]
        write_atomic(output, lock.header() + "".join(locked))
    return output


def compile_all() -> list[Path]:
    """Resolve every set, in the order in which they constrain each other."""
    return [compile_set(lock) for lock in SETS]


_FORM = (
    "--generate-hashes",
    "--quiet",
    "--no-header",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--annotation-style=line",
)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


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


def install(
    python: Path,
    name: str,
    *,
    find_links: tuple[Path, ...] = (),
    extra: tuple[str, ...] = (),
    target: Path | None = None,
    bytecode: bool = True,
) -> None:
    """Install a locked set and the requirement lines `extra` into the environment of `python`, or into folder `target`.

    Files of `find_links` are used where their hash is in the lock. Raises FetchError with uv's last lines.
    """
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", str(python)]
    command += ["--require-hashes", "--no-deps", "--quiet", "-r", str(lock_path(name))]
    command += ["--compile-bytecode"] if bytecode else []
    for folder in find_links:
        command += ["--find-links", str(folder)]
    # Copies, for a hard link's ctime changes with every other link, and ccache then sees its headers "modified".
    command += ["--target", str(target), "--link-mode", "copy"] if target else []
    try:
        run([*command, "-r", "-"] if extra else command, env=uv_environment(), stdin="\n".join(extra) or None)
    except CommandError as error:
        raise FetchError(f"cannot install the locked set {name}", error.why, NETWORK) from error
