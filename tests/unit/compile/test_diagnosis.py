import pytest

from sparkforge.compile.diagnosis import explained
from sparkforge.core.errors import ProcessError


@pytest.mark.parametrize(
    "line",
    [
        "error   : Instruction 'cvt with .e2m1x2' not supported on .target 'sm_121'",  # ptxas 13.0.88
        "error   : Feature '.block_scale' not supported on .target 'sm_121'",
    ],
)
def test_missing_suffix_is_named(line):
    error = explained(
        ProcessError(
            "nvcc ended with code 255", f"ptxas x.ptx, line 35; {line}", "run it by hand", code="process.failed"
        )
    )
    assert "without the a suffix" in error.why
    assert line.partition(": ")[2] in error.why
    assert "FLASHINFER_CUDA_ARCH_LIST=12.1a" in error.fix
    assert "arch=compute_121a,code=sm_121a" in error.fix


@pytest.mark.parametrize(
    "line", ["Feature 'wgmma' not supported on .target 'sm_121'", "expression must have a constant value", ""]
)
def test_other_messages_stay(line):
    error = ProcessError("nvcc ended with code 2", line, "run it by hand", code="process.failed")
    assert explained(error) is error


@pytest.mark.parametrize(
    ("printed", "why", "fix"),
    [("x.cuh:11:10: fatal error: cutlass/numeric_size.h: No such file or directory", "CUTLASS has no cutlass/numeric",
      "unset VLLM_CUTLASS_SRC_DIR"),
     ('gemm.cu:1:2: error: #error "left out of this build: see …"', "a repository that is left out", "--targets"),
     ("  No supported CUDA architectures; the build would produce a binary", "no architecture", "build --from source"),
     ("ptxas fatal   : PTX with .target 'sm_121a' cannot be compiled for architecture 'sm_121'", "sm_121a",
      "nvcc -gencode arch=compute_121a,code=sm_121a")],
)  # fmt: skip
def test_what_a_build_of_vllm_runs_into_is_named_with_the_next_step(printed, why, fix):
    explanation = explained(ProcessError("cmake ended with code 1", printed, "read the log", code="process.failed"))
    assert why in explanation.why
    assert fix in explanation.fix
