"""Dense weights in the kernel's byte order: reading them as linear.cu does gives the quantised matrix."""

import pytest
import torch

from spark_mxfp4.kernels import linear
from spark_mxfp4.kernels.linear import Format, Weight, reference, run, variants
from spark_mxfp4.mxfp4 import dequantize, quantize, quantize_mxfp8

ALL, SIGN, REST = 0x81C081C0, 0x80008000, 0x01C001C0  # linear.cu, expand_e2m1


def little_endian_words(data):
    return data.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def pairs_of_e2m1(q):
    q = q.unsqueeze(-1)
    return torch.cat(
        [q & ALL, (q << 3) & ALL, ((q << 6) & REST) | ((q << 1) & SIGN), ((q >> 3) & REST) | ((q << 2) & SIGN)], -1
    )


def pairs_of_e4m3(q):
    other = ((q << 1) & 0x80008000) | ((q >> 3) & 0x07000700) | ((q << 4) & 0x00F000F0)
    return torch.stack([q & 0x87F087F0, other], -1)


def as_the_kernel_reads(weight):
    """Return the matrix float64 [N, K] of packed `weight`, by the steps of linear.cu's `expand` in torch."""
    tiles, chunks, _ = weight.data.shape
    if weight.format == Format.MXFP4:
        pairs = pairs_of_e2m1(
            little_endian_words(weight.data[..., :512]).view(tiles, chunks, 32, 4)
        )  # lane, step, register
    else:
        raw = little_endian_words(weight.data[..., :1024]).view(tiles, chunks, 2, 32, 2, 2)  # half, lane, step, word
        pairs = pairs_of_e4m3(raw).flatten(-2).transpose(2, 3).reshape(tiles, chunks, 32, 4, 4)
    halves = torch.stack([pairs & 0xFFFF, pairs >> 16], -1)  # tile, chunk, lane, step, register, low or high
    values = (halves << 16).int().view(torch.float32).double()
    if weight.format == Format.FP8:
        values *= 2.0**120
    else:
        scales = weight.data[..., -32:].view(tiles, chunks, 8, 2, 2).double()  # g, block, row half
        factor = torch.exp2(scales - 127)[:, :, :, [0, 0, 1, 1]].reshape(tiles, chunks, 32, 2)  # lane 4 g + t
        values = values.view(tiles, chunks, 32, 4, 2, 2, 2) * factor[:, :, :, None, None, :, None]
    # lane (g, t), step, column pair, row half, column -> row half, g; chunk, t, step, column pair, column
    matrix = values.view(tiles, chunks, 8, 4, 4, 2, 2, 2).permute(0, 6, 2, 1, 3, 4, 5, 7).reshape(tiles * 16, -1)
    matrix = matrix[: weight.rows, : weight.columns]
    return matrix if weight.row_scales is None else matrix * weight.row_scales[: weight.rows, None].double()


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (17, 96), (48, 32), (5, 2880), (130, 192)])
def test_the_kernel_reads_the_quantised_matrix(format_, rows, columns):
    matrix = torch.randn(rows, columns) * torch.logspace(-6, 0, rows)[:, None]
    matrix[0] = 0
    weight = Weight.pack(matrix, format_)
    assert weight.data.shape == (-(-rows // 16), -(-columns // 64), format_.chunk_bytes)
    exact = reference(matrix, format_).double()
    tolerance = 1e-7 if format_ == Format.FP8 else 0  # float32 row scales are multiplied in another order
    assert torch.allclose(as_the_kernel_reads(weight), exact, rtol=tolerance, atol=0)


def test_every_mxfp4_byte_keeps_its_place():
    blocks = torch.randint(0, 256, (32, 6, 16), dtype=torch.uint8)
    scales = torch.randint(100, 129, (32, 6), dtype=torch.uint8)
    assert torch.equal(as_the_kernel_reads(Weight.from_mxfp4(blocks, scales)), dequantize(blocks, scales).double())


def test_every_e4m3_byte_keeps_its_place():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(4)[: 16 * 62].view(16, 62)
    elements = torch.nn.functional.pad(codes, (0, 2)).view(torch.float8_e4m3fn)
    weight = Weight.from_fp8(elements, torch.ones(16))
    assert torch.equal(as_the_kernel_reads(weight), elements.double())


@pytest.mark.parametrize(("shape", "why"), [((4, 31), "multiple of 32"), ((32,), "not \\[N, K\\]")])
def test_other_shapes_are_refused(shape, why):
    with pytest.raises(ValueError, match=why):
        Weight.pack(torch.zeros(shape), Format.MXFP4)


@pytest.mark.parametrize("format_", [Format.MXFP4, Format.MXFP8])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, 1e30])
def test_values_outside_the_scales_range_are_refused(format_, fault):
    matrix = torch.ones(16, 64)
    matrix[3, 40] = fault
    with pytest.raises(ValueError, match="keep them in bfloat16"):
        Weight.pack(matrix, format_)


@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_fp8_refuses_nan_and_infinity(fault):
    matrix = torch.ones(16, 64)
    matrix[3, 40] = fault
    with pytest.raises(ValueError, match="NaN or infinite"):
        Weight.pack(matrix, Format.FP8)


def test_the_largest_scale_that_fits_is_taken():
    quantized = quantize(torch.full((16, 64), 12.0))
    assert int(quantized[1].max()) == 128
    assert torch.equal(as_the_kernel_reads(Weight.from_mxfp4(*quantized)), torch.full((16, 64), 12.0).double())
    assert int(quantize_mxfp8(torch.full((16, 64), 60000.0))[1].max()) == 134


def test_a_cpu_is_refused_by_name():
    weight = Weight.pack(torch.ones(16, 64), Format.MXFP8)
    with pytest.raises(NotImplementedError, match=r"cannot run on this device.*keep the layer in bfloat16"):
        run(torch.ones(1, 64).bfloat16(), weight)


@pytest.mark.parametrize(
    ("x", "bias"),
    [(torch.ones(1, 64), None), (torch.ones(1, 32).bfloat16(), None), (torch.ones(64).bfloat16(), None),
     (torch.ones(1, 64).bfloat16(), torch.ones(16)), (torch.ones(1, 64).bfloat16(), torch.ones(8).bfloat16())],
)  # fmt: skip
def test_other_arguments_are_refused(x, bias):
    with pytest.raises(ValueError, match=r"cannot (multiply|add)"):
        run(x, Weight.pack(torch.ones(16, 64), Format.FP8), bias)


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
def test_rows_packed_in_parts_are_those_packed_at_once(format_, monkeypatch):
    matrix = torch.randn(70, 96)
    whole, exact = Weight.pack(matrix, format_), reference(matrix, format_)
    monkeypatch.setattr(linear, "ROWS_AT_ONCE", 32)
    parts = Weight.pack(matrix, format_)
    assert torch.equal(parts.data, whole.data)
    assert (parts.rows, parts.columns) == (70, 96)
    assert parts.row_scales is whole.row_scales is None or torch.equal(parts.row_scales, whole.row_scales)
    assert torch.equal(reference(matrix, format_), exact)
