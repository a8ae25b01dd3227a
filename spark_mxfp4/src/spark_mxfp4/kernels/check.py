"""Layers with random weights to check and time kernels, and a slow mixture of experts in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spark_mxfp4.experts import GPT_OSS, Activation, ExpertWeights, Projection, swiglu
from spark_mxfp4.mxfp4 import BLOCK_BYTES, dequantize

SCALES = (116, 122)  # bytes around 2^-8: sums of 2,880 products then reach the activation's limits, as in gpt-oss
BITS = 4.25  # per weight, with its share of the scale


class LayerSizes(NamedTuple):
    """The sizes of one layer."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def weight_bytes(self, touched: float) -> float:
        """Return the bytes of `touched` experts' weights and scales."""
        return touched * 3 * self.hidden * self.intermediate * BITS / 8

    def operations(self, tokens: int) -> float:
        """Return the floating-point operations of both products for `tokens`."""
        return 6.0 * tokens * self.top_k * self.hidden * self.intermediate


MODELS = {  # timed and checked
    "gpt-oss-120b": LayerSizes(128, 4, 2880, 2880),
    "gpt-oss-20b": LayerSizes(32, 4, 2880, 2880),
    "64 experts, top-8": LayerSizes(64, 8, 4096, 1536),
    "16 experts, top-2": LayerSizes(16, 2, 6144, 2048),
    "256 experts, top-8": LayerSizes(256, 8, 2048, 768),
}
OTHERS = {  # timed: families with plain SiLU and no biases
    "Ling 3.0 flash": LayerSizes(512, 8, 2560, 768),
    "DeepSeek V4 Flash": LayerSizes(256, 6, 4096, 2048),
    "Qwen3 30B": LayerSizes(128, 8, 2048, 768),
}
EDGES = (  # checked: one expert, the most experts, sizes that fill no tile, more columns than rows
    LayerSizes(1, 1, 32, 32), LayerSizes(512, 16, 64, 32), LayerSizes(256, 8, 64, 32), LayerSizes(8, 3, 96, 160),
    LayerSizes(4, 2, 256, 128), LayerSizes(6, 4, 4096, 64),
)  # fmt: skip
ROUTINGS = ("even", "uneven", "one")  # see `random_routing`
PRODUCTS = {  # timed and checked: dense products of gpt-oss-120b, rows by columns
    "qkv": (5120, 2880), "o": (2880, 4096), "head": (201_088, 2880),
    "qkv, one of two devices": (2560, 2880), "o, one of two devices": (2880, 2048),
    "head, one of two devices": (100_544, 2880),
}  # fmt: skip
PRODUCT_EDGES = ((100, 96), (1000, 1024), (17, 512), (64, 8192), (1, 32))  # checked


def poisoned(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a kernel with unwritten GPU memory set to NaN and unwritten counters to -1."""
    poison = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(6)]
    poison += [torch.full((number,), -1, dtype=torch.int32, device="cuda") for number in (1, 16, 256, 4096)]
    del poison
    return call(*arguments)


def random_weights(
    experts: int, hidden: int, intermediate: int, device: str | torch.device = "cuda", *, bias: bool = True
) -> ExpertWeights:
    """Return a layer of random bytes, with biases in bfloat16."""

    def projection(rows: int, columns: int) -> Projection:
        """Blocks u8 [E, rows, columns / 2], scales u8 [E, rows, columns / 32], bias [E, rows]."""
        weight = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.randint(*SCALES, (experts, rows, columns // 32), dtype=torch.uint8, device=device)
        return Projection(weight, scales, torch.randn(experts, rows, device=device).bfloat16() if bias else None)

    return ExpertWeights(projection(2 * intermediate, hidden), projection(hidden, intermediate))


def random_routing(
    tokens: int, experts: int, top_k: int, kind: str = "even", device: str | torch.device = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (int32 [T, k]) and shares (float32 [T, k]).

    `even` draws all experts alike, `uneven` prefers a few so that others get no token, and `one` sends every token to
    the same experts.
    """
    ids = random_scores(tokens, experts, kind, device).topk(top_k, dim=1).indices.int()
    return ids, torch.softmax(torch.randn(tokens, top_k, device=device), dim=-1)


def random_scores(tokens: int, experts: int, kind: str = "even", device: str | torch.device = "cuda") -> torch.Tensor:
    """Return a router's scores, float32 [T, E], for `random_routing`."""
    if kind == "one":
        return torch.arange(experts, 0, -1, device=device).float().repeat(tokens, 1)
    scores = torch.randn(tokens, experts, device=device)
    return scores + 4 * torch.linspace(1, 0, experts, device=device) ** 6 if kind == "uneven" else scores


def reference(
    x: torch.Tensor,
    weights: ExpertWeights,
    ids: torch.Tensor,
    shares: torch.Tensor,
    local: list[int] | None = None,
    activation: Activation = GPT_OSS,
) -> torch.Tensor:
    """Return the layer's output [T, H], computed in float32, from the experts in `local` (default: all)."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(ids).tolist():
        if expert < 0 or (local is not None and expert not in local):
            continue
        token, position = (ids == expert).nonzero(as_tuple=True)
        hidden = swiglu(_product(x[token].float(), weights.gate_up, expert), activation)
        output = _product(hidden, weights.down, expert)
        total.index_add_(0, token, output * shares[token, position].unsqueeze(-1))
    return total


def error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`, in float64."""
    return float((computed.double() - expected.double()).norm() / expected.double().norm())


def _product(x: torch.Tensor, projection: Projection, expert: int) -> torch.Tensor:
    weight, scales, bias = projection
    if scales is None:
        raise ValueError("the reference takes packed weights · these are dense · pass MXFP4 experts")
    dense = dequantize(weight[expert].view(*scales.shape[1:], BLOCK_BYTES), scales[expert])
    return x @ dense.T + (0 if bias is None else bias[expert].float())
