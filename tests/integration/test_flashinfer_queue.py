"""The FlashInfer queue of each stack on its real sdist: default and filtered builds.

No GPU and no CUDA compiler is needed: FlashInfer generates the units, and host tools check its C++ as far as possible.
The names of filters and the number of jobs are tested by the tests that we submit to FlashInfer (test_submissions.py
runs them).
"""

import hashlib
import json
import os
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkforge import pins
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run
from sparkforge.patching import wheels
from sparkforge.patching.series import Queue
from sparkforge.pins.wheels import TargetMachine
from sparkforge.sources import fetch

pytestmark = [pytest.mark.integration, pytest.mark.needs("git", "c++")]

HERE = Path(__file__).parent
NEEDED = (  # of 210 MB
    "flashinfer/", "csrc/fused_moe/cutlass_backend/", "csrc/nv_internal/", "csrc/fp4_gemm_cutlass_sm120",
    "include/flashinfer/gemm/",
)  # fmt: skip
MOE = "csrc/fused_moe/cutlass_backend/"
KERNELS = "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/"
RUNNERS = {  # the binding's choices: name → the runner's first two types
    "fp8xfp4": "__nv_fp8_e4m3, kernels::Fp4Type", "fp4xfp4": "kernels::Fp4Type, kernels::Fp4Type",
    "fp8xfp8": "__nv_fp8_e4m3, __nv_fp8_e4m3", "fp8xuint4": "__nv_fp8_e4m3, cutlass::uint4b_t",
    "bf16xbf16": "__nv_bfloat16, __nv_bfloat16", "bf16xfp4": "__nv_bfloat16, kernels::Fp4Type",
    "bf16xfp8": "__nv_bfloat16, __nv_fp8_e4m3", "bf16xuint4": "__nv_bfloat16, cutlass::uint4b_t",
    "fp16xfp16": "half, half", "fp16xuint4": "half, cutlass::uint4b_t",
}  # fmt: skip
NAMES = set(RUNNERS)


def unpack(archive, target):
    """Unpack only the needed regular files; the archive's hash was checked."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isfile() and path.startswith(NEEDED):
                file = target / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(tar.extractfile(member).read())
    return target


@pytest.fixture(scope="module", params=["spark", pytest.param("spark-next", marks=pytest.mark.nightly)])
def component(request):
    return pins.load().component(request.param, "flashinfer")


@pytest.fixture(scope="module")
def pristine(component, large_folder):
    (name,) = [name for name in component.files if name.endswith(".tar.gz")]
    sdist = fetch.fetch_pinned(component, name)
    with large_folder("pristine") as folder:
        yield unpack(sdist, folder)


@pytest.fixture(scope="module")
def queue(component):
    return Queue.load(ROOT / "patches" / component.patches)


@pytest.fixture(scope="module")
def patched(pristine, queue, large_folder):
    with large_folder("patched") as folder:
        tree = shutil.copytree(pristine, folder / "tree")
        queue.apply_to(tree)
        yield tree


@pytest.fixture(scope="module")
def ask(forks):
    """Return a function: a workspace, a tree → the answer of FlashInfer's JIT, in a fork of one process with torch."""
    environment = {**os.environ, "FLASHINFER_CUDA_ARCH_LIST": "12.1a"}
    with forks(["torch.utils.cpp_extension"], environment) as process:

        def ask(workspace, tree, question="spec", dtypes="", **env):
            env["FLASHINFER_WORKSPACE_BASE"] = str(workspace)
            output = process.run(HERE / "flashinfer_jit.py", (tree, dtypes), question, **env)
            return json.loads(output.splitlines()[-1])

        yield ask


TWO = "fp4xfp4,bf16xbf16"


@pytest.fixture(scope="module")
def specs(ask, pristine, patched, tmp_path_factory):
    """Return the specifications of FlashInfer's JIT for each tree: {dtypes: specification}."""

    def asked(tree, *filters):
        folder = tmp_path_factory.mktemp("workspace")
        return {dtypes: ask(folder, tree, dtypes=dtypes) for dtypes in filters}

    return SimpleNamespace(pristine=asked(pristine, ""), patched=asked(patched, "", "fp8xfp4", TWO))


def hashes(tree):
    files = (file for file in tree.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(tree)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_queue_changes_nothing_else_and_the_patched_wheel_has_the_same_files(component, pristine, patched, queue):
    before = hashes(pristine)
    assert {path for path, digest in hashes(patched).items() if before.get(path) != digest} == set(queue.paths)
    wheel = wheels.patched_wheel(component, TargetMachine("aarch64"))
    with zipfile.ZipFile(wheel.path) as archive:
        for path in queue.paths:
            installed = f"flashinfer/data/{path}" if path.startswith(("csrc/", "include/")) else path
            assert archive.read(installed) == (patched / path).read_bytes()


def instances(units):
    text = "\n".join(text for text in units.values() if text)
    flat = re.sub(r"\s+", " ", text)
    return re.findall(r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\([^;]*;|template void [^;]*;", flat)


def test_default_build_is_upstreams(specs):
    upstream, ours = specs.pristine[""], specs.patched[""]
    assert ours == upstream  # name, flags, the same units, byte for byte
    assert ours["name"] == "fused_moe_120"
    assert len(ours["units"]) == 96


def test_filtered_build_holds_what_gpt_oss_needs_and_no_more(specs):
    everything, filtered = specs.patched[""], specs.patched["fp8xfp4"]
    assert filtered["name"] == "fused_moe_120_fp8xfp4"
    assert len(filtered["units"]) == 18
    wanted = [i for i in instances(everything["units"]) if "(Sm120, __nv_fp8_e4m3, SafeFP4," in i]
    assert len(wanted) == 24  # 3 tiles, 2 output types, 2 fusions, swapped or not
    assert sorted(instances(filtered["units"])) == sorted(wanted)
    kept = {path for path, text in filtered["units"].items() if text is None}
    runners = {path for path, text in everything["units"].items() if text is None} - kept
    assert all("/moe_gemm_kernels_" in path for path in runners)
    assert len(runners) == 13
    added = set(filtered["flags"]) - set(everything["flags"])
    assert added == {"-DFLASHINFER_MOE_DTYPES_FILTERED"} | {
        f"-DFLASHINFER_MOE_BUILDS_{name.upper()}={int(name == 'fp8xfp4')}" for name in NAMES
    }


def instantiated(tree, path, flags, scratch):
    """Return a unit's explicit instantiations after the preprocessor, with only the filter's header included."""
    flags = [flag for flag in flags if flag.startswith("-DFLASHINFER_MOE_")]
    lines = (tree / path).read_text().splitlines()
    source = scratch / "unit.cpp"
    source.write_text("\n".join(x for x in lines if not x.startswith("#include") or "moe_dtype_filter.h" in x))
    include = tree / KERNELS / "include"
    enabled = ["-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4"]
    command = ["c++", "-E", "-P", f"-I{include}", f"-iquote{tree / KERNELS / 'moe_gemm'}", *enabled, *flags, source]
    return re.findall(r"template class ([^;]*);", re.sub(r"\s+", " ", run(command).stdout))


@pytest.mark.parametrize(
    ("path", "count"),
    [(MOE + "cutlass_fused_moe_instantiation.cu", 25), (KERNELS + "moe_gemm/moe_gemm_kernels_fp8_fp4.cu", 8)],
)
def test_only_wanted_runners_are_instantiated(pristine, patched, specs, tmp_path, path, count):
    upstream = instantiated(pristine, path, [], tmp_path)
    assert instantiated(patched, path, [], tmp_path) == upstream
    assert len(upstream) == count
    left = instantiated(patched, path, specs.patched["fp8xfp4"]["flags"], tmp_path)
    kinds = [f"__nv_fp8_e4m3, Fp4Type, {output}>" for output in ("half", "__nv_bfloat16")]
    assert [runner.partition("<")[2] for runner in left] == kinds


def dispatched(tree, flags, held, scratch):
    flags = [flag for flag in flags if flag.startswith("-DFLASHINFER_MOE_")]
    binding = (tree / MOE / "flashinfer_cutlass_fused_moe_binding.cu").read_text()
    begin, end = binding.index("template <typename Runner>\nstruct MoeRunnerTypes;"), binding.index("class DtypeUtils")
    probes = "".join(
        f'try {{ makeRunner<kernels::CutlassMoeFCRunner<{types}>>(); std::cout << "built\\n"; }}\n'
        'catch (std::runtime_error const& error) { std::cout << error.what() << "\\n"; }\n'
        for types in RUNNERS.values()
    )
    holds = "".join(f"HOLDS({RUNNERS[name].replace('kernels::', '')})\n" for name in held)
    (scratch / "dispatch.cpp").write_text(
        f'#include "{HERE / "moe_runner_stubs.h"}"\n#include "moe_dtype_filter.h"\nnamespace kernels {{\n{holds}}}\n'
        f"{binding[begin:end]}\nint main() {{\n{probes}}}\n"
    )
    program = scratch / "dispatch"
    run(["c++", "-std=c++17", *flags, f"-I{tree / KERNELS / 'include'}", scratch / "dispatch.cpp", "-o", program])
    return dict(zip(RUNNERS, run([program]).stdout.splitlines(), strict=True))


@pytest.mark.parametrize("dtypes", ["fp8xfp4", TWO, ""])
def test_calling_a_filtered_kernel_gives_a_clear_error(patched, specs, tmp_path, dtypes):
    held = set(dtypes.split(",")) if dtypes else NAMES
    answers = dispatched(patched, specs.patched[dtypes]["flags"], held, tmp_path)
    assert {name for name, answer in answers.items() if answer == "built"} == held
    for name in NAMES - held:
        assert answers[name].startswith(f"This fused MoE was built without {name} (activation x weight), since ")
        assert "FLASHINFER_MOE_SM120_DTYPES does not name it." in answers[name]


@pytest.fixture(scope="module")
def dense(ask, pristine, patched, tmp_path_factory):
    """Return the modules of dense FP4 that FlashInfer's JIT would build, as it came and patched."""
    trees = {"pristine": pristine, "patched": patched}
    answers = {name: ask(tmp_path_factory.mktemp("workspace"), tree, "dense") for name, tree in trees.items()}
    return SimpleNamespace(**answers)


KERNEL = re.compile(r"mxfp4GemmKernelLauncherSm120<(.+?)>\(")


def test_nvfp4_is_built_as_before(dense):
    for spec in (dense.patched["fp4"], dense.pristine["fp4"]):
        assert spec["units"].pop("/csrc/fp4_gemm_cutlass_sm120.cu")  # also has MXFP4
    assert dense.patched["fp4"] == dense.pristine["fp4"]
    assert len(dense.patched["fp4"]["units"]) == 16
    assert dense.pristine["mxfp4"] is None  # the next release may have it


def test_every_tactic_of_mxfp4_reaches_a_kernel_that_is_built(patched, dense, tmp_path):
    """FlashInfer's own list of tactics and its dispatcher are compiled for the host with stub kernels."""
    (tmp_path / "cute").mkdir()
    (tmp_path / "cute/tensor.hpp").write_text(
        "namespace cute { template <int> struct C {}; template <class...> struct Shape {};\n"
        + "".join(f"using _{size} = C<{size}>;\n" for size in (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 768))
        + "}\n"
    )
    (tmp_path / "cuda_runtime_api.h").write_text("typedef void* cudaStream_t;\n")
    (tmp_path / "tactics.cpp").write_text("""
#include <cstddef>
#include "flashinfer/gemm/mxfp4_gemm_dispatch_sm120.h"
namespace flashinfer::gemm {
template <typename T, int M, int N, int K, bool Swap, bool Pingpong, bool StreamK>
size_t mxfp4GemmKernelLauncherSm120(void*, void const*, void const*, void const*, void const*, float const*, int m,
                                    int n, int k, int, char*, size_t, cudaStream_t) {
  std::cout << M << ", " << N << ", " << K << ", " << std::boolalpha << Swap << ", " << Pingpong << ", " << StreamK
            << "\\n";
  return m * 10000 + n * 100 + k;
}
}
int main() {
  using namespace flashinfer::gemm;
  auto run = [](CutlassGemmConfig const& config) {
    return dispatchMXFP4xMXFP4GemmCTAShapeSm120<float>(
        config, static_cast<void*>(nullptr), static_cast<void const*>(nullptr), static_cast<void const*>(nullptr),
        static_cast<void const*>(nullptr), static_cast<void const*>(nullptr), static_cast<float const*>(nullptr),
        3, 5, 7, 1, static_cast<char*>(nullptr), size_t(0), cudaStream_t(nullptr));
  };
  for (auto const& config : getMxfp4GemmConfigsSm120())
    if (config.cluster_shape != ClusterShape::ClusterShape_1x1x1 || run(config) != 30507) return 1;
  // What is not built is refused, and the tile of tactic -1 (fp4_gemm_cutlass_sm120.cu) is built.
  auto with = [](CutlassTileConfigSM120 tile, MainloopScheduleType schedule, bool stream_k) {
    return CutlassGemmConfig(tile, schedule, EpilogueScheduleType::AUTO, ClusterShape::ClusterShape_1x1x1, false,
                             stream_k);
  };
  for (auto const& config : {with(CutlassTileConfigSM120::CtaShape256x128x64B, MainloopScheduleType::AUTO, false),
                             with(CutlassTileConfigSM120::CtaShape128x64x64B, MainloopScheduleType::PINGPONG, true)})
    try { run(config); return 2; } catch (std::runtime_error const&) {}
  run(with(CutlassTileConfigSM120::CtaShape128x128x128B, MainloopScheduleType::AUTO, false));
}
""")
    program = tmp_path / "tactics"
    include = [f"-I{tmp_path}", f"-I{patched / 'include'}"]
    run(["c++", "-std=c++17", *include, tmp_path / "tactics.cpp", "-o", program])
    *reached, default = run([program]).stdout.splitlines()
    built = KERNEL.findall("\n".join(filter(None, dense.patched["mxfp4"]["units"].values())))
    assert len(reached) == len(set(reached)) == 14
    assert sorted(built) == sorted(f"{dtype}, {kernel}" for dtype in ("__nv_bfloat16", "half") for kernel in reached)
    assert default == "128, 128, 256, false, false, false"
