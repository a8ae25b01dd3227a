"""`python -m spark_mxfp4.kernels.offline`: compile the Triton kernels for GPUs that are absent, and audit the code.

The program disassembles the code with Triton's nvdisasm. It reports the matrix instructions, the spills of registers to
local memory, and whether shared memory suffices. No kernel runs, so results and speed are not tested.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spark_mxfp4.kernels import fused, mxfp8, sorting

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
NVDISASM_SECONDS = 120
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
EXPERTS, TOP_K = 128, 4  # gpt-oss-120b's
# Matrix instructions: HMMA, wgmma's HGMMA, tcgen05's UTC…MMA, and those for 8 and 4 bits, with or without .SF.
MATRIX = re.compile(r"(UTC)?[HIQOF]?G?MMA\b|UTC\w*MMA")


class OfflineTarget(NamedTuple):
    """A GPU to compile for: its capability, shared memory of a block in bytes, and its matrix instruction.

    Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". `device` is the name
    in tuned.json that gives its tiles. `scaled` is the instruction of W4A8-MX tiles, if Triton (3.8 or later) has one.
    """

    capability: int
    shared: int
    product: str
    scaled: str | None = None
    device: str = "any"

    @property
    def name(self) -> str:
        """The capability as NVIDIA writes it: 12.1."""
        return f"{self.capability // 10}.{self.capability % 10}"


TARGETS = (
    OfflineTarget(80, 163 * 1024, "HMMA"),
    OfflineTarget(89, 99 * 1024, "HMMA"),
    OfflineTarget(90, 227 * 1024, "HGMMA"),
    OfflineTarget(100, 227 * 1024, "UTCHMMA", "UTCQMMA"),
    OfflineTarget(120, 99 * 1024, "HMMA", "QMMA.SF"),
    OfflineTarget(121, 99 * 1024, "HMMA", "QMMA.SF", "NVIDIA GB10"),
)
POINTERS = {
    "x_ptr": "*bf16", "x_scales_ptr": "*bf16", "w_ptr": "*u8", "w_scales_ptr": "*u8", "bias_ptr": "*bf16",
    "out_ptr": "*bf16", "pairs_ptr": "*i32", "experts_ptr": "*i32", "pairs": "i32", "rows": "i32", "columns": "i32",
    "alpha": "fp32", "limit": "fp32", "shift": "fp32",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A kernel for one capability: matrix instructions by name, accesses to local memory, bytes of shared memory.

    `wanted` is the required prefix of its matrix instruction, None for kernels without products. `chosen` tells whether
    `fused.moe` uses the kernel on that capability.
    """

    kernel: str
    capability: str
    wanted: str | None
    matrix: dict[str, int]
    spills: int
    instructions: int
    shared: int
    shared_limit: int
    chosen: bool = True

    def problems(self) -> list[str]:
        """Return the problems; an empty list if there are none."""
        problems = []
        if self.wanted and not any(name.startswith(self.wanted) for name in self.matrix):
            problems.append(f"no {self.wanted}, but {', '.join(self.matrix) or 'no matrix instruction'}")
        if self.spills:
            problems.append(f"{self.spills} accesses to local memory")
        if self.shared > self.shared_limit:
            problems.append(f"{self.shared} bytes of shared memory, more than {self.shared_limit}")
        if not self.instructions:
            problems.append("no instructions")
        return problems


def native_scaling() -> bool:
    """Return whether this Triton has native block-scaled products on capability 12.x and 10.x."""
    return tuple(map(int, triton.__version__.split(".")[:2])) >= fused.SCALED_SINCE


def tiles_of(target: OfflineTarget) -> list[fused.Tiles]:
    """Return the tiles that `fused.moe` uses on a target for 1 to 8,192 tokens, adapted to this Triton version."""
    chosen = (fused.choose(target.device, tokens * TOP_K, EXPERTS) for tokens in (1, 2048, 8192))
    return list(dict.fromkeys(chosen))


def product(tiles: fused.Tiles, target: OfflineTarget, top_k: int) -> Compiled:
    """Compile a grouped product with bias: the first product, with SwiGLU, if `top_k` is above 0, else the second."""
    arguments = POINTERS | ({"x_ptr": "*u8", "x_scales_ptr": "*u8"} if tiles.scaled else {})
    constants = {
        "TOP_K": top_k, "BIAS": True, "SCALED": tiles.scaled, "ROWS": tiles.rows, "TOKENS": tiles.tokens,
        "COLUMNS": tiles.columns,
    }  # fmt: skip
    form = "W4A8-MX" if tiles.scaled else "bf16"
    name = f"{'gate_up' if top_k else 'down'} {form} {tiles.rows}x{tiles.tokens}x{tiles.columns}"
    wanted = target.scaled if tiles.scaled and native_scaling() else target.product
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return _inspected(name, wanted, target, _compile(fused.grouped_gemm, arguments, constants, target, **options))


def helpers(target: OfflineTarget) -> Iterator[Compiled]:
    """Compile the kernels around the products: sorting, the weighted sum, and quantising activations to MXFP8."""
    ids = {"ids_ptr": "*i32", "map_ptr": "*i32", "counts_ptr": "*i32", "count": "i32", "known": "i32"}
    placement = ids | {"pairs_ptr": "*i32", "experts_ptr": "*i32", "experts": "i32", "blocks": "i32"}
    reduce = {
        "output_ptr": "*bf16", "ids_ptr": "*i32", "map_ptr": "*i32", "shares_ptr": "*fp32", "result_ptr": "*bf16",
        "pairs": "i32", "known": "i32", "experts": "i32", "width": "i32",
    }  # fmt: skip
    quantize = {"x_ptr": "*bf16", "elements_ptr": "*u8", "scales_ptr": "*u8", "blocks": "i32"}
    for name, function, arguments, constants in (
        ("count", sorting.count_pairs, ids, {"SCAN": sorting.SCAN}),
        ("place", sorting.place_pairs, placement, {"SIZE": 128, "SCAN": sorting.SCAN, "EXPERTS": fused.MAX_EXPERTS}),
        ("reduce", fused.reduce, reduce, {"TOP_K": fused.MAX_TOP_K, "COLUMNS": 1024}),
        ("quantize", mxfp8.quantize, quantize, {"BLOCKS": mxfp8.BLOCKS}),
    ):
        yield _inspected(name, None, target, _compile(function, arguments, constants, target))


def audit(targets: tuple[OfflineTarget, ...] = TARGETS) -> Iterator[Compiled]:
    """Compile every kernel for every target, and GB10's tiles also for targets that could use them but do not."""
    for target in targets:
        tiles = tiles_of(target)
        others = tiles_of(target._replace(device="NVIDIA GB10")) if target.scaled else []
        for tile in (*tiles, *(other for other in others if other not in tiles)):
            for top_k in (TOP_K, 0):
                yield replace(product(tile, target, top_k), chosen=tile in tiles)
        yield from helpers(target)


def _compile(
    function: Any, arguments: dict[str, str], constants: dict[str, Any], target: OfflineTarget, **options: int
) -> Any:
    """Compile with pointers and sizes that are multiples of 16, as torch's are."""
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
    return triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=options)


def _inspected(name: str, wanted: str | None, target: OfflineTarget, kernel: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        listing = subprocess.run(
            [str(NVDISASM), "-c", str(cubin)], capture_output=True, text=True, check=True, timeout=NVDISASM_SECONDS
        ).stdout
    counts = Counter(INSTRUCTION.findall(listing))
    return Compiled(
        kernel=name, capability=target.name, wanted=wanted,
        matrix={name: number for name, number in sorted(counts.items()) if MATRIX.match(name)},
        # LDL and STL access local memory, which means spilled registers.
        spills=sum(number for name, number in counts.items() if name.startswith(("LDL", "STL"))),
        instructions=counts.total(), shared=kernel.metadata.shared, shared_limit=target.shared,
    )  # fmt: skip


def main() -> None:
    """Compile for the targets in the flags and print each kernel; exit with 1 if a chosen kernel has a problem."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--capabilities", help="comma-separated, such as 8.9,12.0; default: all of them")
    flags.add_argument("--output", help="JSON file for the table")
    arguments = flags.parse_args()
    names = arguments.capabilities.split(",") if arguments.capabilities else [target.name for target in TARGETS]
    if unknown := [name for name in names if name not in {target.name for target in TARGETS}]:
        flags.error(f"no such capability: {', '.join(unknown)} · choose from {', '.join(t.name for t in TARGETS)}")
    rows, failed = [], False
    for row in audit(tuple(target for target in TARGETS if target.name in names)):
        rows.append(asdict(row))
        problems = row.problems()
        failed = failed or (row.chosen and bool(problems))
        instructions = ", ".join(f"{number} {name}" for name, number in row.matrix.items()) or "-"
        line = f"{row.capability:5} {row.kernel:32} {instructions} · {row.shared} B shared"
        note = "" if row.chosen else " · not chosen there"
        sys.stdout.write(f"{line} · {'; '.join(problems) or 'ok'}{note}\n")
        sys.stdout.flush()
    if arguments.output:
        lines = ",\n".join(json.dumps(row) for row in rows)
        table = f'{{"triton": "{triton.__version__}", "kernels": [\n{lines}\n]}}\n'
        Path(arguments.output).write_text(table, encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
