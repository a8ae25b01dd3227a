"""vLLM's real sources: the table of targets, whole C++ extensions, and CUDA units compiled for 12.1a and audited.

torch without CUDA stands in for torch with CUDA, whose libraries are gigabytes: the headers are the same, and so is the
machine code (docs/concepts/vllm-extensions.md). What includes CUTLASS is not compiled here: it comes by git.
"""

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.audit.report import audit_files
from sparkforge.compile import jobs, toolchain
from sparkforge.compile.jobs import Site
from sparkforge.compile.peaks import Peaks
from sparkforge.compile.vllm import build as vllm_build
from sparkforge.compile.vllm import sources as vllm_sources
from sparkforge.compile.vllm import targets as vllm_targets
from sparkforge.compile.vllm.build import ExtensionOrder
from sparkforge.compile.vllm.environment import Interpreter
from sparkforge.core import manifest, memory
from sparkforge.core.errors import CompileError
from sparkforge.core.process import run
from sparkforge.pins import locks

pytestmark = pytest.mark.integration
HOOK = Path(__file__).with_name("cuda_without_torch_cuda.cmake")
TABLE = vllm_targets.load("0.32.0")
WHOLE = ("cumem_allocator", "spinloop", "fs_io_C")
LOAD = """
import ctypes, importlib.util, sys
import torch
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # the driver's functions, which no test calls
for file in sys.argv[2:]:
    spec = importlib.util.spec_from_file_location(file.rpartition("/")[2].partition(".")[0], file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(spec.name, callable(getattr(module, {"cumem_allocator": "init_module", "spinloop": "spinloop",
                                               "fs_io_C": "batch_lookup"}[spec.name])))
"""


def cannot(why, hint):
    """Skip on a user's machine and fail on CI, as the mark `needs` does."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{why}: {hint}")


@pytest.fixture(scope="module")
def chain():
    try:
        return toolchain.find("12.1a", minimum_cxx=12)  # less than a whole vLLM needs: see HOOK
    except CompileError as error:
        cannot(error.why, error.fix)


@pytest.fixture(scope="module")
def cmake(large_folder):
    """The locked CMake alone; the rest of its set is torch with CUDA."""
    with large_folder("cmake") as folder:
        text = locks.lock_path("build-vllm").read_text()
        (folder / "cmake.txt").write_text(re.search(r"^cmake==.*(?:\n    .*)*", text, re.MULTILINE)[0] + "\n")
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--require-hashes", "--no-deps"]
        run([*command, "-r", folder / "cmake.txt", "--target", folder], env=locks.uv_environment())
        yield folder / "bin/cmake"


@pytest.fixture(scope="module")
def order(chain, cmake, large_folder):
    """An order for vLLM's real sources with everything left out that comes by git; `cmake` configures it once."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        cannot("there is no Python.h", f"sudo apt install python3.{sys.version_info.minor}-dev")
    torch = run([sys.executable, "-c", "import torch; print(torch.__version__)"]).stdout.strip()
    versions = {"torch": torch, "built for python": sys.version.split()[0], "cmake": "locked"}
    interpreter = Interpreter(Path(sys.executable), cmake, versions)
    with pytest.MonkeyPatch.context() as patch, large_folder("vllm") as path:
        patch.setenv("SPARKFORGE_STATE", str(path / "state"))
        patch.setenv("CUDA_HOME", str(chain.home))  # else the audit's nvdisasm is installed once more, into that state
        patch.setenv("PYTHONPATH", str(cmake.parent.parent))  # its bin/cmake is a Python script
        patch.setattr(vllm_build, "CLEARED", tuple(name for name in vllm_build.CLEARED if name != "PYTHONPATH"))
        patch.setattr(vllm_build, "OPTIONS", (*vllm_build.OPTIONS, f"-DCMAKE_PROJECT_vllm_extensions_INCLUDE={HOOK}"))
        sources = vllm_sources.fetch_sources(TABLE, WHOLE, None, "spark")
        yield ExtensionOrder(WHOLE, "12.1a", path / "overlay", chain, interpreter, sources, TABLE)


@pytest.mark.nightly
def test_whole_extensions_are_built_loaded_beside_torch_and_not_built_twice(order, chain):
    build = vllm_build.build(order)
    assert (build.units, build.compiled + build.cached) == (3, 3)
    record = manifest.load(order.output)
    assert sorted(record.outputs) == sorted(TABLE.targets[name].output for name in WHOLE)
    files = [order.output / name for name in record.outputs]
    driver = chain.home / "lib64/stubs/libcuda.so"
    loaded = subprocess.run([sys.executable, "-c", LOAD, driver, *files], capture_output=True, text=True, check=False)
    assert sorted(loaded.stdout.splitlines()) == [f"{name} True" for name in sorted(WHOLE)], loaded.stderr
    assert vllm_build.build(order).compiled == 0
    assert not (order.sources.tree / "vllm/third_party/flashmla/flash_mla_interface.py").exists()


# Units that include nothing of CUTLASS; CPU-seconds 8 and 6.
UNITS = {
    "_moe_C_stable_libtorch/csrc/moe/moe_wna16.cu.o": ("sm_120", r"moe_wna16_gemm_kernel", ""),
    "_C_stable_libtorch/csrc/quantization/fp4/nvfp4_quant_kernels.cu.o":
        ("sm_120f", r"cvt_fp16_to_fp4", r"^F2FP\.SATFINITE\.E2M1"),
}  # fmt: skip


@pytest.mark.nightly
def test_cuda_units_for_121a_come_out_as_vllm_maps_them_and_fp4_is_in_hardware(order):
    wider = replace(order, targets=tuple(TABLE.used))
    assert wider.folder == order.folder, "what is built does not change how it is configured"
    vllm_build.configure(wider)
    every = {unit.name: unit for unit in vllm_build.units_of(wider)}
    code = vllm_build.code_of(list(every.values()))
    assert {"sm_120", "sm_120f"} < set(code)
    assert all("sm_12" in target or "compute_" in target for target in code), "else nothing of it runs on 12.1"
    units = [every[name] for name in UNITS]
    peaks = Peaks("test")
    plan = jobs.make_schedule(list(UNITS), peaks, memory.measure())
    jobs.run(units, plan, peaks, Site(wider.env, order.folder / "logs", order.lock))
    for unit, (target, name, needs) in zip(units, UNITS.values(), strict=True):
        file = unit.cwd / re.search(r" -o (\S+\.o)$", unit.command[-1])[1]
        report = audit_files([file], tools=toolchain.audit_tools)
        report.require_clean()
        assert [row.target for row in report.coverage] == [target]
        kernels = [kernel for binary in report.binaries for cubin in binary.cubins for kernel in cubin.kernels]
        wanted = [kernel for kernel in kernels if re.search(name, kernel.name)]
        assert wanted
        assert all(kernel.count(needs) >= 8 for kernel in wanted if needs)
