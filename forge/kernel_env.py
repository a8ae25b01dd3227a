"""The Python environment that kernels are built for: what it holds, and the variables that a server of it must have.

FlashInfer writes paths and flags into each build.ninja, at run time again, and ninja compiles again whatever differs.
So the variables that reach that file are fixed here, and those that are not ours are removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge import audit_rules, kernel_sets, patch, pins
from forge.kernel_sets import Module, Table
from forge.patch import State
from forge.toolchain import Toolchain
from sparkforge.errors import CommandError, KernelEnvironmentError
from sparkforge.files import sha256_file
from sparkforge.paths import ROOT
from sparkforge.process import run

SPECS = Path(__file__).with_name("flashinfer_specs.py")
STACK = "spark"
# Read by flashinfer/jit/cpp_ext.py and core.py of 0.7.0.post1; with one of these a build.ninja would be another.
REMOVED = (
    "CC", "CUDA_PATH", "FLASHINFER_NVCC", "FLASHINFER_NVCC_THREADS", "FLASHINFER_EXTRA_CFLAGS",
    "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS", "FLASHINFER_JIT_DEBUG", "FLASHINFER_JIT_VERBOSE",
    "FLASHINFER_DISABLE_JIT", "PYTHONPATH", "PYTHONHOME",
)  # fmt: skip
KEPT = ("CUDA_HOME", "CXX", "FLASHINFER_NVCC_LAUNCHER", "FLASHINFER_CXX_LAUNCHER")


@dataclass(frozen=True)
class Environment:
    """An interpreter with a patched FlashInfer: versions by distribution, and the queue's sha256."""

    python: Path
    site_packages: Path
    versions: Mapping[str, str]
    include: str
    queue: str

    def ninja(self, chain: Toolchain) -> Path:
        """Return the ninja that FlashInfer runs there: 1.11 does not understand 1.13's log and compiles anew."""
        beside = self.python.parent / "ninja"
        return beside if beside.is_file() else chain.ninja


def examine(python: Path, table: Table) -> Environment:
    """Return what `python` has. Raises KernelEnvironmentError if FlashInfer, torch or the patches do not fit."""
    found = ask(python, "probe")
    wrong = [f"{name} is not installed" for name, version in found.items() if not version]
    if found["flashinfer-python"] not in ("", table.flashinfer):
        wrong = [f"it has flashinfer-python {found['flashinfer-python']} and not {table.flashinfer}"]
    if wrong:
        raise KernelEnvironmentError(
            f"no kernels can be built for {python}", "; ".join(wrong), "name another: ./inv build.kernels --python PATH"
        )
    site_packages = Path(found["package"]).parent
    queue = patch.Queue.load(ROOT / "patches" / str(pins.load().component(STACK, "flashinfer").patches))
    state = patch.inspect(site_packages, queue).state
    if state is not State.APPLIED:
        raise KernelEnvironmentError(
            f"no kernels can be built for {python}",
            f"its FlashInfer is {state.value} and not as the patches leave it",
            f"./inv patch --upstream flashinfer --tree {site_packages}",
        )
    versions = {name: found[name] for name in ("flashinfer-python", "torch", "apache-tvm-ffi")}
    return Environment(python, site_packages, versions, found["include"], queue.sha256)


def ask(python: Path, verb: str, *, env: Mapping[str, str] | None = None, question: Any = None) -> Any:
    """Run `flashinfer_specs` by `python` and return its answer. Raises KernelEnvironmentError."""
    fix = "name an interpreter that has FlashInfer and torch: ./inv build.kernels --python PATH"
    words = [word for name in REMOVED for word in ("-u", name)]
    try:
        done = run(["env", *words, python, SPECS, verb], env=env, stdin=json.dumps(question), fix=fix)
        answer = json.loads(done.stdout.splitlines()[-1])
    except CommandError as error:
        raise KernelEnvironmentError(f"cannot ask {python}", error.why, fix) from None
    except (IndexError, ValueError):
        raise KernelEnvironmentError(f"cannot ask {python}", "its answer is not understood", fix) from None
    if isinstance(answer, dict) and "error" in answer:
        raise KernelEnvironmentError(f"FlashInfer of {python} refuses", answer["error"], fix)
    return answer


def write(where: Environment, modules: tuple[Module, ...], env: Mapping[str, str]) -> dict[str, Path]:
    """Have FlashInfer write sources and build.ninja of `modules`; return the folder of each by name."""
    answer = ask(where.python, "write", env=env, question=[kernel_sets.requested(one) for one in modules])
    return {one["name"]: Path(one["folder"]) for one in answer}


def served(chain: Toolchain, table: Table, arch: str, output: Path) -> dict[str, str]:
    """Return the variables of a server that is to find nothing to compile; the build has the same."""
    ours = chain.environment()
    return {
        **{name: ours[name] for name in KEPT},
        **table.environment,
        **table.server,
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(output),
    }


def inputs(where: Environment, chain: Toolchain, modules: tuple[Module, ...], env: Mapping[str, str]) -> dict[str, str]:
    """Return what the built modules come from, as name → hash, version or value."""
    return {
        **where.versions,
        **env,
        "queue": where.queue,
        "modules": kernel_sets.load().digest(modules),
        "audit rules": sha256_file(audit_rules.PATH),
        "python": where.include,
        "site-packages": str(where.site_packages),
        "nvcc": chain.versions["nvcc"],
        "c++": chain.versions["c++"],
        "ninja": run([where.ninja(chain), "--version"]).stdout.strip(),
    }
