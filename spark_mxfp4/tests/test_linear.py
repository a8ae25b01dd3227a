"""Dense weights: what is refused, parts of a matrix, variants; test_linear_kernel.py reads them as linear.cu does."""

import pytest
import torch

from spark_mxfp4.kernels import linear
from spark_mxfp4.kernels.linear import Format, Weight, reference, run, variants
from spark_mxfp4.mxfp4 import dequantize, quantize, quantize_mxfp8


def with_value(value):
    matrix = torch.ones(16, 64)
    matrix[3, 40] = value
    return matrix


@pytest.mark.parametrize(
    ("format_", "matrices", "message"),
    [
        (Format.MXFP4, [torch.zeros(4, 31)], "multiple of 32"),
        (Format.MXFP4, [torch.zeros(32)], r"not \[N, K\]"),
        (Format.MXFP4, [*map(with_value, (torch.nan, torch.inf, 1e30))], "keep them in bfloat16"),
        (Format.MXFP8, [*map(with_value, (torch.nan, torch.inf, 1e30))], "keep them in bfloat16"),
        (Format.FP8, [*map(with_value, (torch.nan, torch.inf))], "NaN or infinite"),
    ],
)
def test_other_shapes_and_values_outside_the_scales_range_are_refused(format_, matrices, message):
    for matrix in matrices:
        with pytest.raises(ValueError, match=message):
            Weight.pack(matrix, format_)


def test_the_largest_scale_that_fits_is_taken():
    quantized = quantize(torch.full((16, 64), 12.0))
    assert int(quantized[1].max()) == 128
    assert torch.equal(dequantize(*quantized), torch.full((16, 64), 12.0))
    assert int(quantize_mxfp8(torch.full((16, 64), 60000.0))[1].max()) == 134


@pytest.mark.parametrize(
    ("x", "bias"),
    [(torch.ones(1, 64), None), (torch.ones(1, 32).bfloat16(), None), (torch.ones(64).bfloat16(), None),
     (torch.ones(1, 64).bfloat16(), torch.ones(16)), (torch.ones(1, 64).bfloat16(), torch.ones(8).bfloat16())],
)  # fmt: skip
def test_other_arguments_and_a_cpu_are_refused(x, bias):
    weight = Weight.pack(torch.ones(16, 64), Format.FP8)
    with pytest.raises(ValueError, match=r"cannot (multiply|add)"):
        run(x, weight, bias)
    with pytest.raises(NotImplementedError, match=r"cannot run on this device.*keep the layer in bfloat16"):
        run(torch.ones(1, 64).bfloat16(), weight)


def test_torch_compile_sees_one_operator(monkeypatch):
    seen = []
    monkeypatch.setattr(linear, "_start", lambda x, weight, bias, out: (seen.append(weight.rows), out.fill_(3)))
    weight = Weight.pack(torch.ones(48, 64), Format.MXFP4)
    compiled = torch.compile(lambda x: run(x, weight) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 64).bfloat16()), torch.full((2, 48), 4.0).bfloat16())
    assert seen == [48]


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize("rows", [2560, 201_088])
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 64])
def test_a_variant_that_fits_99_kb_is_among_those_tried(format_, rows, tokens):
    """Compute capability 12.1 has 99 KB of shared memory for a block. The table repeats linear.cu's `run`."""
    columns = {  # number: tokens of a group / 8, chunks a warp, warps, ring, turns together
        0: (1, 3, 15, 2, 1), 1: (1, 3, 15, 3, 2), 2: (1, 4, 16, 2, 1), 3: (1, 4, 8, 4, 1), 4: (1, 4, 16, 1, 1),
        5: (1, 8, 16, 1, 1), 6: (2, 3, 15, 2, 1), 7: (2, 4, 16, 2, 1), 8: (2, 4, 8, 4, 1), 9: (2, 4, 16, 1, 1),
    }  # fmt: skip
    for chunks in (32, 45, 64):
        fitting = []
        for number, _ in variants(tokens, rows, chunks, format_):
            if number in columns:
                groups, share, most, ring, turns = columns[number]
                warps = -(-chunks // share)
                size = warps * (ring * share * format_.chunk_bytes + 2 * turns * groups * 512)
                if warps <= most and size <= 99 * 1024:
                    fitting.append(number)
        assert fitting, (chunks, format_)


@pytest.mark.parametrize("format_", Format)
def test_a_matrix_of_more_rows_than_are_packed_at_once_is_its_parts(format_):
    matrix = torch.randn(linear.ROWS_AT_ONCE + 70, 96)
    whole, parts = Weight.pack(matrix, format_), [Weight.pack(rows, format_) for rows in matrix.split(4096)]
    assert torch.equal(whole.data, torch.cat([part.data for part in parts]))
    assert (whole.rows, whole.columns) == matrix.shape
    if format_ == Format.FP8:
        assert torch.equal(whole.row_scales, torch.cat([part.row_scales for part in parts]))
    assert torch.equal(reference(matrix, format_), torch.cat([reference(rows, format_) for rows in matrix.split(4096)]))
