"""The Triton kernels compiled without a GPU, and their machine code read: instructions, spills, shared memory."""

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spark_mxfp4.kernels import fused, mxfp8, sorting, tuning

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory of a block, KiB.
SHARED = {90: 227 * 1024, 121: 99 * 1024}
GEMM = {
    "x_ptr": "*bf16", "x_scales_ptr": "*bf16", "w_ptr": "*u8", "w_scales_ptr": "*u8", "bias_ptr": "*bf16",
    "out_ptr": "*bf16", "pairs_ptr": "*i32", "experts_ptr": "*i32", "pairs": "i32", "rows": "i32", "columns": "i32",
    "alpha": "fp32", "limit": "fp32",
}  # fmt: skip


def compiled(function, arguments, constants, capability, **options):
    """Compile for a capability with pointers and sizes that are multiples of 16, as torch's are."""
    names = function.arg_names
    signature = {name: arguments.get(name, "constexpr") for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name][0] == "*" or name == "columns"
    }
    source = ASTSource(
        function, signature, {(names.index(key),): value for key, value in constants.items()}, attributes
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def machine_code(kernel, folder):
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    done = subprocess.run([NVDISASM, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", done.stdout, re.MULTILINE)


def gemm(tiles, capability, top_k):
    arguments = GEMM | ({"x_ptr": "*u8", "x_scales_ptr": "*u8"} if tiles.scaled else {})
    constants = {
        "TOP_K": top_k, "BIAS": True, "SCALED": tiles.scaled, "ROWS": tiles.rows, "TOKENS": tiles.tokens,
        "COLUMNS": tiles.columns,
    }  # fmt: skip
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return compiled(fused.grouped_gemm, arguments, constants, capability, **options)


CHOSEN = [(121, fused.Tiles(**tuning.tiles("NVIDIA GB10", pairs, 128))) for pairs in (4, 8192, 32768)] + [
    (90, fused.Tiles(**tuning.tiles("another", pairs, 128))) for pairs in (4, 32768)
]


@pytest.mark.parametrize("top_k", [4, 0])
@pytest.mark.parametrize(("capability", "tiles"), CHOSEN)
def test_products_use_the_tensor_cores_without_spilling(capability, tiles, top_k, tmp_path):
    kernel = gemm(tiles, capability, top_k)
    assert kernel.metadata.shared <= SHARED[capability]
    code = machine_code(kernel, tmp_path)
    # LDL and STL are local memory: registers that did not suffice.
    assert not [name for name in code if name.startswith(("LDL", "STL"))]
    if capability == 121:
        assert any(name.startswith("QMMA.SF") for name in code) is tiles.scaled
        assert any(name.startswith("HMMA") for name in code) is not tiles.scaled
    else:
        assert any(name.startswith("HGMMA") for name in code)


@pytest.mark.parametrize("capability", [90, 121])
def test_the_small_kernels_compile_without_spilling(capability, tmp_path):
    ids = {"ids_ptr": "*i32", "map_ptr": "*i32", "counts_ptr": "*i32", "count": "i32", "known": "i32"}
    types = ids | {"pairs_ptr": "*i32", "experts_ptr": "*i32", "experts": "i32", "blocks": "i32"}
    reduce = {
        "output_ptr": "*bf16", "ids_ptr": "*i32", "map_ptr": "*i32", "shares_ptr": "*fp32", "result_ptr": "*bf16",
        "pairs": "i32", "known": "i32", "experts": "i32", "width": "i32",
    }  # fmt: skip
    quantize = {"x_ptr": "*bf16", "elements_ptr": "*u8", "scales_ptr": "*u8", "blocks": "i32"}
    for function, arguments, constants in (
        (sorting._count, ids, {"SCAN": 1024}),
        (sorting._place, types, {"SIZE": 128, "SCAN": 1024, "EXPERTS": 512}),
        (fused._reduce, reduce, {"TOP_K": 16, "COLUMNS": 1024}),
        (mxfp8.quantize, quantize, {"BLOCKS": mxfp8.BLOCKS}),
    ):
        code = machine_code(compiled(function, arguments, constants, capability), tmp_path)
        assert code
        assert not [name for name in code if name.startswith(("LDL", "STL"))]
