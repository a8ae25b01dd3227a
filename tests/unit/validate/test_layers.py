"""The check `layers` detects wrong parts of a model.

In these tests no engine runs: the check's own reference, rounded to bfloat16, supplies an engine's values.
"""

import pytest
import torch

from validate.facts import layers_child as child
from validate.facts import numerics_child

SIZE, TOKENS = child.SIZES["cpu"], child.PROMPT + child.STEPS - 1


@pytest.fixture(scope="module")
def weights():
    return child.make_weights(SIZE)


@pytest.fixture(scope="module", params=[None, child.PROMPT + child.STEPS], ids=["vllm", "fused"])
def rotation(request):
    """None for vLLM's layers; cosines and sines for spark_mxfp4's.

    The attention of spark_mxfp4's layers rotates, and their router returns routes instead of logits.
    """
    angles = torch.arange(request.param or 0)[:, None] * torch.logspace(0, -3, child.HEAD_DIM // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) if request.param else None


def routes(logits):
    """Return the output of spark_mxfp4's router: shares, and the experts' numbers as bits."""
    best, ids = logits.double().topk(child.TOP_K)
    return torch.stack([best.softmax(-1).float(), ids.int().view(torch.float32)])


@pytest.fixture(scope="module")
def served(weights, rotation):
    """Return calls as an engine makes them: the whole prompt, then single tokens. Unchecked values are random."""
    random = torch.Generator().manual_seed(1)

    def rows(columns):
        return torch.randn(TOKENS, columns, generator=random).to(torch.bfloat16)

    def calls(inputs, output):
        cuts = [child.PROMPT] + [1] * (TOKENS - child.PROMPT)
        tensors = (tensor if tensor.dim() > 2 else tensor.to(torch.bfloat16) for tensor in (*inputs, output))
        parts = zip(*(tensor.split(cuts, dim=-2) for tensor in tensors), strict=True)
        return [(list(part[:-1]), part[-1]) for part in parts]

    recorded = {}
    for layer in range(child.LAYERS):
        model, attn, mlp = f"model.layers.{layer}", f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        x, heads = rows(SIZE), rows(child.HEADS * child.HEAD_DIM)
        qkv = torch.cat([child.project(weights, f"{attn}.{name}_proj", x) for name in "qkv"], dim=-1)
        recorded[f"{model}.attn.qkv_proj"] = calls([x], qkv)
        recorded[f"{model}.attn.o_proj"] = calls([heads], child.project(weights, f"{attn}.o_proj", heads))
        logits = child.project(weights, f"{mlp}.router", x).to(torch.bfloat16)
        chosen = logits if rotation is None else routes(logits)
        recorded[f"{mlp}.router"] = calls([x], chosen)
        mixed = child.mix(numerics_child, weights, f"{mlp}.experts", x, child.shares(logits))
        recorded[f"{mlp}.experts"] = calls([x, chosen], mixed)
        q, k, v = heads, rows(child.KV_HEADS * child.HEAD_DIM), rows(child.KV_HEADS * child.HEAD_DIM)
        out = torch.full((TOKENS, q.shape[1]), float("nan"), dtype=torch.float64)
        out[list(child.ROWS)] = child.attend(
            *(child.rotate(part, rotation) for part in (q, k)), v, weights[f"{attn}.sinks"], (child.WINDOW, 0)[layer]
        )
        recorded[f"{model}.attn.attn"] = calls([q, k, v], out)
    last = rows(SIZE)[:5]
    head = last.double() @ weights["lm_head.weight"].double().T
    recorded["logits_processor"] = [
        ([row], out.to(torch.bfloat16)) for row, out in zip(last.split(1), head.split(1), strict=True)
    ]
    return recorded


def worst(served, rotation, weights):
    """Return the parts that differ by more than 1 %, the limit for bfloat16."""
    differences = child.judge(served, rotation, weights, numerics_child)
    return [part for part, difference in differences if not difference <= 0.01]


def test_right_parts_differ_by_rounding_alone(served, rotation, weights):
    differences = dict(child.judge(served, rotation, weights, numerics_child))
    assert len(differences) == 6 * child.LAYERS + 1
    assert all(0 < difference < 0.004 for difference in differences.values()), differences


# Faults of a backend. The test computes the reference with the fault, so that the served values differ from it.
@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("self_attn.sinks", lambda sinks: sinks - 100, ["attention sliding prefill", "attention sliding decode"]),
        ("self_attn.k_proj.bias", lambda bias: 0 * bias, ["qkv_proj 0"]),
        ("self_attn.o_proj.weight", lambda weight: weight.roll(1, 1), ["o_proj 0"]),
        ("mlp.router.bias", lambda bias: bias.roll(1), ["router 0"]),
        ("mlp.experts.down_proj_scales", lambda scales: scales + 1, ["experts 0"]),
        ("mlp.experts.gate_up_proj_blocks", lambda blocks: blocks >> 4 | blocks << 4, ["experts 0"]),
    ],
)
def test_a_wrong_weight_shows_in_its_part_alone(served, rotation, weights, name, change, parts):
    name = f"model.layers.0.{name}"
    assert worst(served, rotation, {**weights, name: change(weights[name])}) == parts


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("WINDOW", 127, ["attention sliding prefill", "attention sliding decode"]),
        ("WINDOW", 0, ["attention sliding prefill", "attention sliding decode"]),
        ("TOP_K", 1, ["experts 0", "experts 1"]),
    ],
)
def test_a_wrong_size_shows(served, rotation, weights, monkeypatch, name, value, parts):
    if rotation is not None:  # routes show the number of experts per token
        parts = [part.replace("experts", "router") for part in parts]
    monkeypatch.setattr(child, name, value)
    assert worst(served, rotation, weights) == parts


def test_a_part_that_skips_a_token_is_noticed(served, rotation, weights):
    calls = list(served["model.layers.1.attn.attn"])
    calls[-1] = (calls[-1][0], torch.full_like(calls[-1][1], float("nan")))
    assert worst({**served, "model.layers.1.attn.attn": calls}, rotation, weights) == ["attention full decode"]


def test_rounding_that_selects_an_equally_good_expert_is_no_fault(served, rotation, weights):
    router, as_good = "model.layers.0.mlp.router", torch.tensor([[3.0, 2.0, 1.99, -1.0]], dtype=torch.bfloat16)
    if rotation is None:
        routed = [(x, torch.cat([as_good, logits[1:]])) for x, logits in served[router]]
        # Row 0 of the experts is not compared, because two of its logits are almost equal.
        assert worst({**served, router: routed}, None, weights) == ["router 0"]
