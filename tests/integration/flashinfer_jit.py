"""Ask FlashInfer's own JIT what it would build; run as a program with the tree under test as its argument.

A second argument stands for the variable FLASHINFER_MOE_SM120_DTYPES.

`spec` on stdin prints the SM120 fused MoE's module name, flags and units (path → text of a generated one, else null),
or {"error": …} for a ValueError. `ninja` runs whatever `ninja` is on PATH as FlashInfer does for a build.
The packages flashinfer and flashinfer.jit are entered without their __init__, which load every operator and a GPU
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

from flashinfer.jit import cpp_ext, env  # noqa: E402
from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module  # noqa: E402


def spec():
    try:
        module = gen_cutlass_fused_moe_sm120_module()
    except ValueError as error:
        return {"error": str(error)}
    generated = str(env.FLASHINFER_GEN_SRC_DIR)
    units = {
        str(source).replace(str(tree), "").replace(generated, ""): source.read_text() if source.exists() else None
        for source in module.sources
    }
    return {"name": module.name, "flags": module.extra_cuda_cflags, "cflags": module.extra_cflags, "units": units}


def ninja():
    cpp_ext.run_ninja(Path.cwd(), Path("build.ninja"), verbose=True)


answer = {"spec": spec, "ninja": ninja}[sys.stdin.read()]()
print(json.dumps(answer))
