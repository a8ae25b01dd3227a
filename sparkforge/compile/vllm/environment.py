"""The interpreter whose torch vLLM's extensions are compiled against, and the CMake that configures them.

vLLM's CMake files run that interpreter: they ask its torch for headers and flags, and its jinja2 generates kernels.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from sparkforge import pins
from sparkforge.core.errors import CompileError, ProcessError
from sparkforge.core.process import run

MINIMUM_CMAKE = (3, 26, 1)  # vLLM 0.32.0, pyproject.toml
PROBE = """
import importlib.util, json, sys, sysconfig
from pathlib import Path
found = {"python": sys.version.split()[0], "include": sysconfig.get_path("include")}
found["header"] = (Path(found["include"]) / "Python.h").is_file()
found["missing"] = [name for name in ("jinja2", "setuptools") if importlib.util.find_spec(name) is None]
try:
    import torch
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
except Exception as error:
    found |= {"torch": "", "cuda": "", "error": repr(error)}
print(json.dumps(found))
"""
FIX = "./inv build.vllm without --python makes an environment that fits"


@dataclass(frozen=True)
class Interpreter:
    """An interpreter that fits, the CMake that goes with it, and the versions of torch, Python and CMake."""

    python: Path
    cmake: Path
    versions: dict[str, str]


def examine(python: Path, stack: str) -> Interpreter:
    """Return what `python` has. Raises CompileError naming all that it lacks."""
    try:
        answer = json.loads(run([python, "-c", PROBE], fix=FIX).stdout.splitlines()[-1])
    except (ProcessError, IndexError, ValueError) as error:
        raise CompileError(f"cannot build with {python}", str(error), FIX, code="compile.inputs") from None
    pinned = pins.load().component(stack, "torch").version
    problems = {
        f"it has no torch: {answer.get('error')}": not answer["torch"],
        f"its torch is {answer['torch']} and not {pinned}": answer["torch"].partition("+")[0] not in ("", pinned),
        f"its torch {answer['torch']} is built without CUDA, and vLLM's CMake files ask it for CUDA":
            answer["torch"] and not answer["cuda"],
        f"it lacks {', '.join(answer['missing'])}": answer["missing"],
    }  # fmt: skip
    if reasons := [text for text, holds in problems.items() if holds]:
        raise CompileError(f"cannot build with {python}", "; ".join(reasons), FIX, code="compile.inputs")
    if not answer["header"]:
        version = answer["python"].rpartition(".")[0]
        why = f"{answer['include']} has no Python.h, which every extension includes"
        raise CompileError(
            f"cannot build with {python}", why, f"sudo apt install python{version}-dev", code="compile.toolchain"
        )
    cmake, version = find_cmake(python)
    versions = {"torch": answer["torch"], "built for python": answer["python"], "cmake": version}
    return Interpreter(python, cmake, versions)


def find_cmake(python: Path) -> tuple[Path, str]:
    """Return the CMake beside `python`, else that on PATH, and its version. Raises CompileError."""
    rejected = []
    for folder in (str(python.parent), None):
        if cmake := shutil.which("cmake", path=folder):
            version = re.search(r"(\d+)\.(\d+)\.(\d+)", run([cmake, "--version"], check=False).stdout)
            if version and tuple(map(int, version.groups())) >= MINIMUM_CMAKE:
                return Path(cmake).absolute(), version[0]
            rejected.append(f"{cmake} is {version[0] if version else 'no CMake'}")
    wanted = ".".join(map(str, MINIMUM_CMAKE))
    raise CompileError(
        "no CMake that fits", f"vLLM asks for {wanted}, and there is {', '.join(rejected) or 'none'}",
        f"{python} -m pip install 'cmake>={wanted},<5', or {FIX}", code="compile.toolchain"
    )  # fmt: skip
