"""Where a device's memory goes when a model serves, line by line; how long and how many sequences can be.

All sizes are bytes. Lines are computed from the model's sizes, or bounds with a source; none was measured on a Spark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from validate.architecture import STEPS_UNDER_WAY, Architecture
from validate.devices import GIB, Device

HOST_WORKING_BYTES = 4 * GIB  # measured with the tiny model on x86-64: 3.7 GB PSS (vLLM's CPU build, eager)
# vLLM 0.32.0's own --max-num-batched-tokens and --max-num-seqs for its server on 70 to 160 GiB (arg_utils.py:2940).
BATCHED_TOKENS, SEQUENCES = 8192, 1024
LOGIT_COPIES = 2  # bf16 → float32, and the sampler's own copy of it


@dataclass(frozen=True)
class Load:
    """What is to be served: tokens a sequence, sequences at once, the KV cache's type; and vLLM's bounds of a step."""

    context: int
    concurrency: int
    kv: str = "bf16"
    batched: int = BATCHED_TOKENS
    sequences: int = SEQUENCES


@dataclass(frozen=True)
class Line:
    """One use of memory. `share`: it counts against vLLM's --gpu-memory-utilization."""

    name: str
    bytes: int
    share: bool
    how: str


@dataclass(frozen=True)
class Budget:
    """All lines of a device's memory, and what is left of it (below 0: it does not fit)."""

    total: int
    lines: tuple[Line, ...]

    @property
    def left(self) -> int:
        """Bytes for the page cache and everything unforeseen."""
        return self.total - sum(line.bytes for line in self.lines)

    @property
    def share(self) -> float:
        """The least --gpu-memory-utilization that holds vLLM's lines."""
        return sum(line.bytes for line in self.lines if line.share) / self.total


def kv_bytes(model: Architecture, load: Load) -> int:
    """KV blocks of all sequences while they decode, and what one more step of prefill keeps in the sliding layers."""
    held = model.kv_held(load.context, load.kv)
    admitted = model.kv_admitted(load.context, STEPS_UNDER_WAY * load.batched, load.kv)
    return load.concurrency * held + admitted - held


def activation_bytes(model: Architecture, load: Load) -> int:
    """Estimate of the largest step's activations, all in bf16 but the logits.

    Experts: each token's k copies with gate and up, activation, and down; attention: queries, keys, values; the
    hidden states four times (residual, normed, attention's and experts' output); logits of every sequence in float32.
    """
    experts = load.batched * model.top_k * (3 * model.intermediate + model.hidden)
    attention = load.batched * (model.heads + 2 * model.kv_heads) * model.head_dim
    logits = 4 * LOGIT_COPIES * min(load.sequences, load.batched) * model.vocab
    return 2 * (experts + attention + 4 * load.batched * model.hidden) + logits


def share_lines(model: Architecture, device: Device, load: Load, weights: int | None = None) -> tuple[Line, ...]:
    """Return what counts against vLLM's share. `weights`: bytes of the checkpoint on disk, where they are known."""
    on_disk = model.weight_bytes() if weights is None else weights
    told = "computed" if weights is None else "sizes of the files"
    return (
        Line("weights", on_disk, share=True, how=told),
        Line(
            "padding of experts",
            model.padding_bytes(device.align),
            share=True,
            how=f"computed, to multiples of {device.align}",
        ),
        Line("KV cache", kv_bytes(model, load), share=True, how="computed, vLLM's blocks"),
        Line("activations", activation_bytes(model, load), share=True, how="computed, an estimate"),
        Line("graphs, workspaces", int(device.runtime.value * GIB), share=True, how=device.runtime.origin),
    )


def make(model: Architecture, device: Device, load: Load) -> Budget:
    """Return the budget of serving `load` on `device`."""
    beside = (
        Line("system, other programs", int(device.resident.value * GIB), share=False, how=device.resident.origin),
        Line("vLLM outside its share", int(device.host.value * GIB), share=False, how=device.host.origin),
    )
    return Budget(device.memory_bytes, (*share_lines(model, device, load), *beside))


def most_share(device: Device) -> float:
    """The highest --gpu-memory-utilization that leaves the others theirs, cut to two decimals as one would write it."""
    others = (device.resident.value + device.host.value) / device.memory.value
    return int(100 * max(0.0, min(device.most.value, 1.0 - others))) / 100


def fits(model: Architecture, device: Device, load: Load) -> bool:
    """Whether it fits, within the highest share that the device takes."""
    return make(model, device, load).share <= most_share(device)


def missing(model: Architecture, device: Device, load: Load) -> int:
    """Bytes by which it does not fit; 0 or less if it does."""
    budget = make(model, device, load)
    return int((budget.share - most_share(device)) * budget.total)


def most_sequences(model: Architecture, device: Device, load: Load) -> int:
    """How many sequences of `load.context` tokens fit at once; 0 if none does."""
    one = _least(model, device, load, 1)
    spare = most_share(device) * device.memory_bytes - sum(line.bytes for line in one.lines if line.share)
    return 0 if spare < 0 else 1 + int(spare // model.kv_held(load.context, load.kv))


def most_tokens(model: Architecture, device: Device, load: Load) -> int:
    """The longest that `load.concurrency` sequences can be, at most the model's own limit; 0 if they do not fit."""

    def enough(tokens: int) -> bool:
        """True up to some length: more tokens never take less memory."""
        return fits(model, device, Load(tokens, load.concurrency, load.kv, load.batched, load.sequences))

    return largest(enough, model.longest)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` for which `holds`, which is true up to some number; 0 if it is for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _least(model: Architecture, device: Device, load: Load, sequences: int) -> Budget:
    return make(model, device, Load(load.context, sequences, load.kv, load.batched, load.sequences))
