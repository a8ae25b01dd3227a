"""Print the modules that FlashInfer's JIT would build. A program; its first argument is the tree under test.

A second argument sets the variable FLASHINFER_MOE_SM120_DTYPES. If stdin is `spec`, it prints name, flags and units of
the SM120 fused MoE's module (a unit's path → its text, null if it is not generated). If stdin is `dense`, it prints the
same for two SM120 FP4 products, `fp4` (NVFP4) and `mxfp4`; null for one that this FlashInfer cannot generate. The
packages flashinfer and flashinfer.jit are imported without running their __init__, which loads every operator and a GPU
library.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

tree = Path(sys.argv[1])
os.environ.update(dict(zip(["FLASHINFER_MOE_SM120_DTYPES"], sys.argv[2:], strict=False)))
for name in ("flashinfer", "flashinfer.jit"):
    package = ModuleType(name)
    package.__path__ = [str(tree / name.replace(".", "/"))]
    sys.modules[name] = package

from flashinfer.jit import env  # noqa: E402
from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module  # noqa: E402


def spec():
    return described(gen_cutlass_fused_moe_sm120_module())


def dense():
    env.FLASHINFER_CSRC_DIR = tree / "csrc"  # an sdist's folder of templates, which these generators read
    from flashinfer.jit.gemm import core

    generators = {name: getattr(core, f"gen_gemm_sm120_module_cutlass_{name}", None) for name in ("fp4", "mxfp4")}
    return {name: generator and described(generator()) for name, generator in generators.items()}


def described(module):
    generated = str(env.FLASHINFER_GEN_SRC_DIR)
    units = {
        str(source).replace(str(tree), "").replace(generated, ""): source.read_text() if source.exists() else None
        for source in module.sources
    }
    return {"name": module.name, "flags": module.extra_cuda_cflags, "cflags": module.extra_cflags, "units": units}


answer = {"spec": spec, "dense": dense}[sys.stdin.read()]()
print(json.dumps(answer))
