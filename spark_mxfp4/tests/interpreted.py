"""The Triton kernels against the reference; test_triton.py runs this file by Triton's interpreter."""

import torch

from spark_mxfp4.experts import SILU, ExpertWeights, Projection, TopK, moe, moe_sorting, swiglu
from spark_mxfp4.kernels import fused
from spark_mxfp4.kernels.check import error
from spark_mxfp4.kernels.mxfp8 import quantize_rows
from spark_mxfp4.kernels.sorting import sort_into_blocks
from spark_mxfp4.mxfp4 import dequantize, dequantize_mxfp8, quantize_mxfp8

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 6, 96, 64, 3, 17


def layer(*, bias=True):
    def projection(rows, columns, scale):
        weight = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8)
        scales = torch.randint(scale, scale + 4, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
        return Projection(weight, scales, torch.randn(EXPERTS, rows) if bias else None)

    weights = ExpertWeights(projection(2 * INTERMEDIATE, HIDDEN, 121), projection(HIDDEN, INTERMEDIATE, 118))
    ids = torch.rand(TOKENS, EXPERTS - 1).topk(TOP_K).indices.int()  # the last expert gets no token
    return weights, torch.randn(TOKENS, HIDDEN), ids, torch.softmax(torch.randn(TOKENS, TOP_K), dim=-1)


def test_sorting():
    for count, top_k, known in ((1, 1, None), (40, 5, None), (700, 3, 4), (3, 16, None)):
        experts = 20 if known is None else known
        ids = torch.randint(-1, 20, (count, top_k), dtype=torch.int32)
        expert_map = None
        if known is not None:
            expert_map = torch.full((20,), -1, dtype=torch.int32)
            expert_map[[3, 7, 11, 19]] = torch.arange(4, dtype=torch.int32)
        blocks = sort_into_blocks(ids, experts, 16, expert_map)
        pairs, offsets = moe_sorting(ids, experts, expert_map)
        assert (blocks.experts[1:] >= blocks.experts[:-1])[blocks.experts[1:] >= 0].all()
        for expert in range(experts):
            own_pairs = blocks.pairs.view(-1, 16)[blocks.experts == expert].flatten()
            wanted = pairs[offsets[expert] : offsets[expert + 1]]
            assert own_pairs[: len(wanted)].tolist() == wanted.tolist()
            assert (own_pairs[len(wanted) :] == ids.numel()).all()
            assert len(own_pairs) == -(-len(wanted) // 16) * 16


def test_whole_layer():
    for bias in (True, False):
        weights, x, ids, shares = layer(bias=bias)
        got = fused.tiled(x, weights, TopK(ids, shares), tiles=fused.Tiles(32, 16, 64, 4, 2))
        assert error(got, moe(x, weights, ids, shares)) < 1e-6


def test_silu():
    weights, x, ids, shares = layer(bias=False)
    got = fused.tiled(8 * x, weights, TopK(ids, shares), SILU, fused.Tiles(32, 16, 64, 4, 2))
    assert error(got, moe(8 * x, weights, ids, shares, None, SILU)) < 1e-6


def test_expert_map():
    weights, x, ids, shares = layer()
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[[4, 1]] = torch.arange(2, dtype=torch.int32)
    local = ExpertWeights(*(Projection(*(tensor[[4, 1]] for tensor in p)) for p in weights))
    got = fused.tiled(x, local, TopK(ids, shares, expert_map), tiles=fused.Tiles(64, 16, 32, 4, 2))
    assert error(got, moe(x, local, ids, shares, expert_map)) < 1e-6


def test_extreme_scales():
    weights, x, ids, shares = layer()
    weights.gate_up.weight[:] = 0x11  # 0.5 everywhere
    for scale, size in ((0, 2.0**100), (1, 2.0**100), (254, 2.0**-8)):
        weights.gate_up.scales[:] = scale
        scaled = x.abs() * size
        got = fused.tiled(scaled, weights, TopK(ids, shares), tiles=fused.Tiles(32, 16, 64, 4, 2))
        assert torch.isfinite(got).all()
        assert error(got, moe(scaled, weights, ids, shares)) < 1e-6
    weights.gate_up.scales[:] = 121
    weights.down.scales[int(ids[0, 0]), 5, 0] = 255
    got = fused.tiled(x, weights, TopK(ids, shares), tiles=fused.Tiles(32, 16, 64, 4, 2))
    assert got[0, 5].isnan()
    assert not got[:, :5].isnan().any()


def test_w4a8():
    """The W4A8-MX product equals the float32 product of the rounded activations."""
    weights, x, ids, shares = layer()

    def rounded(values):
        return dequantize_mxfp8(*quantize_mxfp8(values))

    wanted = torch.zeros(TOKENS, HIDDEN)
    for expert in range(EXPERTS):
        first, second = (dequantize(p.weight[expert].unflatten(-1, (-1, 16)), p.scales[expert]) for p in weights)
        hidden = rounded(swiglu(rounded(x) @ first.T + weights.gate_up.bias[expert]))
        output = hidden @ second.T + weights.down.bias[expert]
        wanted += output * (shares * (ids == expert)).sum(-1, keepdim=True)
    got = fused.tiled(x, weights, TopK(ids, shares), tiles=fused.Tiles(32, 16, 64, 4, 2, scaled=True))
    assert error(got, wanted) < 2e-3  # a near tie that rounds differently changes one E4M3 element
    assert error(got, moe(x, weights, ids, shares)) > 5e-3


def test_mxfp8():
    tie = torch.tensor([0.0, 1.0625, 1.1875, 17.0, 19.0, 448.0, 464.0, 480.0]).repeat(4)
    x = torch.cat(
        [
            torch.randn(64, 64) * 10.0 ** torch.randint(-37, 37, (64, 1)), torch.randn(64, 64).bfloat16().float(),
            torch.stack([tie, -tie], 0).view(1, 64), torch.full((1, 64), 1e-40), torch.zeros(1, 64),
            torch.tensor([[torch.nan] + [1.0] * 31 + [torch.inf] + [2.0] * 31]),
        ]
    )  # fmt: skip
    elements, scales = quantize_mxfp8(x)
    got, got_scales = quantize_rows(x)
    assert torch.equal(got_scales, scales)
    assert torch.equal(got.view(torch.uint8), elements.view(torch.uint8))
