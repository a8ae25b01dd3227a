"""The interpreter with the torch for which vLLM's extensions are compiled, and the CMake that configures them.

vLLM's CMake files run that interpreter: its torch supplies headers and flags, and its jinja2 generates kernels.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from sparkforge import pins
from sparkforge.core.errors import CompileError, ProcessError
from sparkforge.core.files import DocumentError
from sparkforge.core.process import run, run_unchecked
from sparkforge.core.tables import parse_record

MINIMUM_CMAKE = (3, 26, 1)  # vLLM 0.32.0, pyproject.toml
PROBE = """
import importlib.util, json, sys, sysconfig
from pathlib import Path
facts = {"python": sys.version.split()[0], "include": sysconfig.get_path("include")}
facts["header"] = (Path(facts["include"]) / "Python.h").is_file()
facts["missing"] = [name for name in ("jinja2", "setuptools") if importlib.util.find_spec(name) is None]
try:
    import torch
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
except Exception as error:
    facts |= {"torch": "", "cuda": "", "error": repr(error)}
print(json.dumps(facts))
"""
FIX = "./inv build --from source without --compile-python makes an environment that fits"


class Facts(BaseModel):
    """The output of PROBE."""

    python: str
    include: str
    header: bool
    missing: list[str]
    torch: str
    cuda: str
    error: str = ""


@dataclass(frozen=True)
class Interpreter:
    """A fitting interpreter, its CMake, and the versions of torch, Python and CMake."""

    python: Path
    cmake: Path
    versions: dict[str, str]


def examine(python: Path, stack: str) -> Interpreter:
    """Return the versions in the environment of `python`. Raises CompileError, which names all that is missing."""
    try:
        lines = run([python, "-c", PROBE], fix=FIX).stdout.splitlines() or [""]
        facts = parse_record(lines[-1], f"the answer of {python}", Facts)
    except (ProcessError, DocumentError) as error:
        raise CompileError(f"cannot build with {python}", str(error), FIX, code="compile.inputs") from None
    pinned = pins.load().component(stack, "torch").version
    problems = {
        f"it has no torch: {facts.error}": not facts.torch,
        f"its torch is {facts.torch} instead of {pinned}": facts.torch.partition("+")[0] not in ("", pinned),
        f"its torch {facts.torch} is built without CUDA, which vLLM's CMake files need":
            facts.torch and not facts.cuda,
        f"it lacks {', '.join(facts.missing)}": facts.missing,
    }  # fmt: skip
    if reasons := [text for text, holds in problems.items() if holds]:
        raise CompileError(f"cannot build with {python}", "; ".join(reasons), FIX, code="compile.inputs")
    if not facts.header:
        why = f"{facts.include} has no Python.h, which every extension includes"
        fix = f"sudo apt install python{facts.python.rpartition('.')[0]}-dev"
        raise CompileError(f"cannot build with {python}", why, fix, code="compile.toolchain")
    cmake, version = find_cmake(python)
    versions = {"torch": facts.torch, "built for python": facts.python, "cmake": version}
    return Interpreter(python, cmake, versions)


def find_cmake(python: Path) -> tuple[Path, str]:
    """Return the CMake beside `python`, else that on PATH, and its version. Raises CompileError."""
    rejected = []
    for folder in (str(python.parent), None):
        if cmake := shutil.which("cmake", path=folder):
            version = re.search(r"(\d+)\.(\d+)\.(\d+)", run_unchecked([cmake, "--version"]).stdout)
            if version and tuple(map(int, version.groups())) >= MINIMUM_CMAKE:
                return Path(cmake).absolute(), version[0]
            rejected.append(f"{cmake} is {version[0] if version else 'no CMake'}")
    wanted = ".".join(map(str, MINIMUM_CMAKE))
    why = f"vLLM requires {wanted}, and there is {', '.join(rejected) or 'none'}"
    fix = f"{python} -m pip install 'cmake>={wanted},<5', or {FIX}"
    raise CompileError("no CMake that fits", why, fix, code="compile.toolchain")
