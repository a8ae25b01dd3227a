"""The expected time of a step with our kernels, from the figures of `devices.Kernels` and a model's bytes.

`roofline` computes the upper bound of the speed. No forecast was compared with a Spark yet.
"""

import math
from statistics import NormalDist

from sparkforge.core.tables import Record
from sparkforge.plan import roofline
from sparkforge.plan.architecture import Architecture
from sparkforge.plan.budget import Workload
from sparkforge.plan.devices import Device
from sparkforge.plan.roofline import Work

TILE = 64  # tokens in our kernel's widest tile; an expert with more tokens is read once per tile


class Forecast(Record):
    """Seconds of a step by part: experts, everything else that reads memory, all other kernels, the network."""

    experts: float
    dense: float
    rest: float
    link: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.experts + self.dense + self.rest + self.link


def few_tokens(model: Architecture, device: Device) -> int | None:
    """Return the most tokens for which a step reads each weight once: half a tile per expert, with even routing."""
    return TILE // 2 * model.experts // model.top_k if device.kernels and model.experts_form == "mxfp4" else None


def step(model: Architecture, device: Device, work: Work, link: float = 0.0) -> Forecast | None:
    """Return the forecast of `work`; None if our kernels do not run the experts, or the attention was not measured."""
    kernels, bf16 = device.kernels, device.flops("bf16")
    if kernels is None or bf16 is None or model.experts_form != "mxfp4" or model.latent or model.linear_layers:
        return None
    pairs, read = work.tokens * model.top_k / model.experts, kernels.read.value * 1e9
    spread, most = NormalDist(pairs, math.sqrt(pairs)), math.ceil((pairs + 6 * math.sqrt(pairs)) / TILE)
    readings = 1 + sum(1 - spread.cdf(TILE * number) for number in range(1, most))
    slowest = max(1 / kernels.experts.at(pairs), kernels.instructions.at(pairs) / kernels.slots.value)
    experts = max(work.expert_bytes * readings / read * slowest, work.expert_flops / bf16)
    experts += model.expert_layers * kernels.gap.value * 1e-6
    dense = max((work.bytes - work.expert_bytes) / read / kernels.dense.value, work.dense_flops / bf16)
    rest = model.layers * kernels.rest.at(work.tokens) * 1e-6
    return Forecast(experts=experts, dense=dense, rest=rest, link=link)


def prefill_seconds(model: Architecture, device: Device, prompt: int, load: Workload) -> float | None:
    """Return the seconds until one prompt of `prompt` tokens has its first token; None where `step` returns None."""
    steps = [step(model, device, work) for work in roofline.prefill(model, prompt, 1, load)]
    return sum(part.seconds if part else 0.0 for part in steps) if all(steps) else None
