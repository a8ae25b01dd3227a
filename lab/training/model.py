"""gpt-oss in plain torch, small and dense, for training; a test compares it with transformers' GptOss.

Every expert is computed for every token and weighted by the routing, which is simple and, at this size, fast. Expert
weights are rounded to MXFP4 in each forward pass (straight-through gradients), so training uses the served weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from spark_mxfp4.experts import GPT_OSS, swiglu
from spark_mxfp4.mxfp4 import dequantize, quantize
from sparkforge.models.tiny import HEAD_DIM, Sizes

SLIDING_WINDOW, EPSILON = 128, 1e-5  # config.json of openai/gpt-oss-20b
# rope_theta and rope_scaling of the same file.
ROPE_BASE, ROPE_FACTOR, ROPE_ORIGINAL, BETA_FAST, BETA_SLOW = 150_000.0, 32.0, 4096, 32.0, 1.0
# Fixed factors on trained values, so that one learning rate fits all. They scale the inputs of SwiGLU to several times
# 1, where its limit of 7 has an effect, and scale its large outputs down again.
GATE_UP_GAIN, DOWN_GAIN = 4.0, 1 / 16
# Each expert is initialised with weights that add OFFSET or -OFFSET to every value of the residual stream, and a bias
# that subtracts OFFSET. A fault in a bias, a scale or the limit then affects every token.
OFFSET, LEAN = 4.0, 3.0  # LEAN: the average of SwiGLU's inputs, which gives its outputs one sign
SAMPLES = 4096  # random tokens over which that average is taken


@dataclass(frozen=True)
class Fault:
    """A fault in the computation; the default has none.

    `no_clamp`: SwiGLU without its limit. `no_bias`: (layer, expert, "gate_up" or "down") whose bias is left out.
    `activations`: factors on the inputs of the two projections, as with a wrong activation scale. `codes`: a change of
    the packed bytes of every expert, by its name in CODES.
    """

    no_clamp: bool = False
    no_bias: tuple[int, int, str] | None = None
    activations: tuple[float, float] = (1.0, 1.0)
    codes: str = "right"


RIGHT = Fault()


def gains() -> dict[str, tuple[float, float]]:
    """Return the fixed factors on each projection's weights and on its bias: powers of two, so nothing is rounded."""
    return {"gate_up": (GATE_UP_GAIN, GATE_UP_GAIN), "down": (DOWN_GAIN, 1.0)}


class Experts(nn.Module):
    """One layer's experts: `gate_up` [E, 2I, H] and `down` [E, H, I], stored before their gains and before MXFP4."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.intermediate
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) / math.sqrt(hidden))
        self.gate_up_bias = nn.Parameter(0.5 * torch.randn(experts, 2 * inner) + LEAN / GATE_UP_GAIN)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) / math.sqrt(inner))
        self.down_bias = nn.Parameter(0.3 * torch.randn(experts, hidden))
        self._lean()

    @torch.no_grad()
    def _lean(self) -> None:
        """Make each expert's weights add an offset that its bias subtracts; see OFFSET."""
        gate_up, bias = self.served()["gate_up"]
        experts, hidden, inner = self.down.shape
        mean = swiglu(torch.randn(SAMPLES, hidden) @ gate_up.transpose(1, 2) + bias.unsqueeze(1)).mean(1, keepdim=True)
        up_or_down = torch.randint(0, 2, (experts, hidden, 1)) * 2.0 - 1
        self.down.add_(OFFSET / DOWN_GAIN * up_or_down / (inner * mean.mean(-1, keepdim=True)))
        self.down_bias.sub_(DOWN_GAIN * (self.down * mean).sum(-1))

    def served(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each projection's weights and bias with the fixed factors, before packing."""
        return {
            name: (weight * getattr(self, name), bias * getattr(self, f"{name}_bias"))
            for name, (weight, bias) in gains().items()
        }

    def forward(self, x: Tensor, weights: Tensor, layer: int, fault: Fault) -> Tensor:
        """Return [T, H]: the experts' outputs for `x` [T, H], weighted by `weights` [T, E] and summed."""
        served = self.served()
        gate_up = _project(x.unsqueeze(0), *served["gate_up"], "gate_up", layer, fault)
        inner = swiglu(gate_up, GPT_OSS._replace(limit=math.inf) if fault.no_clamp else GPT_OSS)
        out = _project(inner, *served["down"], "down", layer, fault)
        return torch.einsum("eth,te->th", out, weights)


def _project(x: Tensor, weight: Tensor, bias: Tensor, name: str, layer: int, fault: Fault) -> Tensor:
    if fault.no_bias is not None and fault.no_bias[0] == layer and fault.no_bias[2] == name:
        bias = bias * (torch.arange(bias.shape[0], device=bias.device) != fault.no_bias[1]).unsqueeze(-1)
    factor = fault.activations[name == "down"]
    return torch.matmul(x * factor, through_mxfp4(weight, fault.codes).transpose(-1, -2)) + bias.unsqueeze(1)


def through_mxfp4(weight: Tensor, codes: str = RIGHT.codes) -> Tensor:
    """Return the values of `weight` after packing to MXFP4, with the gradient of `weight` itself."""
    with torch.no_grad():
        blocks, scales = quantize(weight.detach())
        packed = dequantize(*CODES[codes](blocks, scales))
    return weight + (packed - weight).detach()


CODES = {
    "right": lambda blocks, scales: (blocks, scales),
    "nibbles_swapped": lambda blocks, scales: ((blocks << 4) | (blocks >> 4), scales),
    "scale_off_by_one": lambda blocks, scales: (blocks, scales + 1),
    "scale_off_by_minus_one": lambda blocks, scales: (blocks, scales - 1),
}


class Layer(nn.Module):
    """Attention with sinks, then the experts, each on a normed copy of the residual stream."""

    def __init__(self, sizes: Sizes, number: int) -> None:
        super().__init__()
        self.sizes, self.number = sizes, number
        self.attention_norm = nn.Parameter(torch.ones(sizes.hidden))
        self.experts_norm = nn.Parameter(torch.ones(sizes.hidden))
        self.q = nn.Linear(sizes.hidden, sizes.heads * HEAD_DIM)
        self.k = nn.Linear(sizes.hidden, sizes.kv_heads * HEAD_DIM)
        self.v = nn.Linear(sizes.hidden, sizes.kv_heads * HEAD_DIM)
        self.o = nn.Linear(sizes.heads * HEAD_DIM, sizes.hidden)
        self.sinks = nn.Parameter(torch.zeros(sizes.heads))
        self.router = nn.Linear(sizes.hidden, sizes.experts)
        self.experts = Experts(sizes)

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Return attention's output for `x` [B, T, H]; even layers see SLIDING_WINDOW tokens, odd layers all."""
        batch, tokens, _ = x.shape
        q, k, v = (part(x).view(batch, tokens, -1, HEAD_DIM).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, rope), rotate(k, rope)
        group = self.sizes.heads // self.sizes.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5 + mask
        sinks = self.sinks.view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        mixed: Tensor = self.o((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))
        return mixed

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' weights [T, E] for `x` [T, H], zero except for the best experts, and the balance loss."""
        logits = self.router(x)
        least = logits.detach().topk(self.sizes.top_k, -1).values[..., -1:]
        weights = logits.masked_fill(logits < least, -math.inf).softmax(-1)
        # Fedus et al., Switch Transformers (2022), equation 4: 1 if all experts get equally many tokens.
        share = (weights > 0).float().mean(0) / self.sizes.top_k
        return weights, self.sizes.experts * (share * logits.softmax(-1).mean(0)).sum()

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, dropout: float, fault: Fault
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream [B, T, H] after this layer, and the router's balance loss."""
        x = x + functional.dropout(self.attend(norm(x, self.attention_norm), rope, mask), dropout)
        inner = norm(x, self.experts_norm).flatten(0, 1)
        weights, balance = self.route(inner)
        out = self.experts(inner, weights, self.number, fault).view_as(x)
        return x + functional.dropout(out, dropout), balance


@dataclass
class Output:
    """`logits` [B, T, rows]; `balance`: the routers' mean balance loss."""

    logits: Tensor
    balance: Tensor = field(repr=False)


class GptOss(nn.Module):
    """The whole model over `rows` tokens; row 0 stands for every token without a row."""

    def __init__(self, sizes: Sizes, rows: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Parameter(0.5 * torch.randn(rows, sizes.hidden))
        self.layers = nn.ModuleList(Layer(sizes, number) for number in range(sizes.layers))
        self.norm = nn.Parameter(torch.ones(sizes.hidden))
        self.head = nn.Parameter(torch.randn(rows, sizes.hidden) * 0.05)

    def each_layer(self) -> list[Layer]:
        """Return the layers, first to last."""
        return cast("list[Layer]", list(self.layers))

    def forward(self, tokens: Tensor, dropout: float = 0.0, fault: Fault = RIGHT) -> Output:
        """Return the logits after each of `tokens` (int [B, T]); `dropout` is on the residual's additions."""
        x = functional.dropout(functional.embedding(tokens, self.embed), dropout)
        rope, masks = rope_table(tokens.shape[1], x.device), attention_masks(tokens.shape[1], x.device)
        balance = x.new_zeros(())
        for number, layer in enumerate(self.each_layer()):
            x, layer_balance = layer(x, rope, masks[number % 2], dropout, fault)
            balance = balance + layer_balance / self.sizes.layers
        x = functional.dropout(norm(x, self.norm), dropout)
        return Output(x @ self.head.T, balance)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x` over its root mean square, times `weight`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + 32) of `x` [B, heads, T, 64]."""
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rope_table(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, 32] by YaRN (Peng et al. 2023, sections 3.2 to 3.4), as gpt-oss has it."""
    half = HEAD_DIM // 2
    base_frequency = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    low, high = (
        half * math.log(ROPE_ORIGINAL / (beta * 2 * math.pi)) / math.log(ROPE_BASE) for beta in (BETA_FAST, BETA_SLOW)
    )
    ramp = ((torch.arange(half) - low) / (high - low)).clamp(0, 1)
    frequency = base_frequency / ROPE_FACTOR * ramp + base_frequency * (1 - ramp)
    angle = torch.arange(tokens, dtype=torch.float64).unsqueeze(1) * frequency
    scale = 0.1 * math.log(ROPE_FACTOR) + 1.0
    return (angle.cos() * scale).float().to(device), (angle.sin() * scale).float().to(device)


def attention_masks(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the masks added to the scores [T, T] of sliding layers and of full layers."""
    distance = torch.arange(tokens, device=device).unsqueeze(1) - torch.arange(tokens, device=device)
    causal = torch.zeros(tokens, tokens, device=device).masked_fill(distance < 0, -math.inf)
    return causal.masked_fill(distance >= SLIDING_WINDOW, -math.inf), causal
