"""Bring the torch build without CUDA, which the default package index does not hold.

In one hash-checked step: from wherever pip is configured to find it (a mirror, a find-links folder), else from
PyTorch's own CPU index. https://pytorch.org/get-started/locally/ names that index.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path

from forge import fetch
from forge.pins import Component
from sparkforge.errors import CommandError, FetchError, HashMismatchError, RuntimeSetupError
from sparkforge.files import sha256_file
from sparkforge.process import run

PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def pinned_file(torch: Component, python: tuple[int, int] = sys.version_info[:2]) -> tuple[str, str]:
    """Return name and sha256 of the wheel for this machine and `python`. Raises RuntimeSetupError if none is pinned."""
    tag = f"cp{python[0]}{python[1]}-"
    for name, sha256 in torch.files.items():
        if tag in name and name.endswith(f"{platform.machine()}.whl"):
            return name, sha256
    raise RuntimeSetupError(
        "no torch is pinned for this machine",
        f"Python {python[0]}.{python[1]} on {platform.machine()} is not in pins.toml",
        "use Python 3.11, 3.12 or 3.13 on x86_64 or aarch64: rm -rf .venv && PYTHON=python3.12 ./inv up",
    )


def fetch_torch(torch: Component) -> Path:
    """Bring the wheel into the cache and return its path. Raises FetchError or HashMismatchError."""
    name, sha256 = pinned_file(torch)
    target = fetch.cached(name, sha256)
    if target.is_file() and sha256_file(target) == sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        requirement = f"torch=={torch.version} --hash=sha256:{sha256}"
        _download(requirement, Path(folder))
        (Path(folder) / name).replace(target)
    return target


def _download(requirement: str, folder: Path) -> None:
    base = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    base += ["--only-binary", ":all:", "--dest", str(folder), "-r", "/dev/stdin"]
    reasons = []
    for source in ([], ["--index-url", PYTORCH_CPU_INDEX]):
        try:
            run([*base, *source], stdin=requirement)
        except CommandError as error:
            if "HASHES" in error.why or "do not match" in error.why:
                raise HashMismatchError(
                    "torch is not the file that was pinned",
                    f"{error.why}; nothing was kept",
                    "check the folder or mirror that pip is configured with: pip config list",
                ) from error
            reasons.append(error.why.splitlines()[-1])
        else:
            return
    raise FetchError(
        f"cannot bring {requirement.split(maxsplit=1)[0]}",
        " / ".join(reasons),
        "check the network, or point pip at a folder that holds the wheel: PIP_FIND_LINKS=/folder ./inv up",
    )
