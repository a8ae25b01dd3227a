"""The environment that kernels are built for where none is named: FlashInfer, patched, and torch without CUDA.

It is for trying out, for tests and for measuring. A server has another interpreter, and with it other paths.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from forge import envs, fetch, locks, patch, pins, torch_cpu
from forge.envs import Environment
from forge.kernel_env import STACK
from forge.pins import Pins
from sparkforge.files import locked, require_space, sha256_file, write_json
from sparkforge.paths import ROOT
from sparkforge.process import run

HOME = Environment("kernels", "kernels")
ROOM = 1_600_000_000  # bytes: 1.2 GB installed and 0.3 GB of downloads, measured on x86-64


def ensure() -> Path:
    """Make the environment unless it stands; return its interpreter. Raises the errors of `envs.ensure` and `patch`."""
    table = pins.load()
    with locked(HOME.path.with_suffix(".lock"), "make the environment of the kernels"):
        wanted = _inputs(table)
        if not _stands(wanted):
            require_space(HOME.path, ROOM, "the environment of the kernels")
            shutil.rmtree(HOME.path, ignore_errors=True)
            _fill(table)
            write_json(HOME.path / envs.STAMP, wanted)
    return HOME.python


def _inputs(table: Pins) -> dict[str, str]:
    return {
        "lock": sha256_file(locks.lock_path(HOME.lock)),
        "torch": torch_cpu.pinned_file(table.component("embedded", "torch"))[1],
        "flashinfer": _wheel(table)[1],
        "queue": _queue(table).sha256,
        "python": sys.version,
    }


def _stands(wanted: dict[str, str]) -> bool:
    try:
        return bool(json.loads((HOME.path / envs.STAMP).read_text(encoding="utf-8")) == wanted)
    except (OSError, ValueError):
        return False


def _fill(table: Pins) -> None:
    torch, flashinfer = table.component("embedded", "torch"), table.component(STACK, "flashinfer")
    run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, HOME.path])
    name, sha256 = _wheel(table)
    wheels = (torch_cpu.fetch_torch(torch), fetch.fetch(flashinfer.package or "", name, sha256))
    exact = (
        f"torch=={torch.version} --hash=sha256:{torch_cpu.pinned_file(torch)[1]}",
        f"{flashinfer.package}=={flashinfer.version} --hash=sha256:{sha256}",
    )
    places = tuple(wheel.parent for wheel in wheels)
    # As a target folder, for then uv copies: see locks.install on ccache and hard links.
    locks.install(HOME.python, HOME.lock, find_links=places, extra=exact, target=HOME.site_packages)
    (HOME.python.parent / "ninja").symlink_to(HOME.site_packages / "bin" / "ninja")
    patch.apply(HOME.site_packages, _queue(table))


def _wheel(table: Pins) -> tuple[str, str]:
    files = table.component(STACK, "flashinfer").files
    return next((name, sha256) for name, sha256 in files.items() if name.endswith(".whl"))


def _queue(table: Pins) -> patch.Queue:
    return patch.Queue.load(ROOT / "patches" / str(table.component(STACK, "flashinfer").patches))
