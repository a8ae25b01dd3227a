"""The mixture of experts against a slow implementation: float64, one token and expert at a time, plain products."""

import math

import pytest
import torch

from spark_mxfp4.experts import SILU, ExpertWeights, Projection, moe, moe_sorting, swiglu
from spark_mxfp4.mxfp4 import dequantize

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 96, 64, 6, 3


def packed(rows, columns, seed, *, scale):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(scale, scale + 3, (EXPERTS, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return Projection(weight, scales, torch.randn(EXPERTS, rows, generator=generator))


def dense(projection, dtype):
    weight = dequantize(projection.weight.unflatten(-1, (-1, 16)), projection.scales, dtype)
    return Projection(weight, None, projection.bias.to(dtype))


@pytest.fixture
def weights():
    # Scales around 2^-3 push gate and up past the limit of 7 on both sides.
    return ExpertWeights(packed(2 * INTERMEDIATE, HIDDEN, 1, scale=123), packed(HIDDEN, INTERMEDIATE, 2, scale=118))


@pytest.fixture
def routing():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(17, HIDDEN, generator=generator)
    shares, ids = torch.topk(torch.rand(17, EXPERTS - 1, generator=generator), TOP_K)  # the last expert gets no token
    return x, ids, shares / shares.sum(-1, keepdim=True)


def slow_moe(x, weights, ids, shares, keep=lambda expert: True):
    total = torch.zeros(x.shape, dtype=torch.float64)
    gate_up, down = (dense(projection, torch.float64) for projection in weights)
    for token in range(x.shape[0]):
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            if not keep(expert):
                continue
            raw = gate_up.weight[expert] @ x[token].double() + gate_up.bias[expert]
            hidden = []
            for column in range(INTERMEDIATE):
                gate, up = min(float(raw[2 * column]), 7.0), max(-7.0, min(float(raw[2 * column + 1]), 7.0))
                hidden.append((up + 1) * gate / (1 + math.exp(-1.702 * gate)))
            product = down.weight[expert] @ torch.tensor(hidden, dtype=torch.float64)
            total[token] += share * (product + down.bias[expert])
    return total


def test_packed_and_dense_float32_match_the_slow_one(weights, routing):
    x, ids, shares = routing
    wanted = slow_moe(x, weights, ids, shares)
    assert wanted.abs().max() > 1
    for layout in (weights, ExpertWeights(*(dense(p, torch.float32) for p in weights))):
        torch.testing.assert_close(moe(x, layout, ids, shares).double(), wanted, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_close_and_packed_equals_dense_to_the_bit(weights, routing):
    x, ids, shares = routing
    half = ExpertWeights(*(p._replace(bias=p.bias.bfloat16()) for p in weights))
    got = moe(x.bfloat16(), half, ids, shares)
    assert got.dtype == torch.bfloat16
    wanted = slow_moe(x.bfloat16().float(), half, ids, shares)
    assert (got.double() - wanted).abs().max() < 0.03 * wanted.abs().max()
    assert torch.equal(got, moe(x.bfloat16(), ExpertWeights(*(dense(p, torch.bfloat16) for p in half)), ids, shares))


@pytest.mark.parametrize("limit", [HIDDEN, 1000, 2 * 2 * INTERMEDIATE * HIDDEN])
def test_dequantizing_in_parts_or_together_changes_nothing(weights, routing, monkeypatch, limit):
    x, ids, shares = routing
    wanted = moe(x, weights, ids, shares)
    monkeypatch.setattr("spark_mxfp4.experts.DEQUANTIZED_AT_ONCE", limit)
    torch.testing.assert_close(moe(x, weights, ids, shares), wanted, rtol=1e-5, atol=1e-5)


def test_the_activation_of_other_families_is_silu_of_the_gate_times_up(weights, routing):
    gate, up = 8 * torch.randn(2, 5, 7, dtype=torch.float64)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(swiglu(torch.stack([gate, up], -1).flatten(-2), SILU), wanted)
    x, ids, shares = routing
    assert (moe(x, weights, ids, shares, None, SILU) - moe(x, weights, ids, shares)).abs().max() > 1


def test_sorting_groups_pairs_by_expert_in_token_order():
    ids = torch.tensor([[2, 0], [0, 4], [2, 4]])
    pairs, offsets = moe_sorting(ids, 5)
    assert pairs.tolist() == [1, 2, 0, 4, 3, 5]
    assert offsets.tolist() == [0, 2, 2, 4, 4, 6]  # experts 1 and 3 have no pairs


def test_sorting_puts_foreign_and_negative_experts_after_the_last_offset():
    ids = torch.tensor([[2, 0], [-1, 3]], dtype=torch.int32)
    pairs, offsets = moe_sorting(ids, 2, torch.tensor([-1, -1, 0, 1], dtype=torch.int32))
    assert offsets.tolist() == [0, 1, 2]
    assert pairs[:2].tolist() == [0, 3]
    assert sorted(pairs.tolist()) == [0, 1, 2, 3]


def test_sorting_does_not_wait_for_the_device():
    ids = torch.empty(5, TOP_K, dtype=torch.int64, device="meta")
    pairs, offsets = moe_sorting(ids, EXPERTS, torch.empty(EXPERTS, dtype=torch.int32, device="meta"))
    assert pairs.shape == (5 * TOP_K,)
    assert offsets.shape == (EXPERTS + 1,)


def test_two_devices_with_half_of_the_experts_each_add_up_to_the_whole(weights, routing):
    x, ids, shares = routing
    parts = []
    for local in ([0, 2, 4], [5, 3, 1]):
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[local] = torch.arange(3, dtype=torch.int32)
        local_weights = ExpertWeights(*(Projection(*(tensor[local] for tensor in p)) for p in weights))
        parts.append(moe(x, local_weights, ids, shares, expert_map))
        wanted = slow_moe(x, weights, ids, shares, keep=local.__contains__)
        torch.testing.assert_close(parts[-1].double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts[0] + parts[1], moe(x, weights, ids, shares), rtol=1e-4, atol=1e-4)


def test_scales_that_do_not_fit_the_weights_are_refused(weights, routing):
    x, ids, shares = routing
    wrong = weights.gate_up._replace(scales=weights.gate_up.scales[..., :1])
    with pytest.raises(ValueError, match="shapes disagree"):
        moe(x, ExpertWeights(wrong, weights.down), ids, shares)
