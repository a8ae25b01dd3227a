"""The Mojo format and CPU kernels against spark_mxfp4's torch reference, called as a C library."""

import ctypes

import pytest
import torch

from spark_mxfp4 import experts, mxfp4

GENERATOR = 20


def address(tensor):
    return ctypes.c_size_t(tensor.data_ptr())


def number(value):
    return ctypes.c_size_t(value)


def every_byte_and_scale():
    """Return blocks u8 [256, 16, 16] and scales u8 [256, 16]: every byte at every scale."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    return blocks, torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_at_every_scale_is_exact(host, dtype):
    blocks, scales = every_byte_and_scale()
    output = torch.full((256, 512), 7.0, dtype=dtype)
    getattr(host, f"spark_dequantize_{str(dtype).partition('.')[2]}")(
        address(output), address(blocks), address(scales), number(256 * 16)
    )
    expected = mxfp4.dequantize(blocks, scales, dtype)
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    nan = expected.isnan()
    assert torch.equal(output.isnan(), nan)
    assert nan.sum() == 512
    assert torch.equal(output.view(bits)[~nan], expected.view(bits)[~nan])


def test_pairs_times_factors_are_exact(host):
    """The GPU kernels split a scale into two factors, so that no intermediate bfloat16 overflows or is rounded."""
    result = torch.zeros(6, dtype=torch.int32)
    blocks, scales = every_byte_and_scale()
    expected = mxfp4.dequantize(blocks[:, :2], scales[:, :2], torch.bfloat16)  # nibbles 0-15 in each place of a byte
    words = blocks[0].flatten().view(torch.int32)
    for scale in range(255):
        for start, word in enumerate(words[:8].tolist()):
            host.spark_expand_pairs(address(result), ctypes.c_uint32(word & 0xFFFFFFFF), ctypes.c_uint32(scale))
            pairs = result[:4].view(torch.bfloat16).view(4, 2)
            first, second = result[4:].view(torch.bfloat16).view(2, 2)
            once = pairs * first
            assert torch.equal(once.double(), pairs.double() * first.double()), "the first product is exact"
            values = expected[scale, 8 * start : 8 * start + 8]
            assert torch.equal(once * second, torch.stack([values[:4], values[4:]], dim=-1))


def test_rounding_is_to_nearest_with_ties_to_even(host):
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45, -1e-40, 1.00390625, 1.01171875])
    values = torch.cat([edges, torch.randint(-(2**31), 2**31, (100_000,)).int().view(torch.float32)])
    output = torch.zeros(len(values), dtype=torch.bfloat16)
    host.spark_round(address(output), address(values), number(len(values)))
    expected = values.bfloat16()
    assert torch.equal(output.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(output.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


def paired(x):
    """Return the columns of `x` in paired order."""
    return x.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3).contiguous()


def random_layer(count, hidden, inner):
    generator = torch.Generator().manual_seed(GENERATOR)

    def projection(rows, columns):
        weight = torch.randint(0, 256, (count, rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, (count, rows, columns // 32), generator=generator, dtype=torch.uint8)
        return experts.Projection(weight, scales, torch.randn(count, rows, generator=generator))

    layer = experts.ExpertWeights(projection(2 * inner, hidden), projection(hidden, inner))
    x = torch.randn(9, hidden, generator=generator)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(9)]).int()
    routing = torch.rand(9, 2, generator=generator).softmax(-1)
    return layer, x, chosen, routing


@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (96, 160)])
def test_experts_equal_the_reference(host, hidden, inner):
    layer, x, chosen, routing = random_layer(5, hidden, inner)
    output = torch.full_like(x, torch.nan)
    host.spark_moe(
        address(output), address(x), address(chosen), address(routing), number(9), number(2),
        *(address(tensor) for projection in layer for tensor in projection), number(hidden), number(inner),
    )  # fmt: skip
    expected = experts.moe(x, layer, chosen, routing)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("activated", [False, True])
def test_a_product_takes_and_gives_paired_order(host, activated):
    layer, x, _, _ = random_layer(5, 96, 64)
    weight, scales, bias = layer.gate_up
    output = torch.full((64 if activated else 128,), torch.nan)
    row = paired(x[0])
    host.spark_product(
        address(output), address(row), address(weight), address(scales), address(bias),
        number(3), number(128), number(96), number(int(activated)),
    )  # fmt: skip
    dense = mxfp4.dequantize(weight[3].view(128, 3, 16), scales[3])
    expected = dense @ x[0] + bias[3]
    if activated:
        expected = paired(experts.swiglu(expected))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-4)
