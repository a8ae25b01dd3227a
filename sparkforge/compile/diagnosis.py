"""Explain messages of compilers that do not say what is wrong."""

from __future__ import annotations

import re

from sparkforge.core.errors import ProcessError

# ptxas up to 13.0 says "Instruction 'cvt with .e2m1x2'", from 13.1 on "Feature 'cvt.e2m1x2.f32'"; block-scaled MMA is a
# "Feature '.block_scale'" in both. Compiled with 13.0.88 and 13.4 (docs/guide/troubleshooting.md).
NO_FP4 = re.compile(
    r"(?P<what>(?:Instruction|Feature) '[^']*(?:e2m1|block_scale|mxf|e2m3|e3m2|ue8m0)[^']*') not supported on \.target "
    r"'(?P<target>sm_12[01])'"
)
SUFFIXED = re.compile(
    r"PTX with \.target '(?P<made>sm_\d+[af])' cannot be compiled for architecture '(?P<asked>sm_\d+)'"
)

# Known failures of building vLLM's extensions: pattern, cause, next step. `{0}` is what the first group matched.
KNOWN = (
    (
        re.compile(r"fatal error: ((?:cutlass|cute)/\S+): No such file or directory"),
        "CUTLASS has no {0}: the folder that VLLM_CUTLASS_SRC_DIR names is another version, or is not its top folder",
        "unset VLLM_CUTLASS_SRC_DIR to take the pinned one; docs/concepts/vllm-extensions.md says how it is brought",
    ),
    (
        re.compile(r"#error.*(left out of this build)"),
        "CMake made a unit of a repository that is {0}",
        "sparkforge/compile/vllm/targets.toml says which are and why; name other --targets",
    ),
    (
        re.compile(r"(No supported CUDA architectures)"),
        "CMake found no architecture to build for ({0})",
        "./inv build --from source",
    ),
)


def explained(error: ProcessError) -> ProcessError:
    """Return the error with cause and fix in place of what a compiler printed, if we know them; else as it is."""
    if match := NO_FP4.search(error.why):
        target = match["target"]
        number = target.removeprefix("sm_")
        return ProcessError(
            error.what,
            f"built for {target} without the a suffix; only {target}a and {target}f have FP4 (ptxas says: {match[0]})",
            (
                f"FLASHINFER_CUDA_ARCH_LIST={number[:2]}.{number[2]}a   # or nvcc -gencode "
                f"arch=compute_{number}a,code=sm_{number}a"
            ),
            code="process.failed",
        )
    if match := SUFFIXED.search(error.why):
        why = f"compiled for {match['made']} and assembled for {match['asked']}: the suffix must be the same in both"
        fix = f"again   # with nvcc -gencode arch={match['made'].replace('sm_', 'compute_')},code={match['made']}"
        return ProcessError(error.what, why, fix, code="process.failed")
    for pattern, why, fix in KNOWN:
        if match := pattern.search(error.why):
            return ProcessError(error.what, why.format(match[1]), fix, code="process.failed")
    return error
