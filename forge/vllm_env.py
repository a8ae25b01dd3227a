"""The interpreter whose torch vLLM's extensions are compiled against, and the CMake that configures them.

vLLM's CMake files run that interpreter: they ask its torch for headers and flags, and its jinja2 generates kernels.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from forge import locks, pins
from forge.envs import STAMP, Environment
from sparkforge.errors import BuildInputsError, CommandError, ToolchainError
from sparkforge.files import locked, require_space, sha256_file, write_json
from sparkforge.process import run

HOME = Environment("build-vllm", "build-vllm")
ROOM = 7_500_000_000  # bytes: 4.7 GB installed, measured on x86-64, and the wheels in uv's cache
MINIMUM_CMAKE = (3, 26, 1)  # vLLM 0.32.0, pyproject.toml
PROBE = """
import importlib.util, json, sys, sysconfig
from pathlib import Path
found = {"python": sys.version.split()[0], "include": sysconfig.get_path("include")}
found["header"] = (Path(found["include"]) / "Python.h").is_file()
found["missing"] = [name for name in ("jinja2", "setuptools") if importlib.util.find_spec(name) is None]
try:
    import torch
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda or "", "place": str(Path(torch.__file__).parent)}
except Exception as error:
    found |= {"torch": "", "cuda": "", "place": "", "error": repr(error)}
print(json.dumps(found))
"""
FIX = "./inv build.vllm without --python makes an environment that fits"


@dataclass(frozen=True)
class Interpreter:
    """An interpreter that fits, its torch, and the CMake that goes with it."""

    python: Path
    cmake: Path
    torch: str
    place: Path  # torch's folder
    versions: dict[str, str]


def ensure() -> Path:
    """Make the locked build environment unless it stands; return its interpreter. Raises what `locks.install` does."""
    with locked(HOME.path.with_suffix(".lock"), "make the environment that vLLM is built with"):
        wanted = {"lock": sha256_file(locks.lock_path(HOME.lock)), "python": sys.version}
        if not _stands(wanted):
            require_space(HOME.path, ROOM, "the environment that vLLM is built with")
            shutil.rmtree(HOME.path, ignore_errors=True)
            run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, HOME.path])
            locks.install(HOME.python, HOME.lock)
            write_json(HOME.path / STAMP, wanted)
    return HOME.python


def _stands(wanted: dict[str, str]) -> bool:
    try:
        return bool(json.loads((HOME.path / STAMP).read_text(encoding="utf-8")) == wanted)
    except (OSError, ValueError):
        return False


def examine(python: Path) -> Interpreter:
    """Return what `python` has. Raises BuildInputsError, with all that it lacks, or ToolchainError for CMake."""
    try:
        found = json.loads(run([python, "-c", PROBE], fix=FIX).stdout.splitlines()[-1])
    except (CommandError, IndexError, ValueError) as error:
        raise BuildInputsError(f"cannot build with {python}", str(error), FIX) from None
    pinned = pins.load().component("spark", "torch").version
    wrong = {
        f"it has no torch: {found.get('error')}": not found["torch"],
        f"its torch is {found['torch']} and not {pinned}": found["torch"].partition("+")[0] not in ("", pinned),
        f"its torch {found['torch']} is built without CUDA, and vLLM's CMake files ask it for CUDA":
            found["torch"] and not found["cuda"],
        f"it lacks {', '.join(found['missing'])}": found["missing"],
    }  # fmt: skip
    if told := [text for text, holds in wrong.items() if holds]:
        raise BuildInputsError(f"cannot build with {python}", "; ".join(told), FIX)
    if not found["header"]:
        version = found["python"].rpartition(".")[0]
        why = f"{found['include']} has no Python.h, which every extension includes"
        raise ToolchainError(f"cannot build with {python}", why, f"sudo apt install python{version}-dev")
    cmake, version = find_cmake(python)
    versions = {"torch": found["torch"], "built for python": found["python"], "cmake": version}
    return Interpreter(python, cmake, found["torch"], Path(found["place"]), versions)


def find_cmake(python: Path) -> tuple[Path, str]:
    """Return the CMake beside `python`, else that on PATH, and its version. Raises ToolchainError."""
    seen = []
    for place in (str(python.parent), None):
        if found := shutil.which("cmake", path=place):
            version = re.search(r"(\d+)\.(\d+)\.(\d+)", run([found, "--version"], check=False).stdout)
            if version and tuple(map(int, version.groups())) >= MINIMUM_CMAKE:
                return Path(found).absolute(), version[0]
            seen.append(f"{found} is {version[0] if version else 'no CMake'}")
    wanted = ".".join(map(str, MINIMUM_CMAKE))
    raise ToolchainError(
        "no CMake that fits", f"vLLM asks for {wanted}, and there is {', '.join(seen) or 'none'}",
        f"{python} -m pip install 'cmake>={wanted},<5', or {FIX}",
    )  # fmt: skip
