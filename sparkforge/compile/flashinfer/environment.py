"""The Python environment that kernels are built for: its packages, and the variables of its server.

FlashInfer writes paths and flags into each build.ninja, and again at run time; ninja then compiles every unit that
differs. So this module fixes the variables that reach that file, and removes all others.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge import pins
from sparkforge.compile.flashinfer import sets
from sparkforge.compile.flashinfer.sets import KernelModule, KernelTable
from sparkforge.compile.toolchain import Toolchain
from sparkforge.core.errors import CompileError, IntegrityError, ProcessError
from sparkforge.core.files import DocumentError, parse_json, sha256_file
from sparkforge.core.installed import Installed
from sparkforge.core.process import run
from sparkforge.pins import verify
from sparkforge.pins.verify import ImageChanges, load_patched
from sparkforge.sources import archive

# FlashInfer loads a module from here without a lock, ninja or a compiler (flashinfer/jit/env.py: FLASHINFER_AOT_DIR).
AHEAD_OF_TIME = "flashinfer/data/aot"
SPECS = Path(__file__).with_name("specs.py")
# Variables that flashinfer/jit/cpp_ext.py and core.py of 0.7.0.post1 read; each would change build.ninja.
REMOVED = (
    "CC", "CUDA_PATH", "FLASHINFER_NVCC", "FLASHINFER_NVCC_THREADS", "FLASHINFER_EXTRA_CFLAGS",
    "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS", "FLASHINFER_JIT_DEBUG", "FLASHINFER_JIT_VERBOSE",
    "FLASHINFER_DISABLE_JIT", "PYTHONPATH", "PYTHONHOME",
)  # fmt: skip
# The compilers' variables that the server must have too.
COMPILER_VARIABLES = ("CUDA_HOME", "CXX", "FLASHINFER_NVCC_LAUNCHER", "FLASHINFER_CXX_LAUNCHER")


@dataclass(frozen=True)
class KernelEnvironment:
    """An interpreter with a patched FlashInfer: versions by distribution, Python's headers, the queue's sha256."""

    python: Path
    site_packages: Path
    versions: Mapping[str, str]
    include: str
    queue: str

    def ninja(self, chain: Toolchain) -> Path:
        """Return the ninja that FlashInfer runs there; 1.11 cannot read 1.13's log and would compile again."""
        own_ninja = self.python.parent / "ninja"
        return own_ninja if own_ninja.is_file() else chain.ninja


def examine(python: Path, table: KernelTable, stack: str, checkout: Path | None = None) -> KernelEnvironment:
    """Return the environment of `python`. Raises CompileError if FlashInfer, torch or the stack's patches do not fit.

    If `python` imports FlashInfer from the clone `checkout`, any change to its sources is accepted.
    """
    answer = ask(python, "probe")
    versions = {name: answer[name] for name in ("flashinfer-python", "torch", "apache-tvm-ffi")}
    problems = [f"{name} is not installed" for name, value in answer.items() if not value]
    if versions["flashinfer-python"].partition("+")[0] not in ("", table.flashinfer):
        problems = [f"it has flashinfer-python {versions['flashinfer-python']} instead of {table.flashinfer}"]
    fix = "without --python   # or name another one"
    if not problems and checkout:
        if Path(answer["package"]).resolve().parent == checkout.resolve():
            parts = ("csrc", "include", "flashinfer/jit")  # the inputs of generators and compilers
            files = (path for part in parts for path in sorted((checkout / part).rglob("*")) if path.suffix != ".pyc")
            listing = {str(path.relative_to(checkout)): sha256_file(path) for path in files if path.is_file()}
            queue = f"checkout {archive.tree_sha256(listing)}"
            return KernelEnvironment(python, checkout, versions, answer["include"], queue)
        problems = [f"it imports {answer['package']} instead of the checkout {checkout}"]
        fix = "again   # first restart the container; its start makes the checkout importable"
    elif not problems:
        site_packages = Path(answer["package"]).parent
        pinned = pins.load().component(stack, "flashinfer").patches
        try:
            info = site_packages / f"flashinfer_python-{versions['flashinfer-python']}.dist-info"
            installed = Installed.read(info)
            lock = verify.require_locked(installed, load_patched())
            problems = verify.differences(installed, ImageChanges())[:5]
            if lock.queue != pinned:
                problems = [f"its FlashInfer has the patches {lock.queue} instead of {pinned}"]
            if not problems:
                return KernelEnvironment(python, site_packages, versions, answer["include"], lock.queue_sha256)
        except IntegrityError as error:
            problems = [f"{error.what}: {error.why}"]
        fix = "./inv patch   # prints the path of FlashInfer's patched wheel; install it there"
    raise CompileError(f"no kernels can be built for {python}", "; ".join(problems), fix, code="compile.environment")


def ask(python: Path, question: str, *, env: Mapping[str, str] | None = None, requests: Any = None) -> Any:
    """Run specs.py with `python` and return its output. Raises CompileError."""
    fix = "without --python   # or name an interpreter that has FlashInfer and torch"
    unset = [word for name in REMOVED for word in ("-u", name)]
    try:
        output = run(["env", *unset, python, SPECS, question], env=env, stdin=json.dumps(requests), fix=fix).stdout
        answer = parse_json((output.splitlines() or [""])[-1], f"the answer of {python}")
    except (ProcessError, DocumentError) as error:
        raise CompileError(f"cannot ask {python}", error.why, fix, code="compile.environment") from None
    if isinstance(answer, dict) and "error" in answer:
        raise CompileError(f"FlashInfer of {python} refuses", str(answer["error"]), fix, code="compile.environment")
    if not isinstance(answer, dict if question == "probe" else list):
        raise CompileError(f"cannot ask {python}", "its answer is not understood", fix, code="compile.environment")
    return answer


def write(environment: KernelEnvironment, modules: tuple[KernelModule, ...], env: Mapping[str, str]) -> dict[str, Path]:
    """Let FlashInfer write sources and build.ninja of `modules`; return each module's folder by name."""
    answer = ask(environment.python, "write", env=env, requests=[sets.request(module) for module in modules])
    return {module["name"]: Path(module["folder"]) for module in answer}
