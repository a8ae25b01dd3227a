"""Compile the CUDA kernels: no spills, matrix instructions that do not wait for each other, asynchronous copies.

The tests in device/ run them.
"""

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from spark_mxfp4.kernels import precompile, router
from spark_mxfp4.kernels.layout import CHUNK_BYTES
from spark_mxfp4.kernels.offline import NVDISASM

# ptxas prints C7512 and C7520 if it makes the matrix instructions wait for each other.
WAITING = re.compile(r"\(C75(?:12|20)\)")
# A GB10's memory bandwidth in bytes/s, multiprocessors (each with four schedulers), low clock under load in Hz, and
# bf16 FLOP/s; docs/performance.md has the sources.
BANDWIDTH, PROCESSORS, CLOCK, FLOPS = 234e9, 48, 2.0e9, 213e12
SLOTS = CHUNK_BYTES / (BANDWIDTH / PROCESSORS) * CLOCK
MATRIX_CYCLES = 2 * 16 * 8 * 16 / (FLOPS / PROCESSORS / 4) * CLOCK
# Rows / 64, split and tokens of shapes 4 to 9 → instructions for 64 x 64 weights, as in docs/performance.md.
COUNTS = {(1, 3, 8): 82, (3, 1, 8): 80, (2, 2, 8): 89, (3, 1, 16): 96, (3, 1, 32): 116, (2, 1, 64): 172}


def compile_unit(nvcc, unit, target, output, *flags):
    """Compile a unit to `output`, check that no kernel spills, and return ptxas's output."""
    command = [nvcc, *precompile.flags(target), *flags, "-Xptxas", "-v", "-cubin", "-o", output, unit]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kernels = result.stderr.count("Compiling entry function")
    assert result.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == kernels > 0, result.stderr
    return result.stderr


def test_every_shape_compiles_without_spills_and_without_waiting(tmp_path, nvcc):
    units = [(unit, flags) for unit, flags in precompile.units(precompile.HOPPER) if flags]
    assert len(units) == len(precompile.shapes("GROUPED"))
    for unit, flags in units:
        said = compile_unit(nvcc, unit, "90a", tmp_path / "unit.cubin", *flags)
        assert said.count("Compiling entry function") == 2
        assert not WAITING.search(said), said


@pytest.mark.parametrize("target", ["90a", "121a"])
@pytest.mark.parametrize(
    ("name", "least"),  # linear: three formats of 16 variants, and the expansion; router: two sizes of each variant
    [("linear", 3 * 16 + 1), ("router", 2 * (len(router.CLUSTERS) + len(router.TICKETS)))],
)
def test_every_variant_compiles_without_spills(tmp_path, nvcc, name, least, target):
    said = compile_unit(nvcc, precompile.FOLDER / f"{name}.cu", target, tmp_path / "unit.cubin")
    assert said.count("Compiling entry function") >= least


def test_two_builds_are_the_same_bytes(tmp_path, nvcc, monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    first, second = (precompile.build(precompile.ROUTER, "121a", tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def machine_code(nvcc, unit, target, folder):
    cubin = folder / "unit.cubin"
    said = compile_unit(nvcc, unit, target, cubin)
    code = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, check=True).stdout
    kernels = code.split(".section\t.text.")[1:]
    assert len(kernels) == said.count("Compiling entry function")
    return kernels


def stage_path(kernel, matrix):
    """Return the fewest instructions of a warp for one stage of weights with `matrix` matrix instructions.

    The stage is one iteration of the smallest loop with the most matrix instructions, on a path where no barrier makes
    the warp wait. `kernel` is nvdisasm's text of a kernel.
    """
    labels, code = {}, []
    for line in kernel.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    targets = {at: re.search(r"\bBRA.*`\((\.L_x_\d+)\)", text) for at, text in enumerate(code)}
    branches = {at: labels[found[1]] for at, found in targets.items() if found}
    matrices = [0, *itertools.accumulate("MMA" in text for text in code)]
    loops = [(matrices[head] - matrices[end + 1], end - head, head) for end, head in branches.items() if head <= end]
    _, length, head = min(loops)
    paths = {head: {0: 1}}  # place → number of matrix instructions on a path to it → fewest instructions of such a path
    for at in range(head, head + length):
        after = [] if re.match(r"(BRA|EXIT)\s", code[at]) else [at + 1]
        after += [branches[at]] if at < branches.get(at, 0) <= head + length else []
        for place, (number, count) in itertools.product(after, paths.get(at, {}).items()):
            known, number_then = paths.setdefault(place, {}), number + ("MMA" in code[place])
            known[number_then] = min(count + 1, known.get(number_then, count + 1))
    return paths[head + length][matrix]


@pytest.mark.parametrize(("target", "shapes"), [("90a", 9), ("121a", 6)])
def test_a_layer_of_few_tokens_compiles_for_hopper_and_for_the_spark(tmp_path, nvcc, target, shapes):
    kernels = machine_code(nvcc, precompile.FOLDER / "layer.cu", target, tmp_path)
    assert len(kernels) == shapes
    counts = {}
    for kernel in kernels:
        assert "UBLKCP" in kernel  # bulk copies
        assert "SYNCS" in kernel  # mbarriers
        assert "HMMA.16816.F32.BF16" in kernel
        assert not re.search(r"BPT\.TRAP|\b(LDL|STL|HGMMA|USETMAXREG|UCGABAR)", kernel)
        rows, split, step, tokens = map(int, re.findall(r"Li(\d+)E", kernel.partition(",")[0])[:4])
        matrix = tokens // 8 * 4  # matrix instructions for a warp's 16 rows of 64 x 64 weights
        counts[rows, split, tokens] = stage_path(kernel, step * matrix) / step
        # While a GB10's memory delivers 64 x 64 weights to one multiprocessor, each scheduler, with one of the four
        # warps, can issue SLOTS instructions. The kernel needs less than a fifth, and the matrix unit a third.
        assert counts[rows, split, tokens] < SLOTS / 5
        assert matrix * MATRIX_CYCLES < SLOTS / 3
    if target == "121a":
        assert counts == pytest.approx(COUNTS, abs=3)


def test_block_scaled_products_issue_fewer_instructions(tmp_path, nvcc):
    kernels = machine_code(nvcc, Path(__file__).with_name("block_scaled.cu"), "121a", tmp_path)
    assert all("QMMA.SF.16832.F32.E2M1.E4M3.E8" in kernel for kernel in kernels)
    tokens = [int(re.search(r"Li(\d+)E", kernel)[1]) for kernel in kernels]
    counts = {number: stage_path(kernel, 3 * number // 4) / 3 for number, kernel in zip(tokens, kernels, strict=True)}
    assert counts == pytest.approx({8: 22, 16: 26, 32: 35, 64: 54}, abs=2)  # as docs/performance.md has them
