"""Train the tiny model, on a GPU if there is one.

`python -m lab.training.train CORPUS sparkforge/models/tiny.safetensors`. The same device, torch and corpus
give the same bytes. Another device rounds differently and gives another model.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lab.training import export, faults
from lab.training.corpus import CHUNK, Corpus, digest, load, unigram_bits_per_byte
from lab.training.model import GptOss
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import SparkforgeError
from sparkforge.core.files import write_atomic
from sparkforge.models.tiny import Sizes


class TrainingPlan(NamedTuple):
    """The settings of the training. `guard` is the weight of `FaultGuard`'s term in the loss."""

    sizes: Sizes = Sizes(hidden=128, intermediate=128, layers=4, experts=4, top_k=2, heads=4, kv_heads=2)
    steps: int = 1000
    batch: int = 20
    chat: int = 8
    rate: float = 2e-3
    decay: float = 0.1
    dropout: float = 0.2
    guard: float = 0.2
    seed: int = 1


SHOWN = 100  # steps between two lines of the loss curve
BALANCE = 0.02  # weight of the routers' balance loss
WARM = 100  # warm-up steps of the learning rate
MARGIN = 0.35  # nats a token: the least by which each fault should raise the loss
GUARDED = 4  # lines of text on which each step measures a fault


class FaultGuard:
    """Trains the model to be sensitive to faults, by a term of the loss.

    Each step injects one fault. If the fault raises the loss by less than MARGIN, the term is the difference to MARGIN.
    Dropout is on as in the rest of training: otherwise the model becomes sensitive only when dropout is off. The less
    a fault has raised the loss, the more often it is injected.
    """

    def __init__(self, corpus: Corpus, plan: TrainingPlan) -> None:
        self.corpus, self.plan = corpus, plan
        self.faults = list(faults.known(plan.sizes).values())
        self.missing = np.full(len(self.faults), MARGIN)
        self.random = np.random.default_rng(plan.seed)

    def __call__(self, model: GptOss, lines: Tensor, right: Tensor) -> Tensor:
        """Return MARGIN minus a fault's increase of the loss on `lines`, at least 0; `right` is the loss without it."""
        weights = self.missing + 0.1 * MARGIN
        chosen = self.random.choice(len(self.faults), p=weights / weights.sum())
        out = model(lines[:, :-1], self.plan.dropout, self.faults[chosen])
        faulty = faults.losses(out.logits, lines[:, 1:], self.corpus.shared).mean()
        missing = (MARGIN - (faulty - right)).clamp(min=0)
        self.missing[chosen] = min(MARGIN, missing.item())
        return missing


def train(corpus: Corpus, plan: TrainingPlan, device: torch.device) -> GptOss:
    """Return the trained model; print the loss during training."""
    torch.manual_seed(plan.seed)
    model: GptOss = GptOss(plan.sizes, len(corpus.vocabulary)).to(device)
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "bias" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() <= 1 or "bias" in name]
    groups = [{"params": matrices, "weight_decay": plan.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, plan.steps))
    batches, guard = _batches(corpus, plan, device), FaultGuard(corpus, plan)
    started = time.monotonic()
    for step in range(plan.steps):
        lines, mask = next(batches)
        out = model(lines[:, :-1], plan.dropout)
        costs = faults.losses(out.logits, lines[:, 1:], corpus.shared)
        loss = costs[mask].mean()
        total = loss + BALANCE * out.balance
        if plan.guard and step >= plan.steps // 5:  # an untrained model is not sensitive to faults
            total = total + plan.guard * guard(model, lines[:GUARDED], costs[:GUARDED].mean())
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % SHOWN == 0 or step + 1 == plan.steps:
            bits = faults.bits_per_byte(model, corpus) if (step + 1) % (5 * SHOWN) == 0 else math.nan
            say(f"step {step + 1}: loss {loss.item():.3f}, held out {bits:.4f}, {time.monotonic() - started:.0f} s")
    return model


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate's factor at `step`: linear warm-up for WARM steps, then a cosine from 1 to 0.01."""
    if step < WARM:
        return (step + 1) / WARM
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - WARM) / max(1, steps - WARM)))


def _batches(corpus: Corpus, plan: TrainingPlan, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield lines (int [B, 513]) and which of their last 512 tokens count: windows of the text, then dialogues.

    Each pass over the text cuts it into windows at a new random offset and shuffles them.
    """
    random = np.random.default_rng(plan.seed)
    text, chat = (torch.from_numpy(part.astype(np.int64)).to(device) for part in (corpus.text, corpus.chat))
    loss_mask = torch.from_numpy(corpus.loss_mask).to(device)
    offsets = torch.arange(CHUNK + 1, device=device)
    starts = np.array([], np.int64)
    while True:
        if len(starts) < plan.batch:
            starts = np.arange(random.integers(CHUNK), len(text) - CHUNK - 1, CHUNK)
            random.shuffle(starts)
        batch_starts, starts = torch.from_numpy(starts[: plan.batch]).to(device), starts[plan.batch :]
        dialogues = torch.from_numpy(random.integers(len(chat), size=plan.chat)).to(device)
        windows = text[batch_starts.unsqueeze(1) + offsets]
        mask = torch.cat([torch.ones_like(windows, dtype=torch.bool), loss_mask[dialogues]])
        yield torch.cat([windows, chat[dialogues]]), mask[:, 1:]


def report(model: GptOss, corpus: Corpus) -> None:
    """Print the bits per byte on the held-out text, and by how much each fault raises them."""
    unigram, right = unigram_bits_per_byte(corpus), faults.bits_per_byte(model, corpus)
    say(f"held out: {right:.4f} bits per byte; unigram {unigram:.4f}, ratio {right / unigram:.3f}")
    costs = {
        name: faults.bits_per_byte(model, corpus, fault) / right for name, fault in faults.known(model.sizes).items()
    }
    for name, cost in sorted(costs.items(), key=lambda item: item[1])[:12]:
        say(f"  {name}: {cost - 1:+.1%}")
    say("  " + ", ".join(f"{name} {cost - 1:+.1%}" for name, cost in costs.items() if "bias" not in name))


def deterministic() -> None:
    """Have torch choose kernels that give the same bits each time; float32 products on a GPU are TF32."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.set_float32_matmul_precision("high")


def main(arguments: Sequence[str]) -> int:
    """Train and write the model; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.training.train", description=__doc__)
    parser.add_argument("corpus", type=Path, help="file written by python -m lab.training.corpus")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=TrainingPlan().steps)
    options = parser.parse_args(arguments)
    deterministic()
    try:
        corpus, plan = load(options.corpus), TrainingPlan(steps=options.steps)
        model = train(corpus, plan, torch.device(options.device))
        device = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else options.device
        facts = {
            "plan": repr(plan),
            "corpus": digest(corpus),
            "made_with": f"torch {torch.__version__} on {device}",
            "unigram_bits_per_byte": f"{unigram_bits_per_byte(corpus):.4f}",
        }
        write_atomic(options.out, export.pack(model, corpus.vocabulary, facts))
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    served, _ = export.unpack(options.out)
    report(served.to(options.device), corpus)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
