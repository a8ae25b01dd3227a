"""The faults that the tiny model must be sensitive to, and its bits per byte on the held-out text with each fault."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from lab.training.corpus import CHUNK, Corpus
from lab.training.model import RIGHT, Fault, GptOss
from sparkforge.models.tiny import Sizes


def known(sizes: Sizes) -> dict[str, Fault]:
    """Return every fault by name: packing, clamp, activation scales, and each bias of each expert."""
    biases = {
        f"layer {layer}, expert {expert}: {name} bias dropped": Fault(no_bias=(layer, expert, name))
        for layer in range(sizes.layers) for expert in range(sizes.experts) for name in ("gate_up", "down")
    }  # fmt: skip
    return {
        "nibbles swapped": Fault(codes="nibbles_swapped"),
        "E8M0 scales one too high": Fault(codes="scale_off_by_one"),
        "E8M0 scales one too low": Fault(codes="scale_off_by_minus_one"),
        "clamp removed": Fault(no_clamp=True),
        "activation scale doubled": Fault(activations=(2.0, 2.0)),
        "activation scale halved": Fault(activations=(0.5, 0.5)),
        "activation scale doubled, first projection": Fault(activations=(2.0, 1.0)),
        "activation scale doubled, second projection": Fault(activations=(1.0, 2.0)),
        "activation scale halved, first projection": Fault(activations=(0.5, 1.0)),
        "activation scale halved, second projection": Fault(activations=(1.0, 0.5)),
        **biases,
    }


def losses(logits: Tensor, targets: Tensor, shared: int) -> Tensor:
    """Return -ln p of each target (rows, any shape). Row 0 is one of `shared` tokens that are equally probable."""
    many = functional.pad(logits.new_tensor([math.log(shared)]), (0, logits.shape[-1] - 1))
    several = functional.cross_entropy((logits + many).flatten(0, -2), targets.flatten(), reduction="none")
    return several.view_as(targets) + math.log(shared) * (targets == 0)


@torch.no_grad()
def bits_per_byte(model: GptOss, corpus: Corpus, fault: Fault = RIGHT) -> float:
    """Return the accuracy gate's figure (sparkforge/bench/accuracy.py) on the held-out text, computed with `fault`."""
    total, device = 0.0, model.embed.device
    for at in range(0, len(corpus.held_out), CHUNK):
        chunk = torch.from_numpy(corpus.held_out[at : at + CHUNK].astype("i8")).unsqueeze(0).to(device)
        costs = losses(model(chunk[:, :-1], fault=fault).logits, chunk[:, 1:], corpus.shared)
        total += float(costs.double().sum())
    return total / math.log(2) / corpus.held_out_bytes
