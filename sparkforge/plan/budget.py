"""The memory that a served model takes on a device, line by line, and the length and number of sequences that fit.

All sizes are bytes. A line is computed from the model's sizes, or is a bound with a source. None was measured on a
Spark.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from sparkforge.core.tables import Record
from sparkforge.plan.architecture import BF16, STEPS_UNDER_WAY, Architecture, DenseFormat, Draft
from sparkforge.plan.devices import GIB, Device

HOST_WORKING_BYTES = 4 * GIB  # measured with the tiny model on x86-64: 3.7 GB PSS (vLLM's CPU build, eager)
# vLLM 0.32.0's own --max-num-batched-tokens and --max-num-seqs for its server on 70 to 160 GiB (arg_utils.py:2940).
BATCHED_TOKENS, SEQUENCES = 8192, 1024
DEFAULT_UTILIZATION = 0.92  # vLLM 0.32.0's own --gpu-memory-utilization, vllm/config/cache.py:102
LOGIT_COPIES = 2  # bf16 → float32, and the sampler's own copy of it


@dataclass(frozen=True)
class Workload:
    """The workload. `context`: tokens per sequence; `concurrency`: sequences at once; `kv`, `dense`: formats.

    `batched` and `sequences` are vLLM's --max-num-batched-tokens and --max-num-seqs.
    """

    context: int
    concurrency: int = 1
    kv: str = "bf16"
    dense: DenseFormat = BF16
    batched: int = BATCHED_TOKENS
    sequences: int = SEQUENCES
    draft: Draft | None = None


class Line(Record):
    """One use of memory. `share`: whether it counts against vLLM's --gpu-memory-utilization."""

    name: str
    bytes: int
    share: bool
    how: str


@dataclass(frozen=True)
class Budget:
    """All uses of a device's memory, and the memory that is left (below 0: the workload does not fit)."""

    total: int
    lines: tuple[Line, ...]

    @property
    def left(self) -> int:
        """Bytes for the page cache and everything unforeseen."""
        return self.total - sum(line.bytes for line in self.lines)

    @property
    def share(self) -> float:
        """The least --gpu-memory-utilization that is enough for vLLM's lines."""
        return sum(line.bytes for line in self.lines if line.share) / self.total


def kv_bytes(model: Architecture, load: Workload) -> int:
    """Bytes of KV blocks: those of all decoding sequences, and those that one prefill adds in sliding layers."""
    held = model.kv_held(load.context, load.kv)
    admitted = model.kv_admitted(load.context, STEPS_UNDER_WAY * load.batched, load.kv)
    return load.concurrency * held + admitted - held


def activation_bytes(model: Architecture, load: Workload) -> int:
    """Estimate of the bytes of the largest step's activations; all but the logits are in bf16.

    MLPs: gate, up and their product in a token's active width, and one output row per expert of a token;
    attention: queries, keys, values; the hidden states four times (residual, normed, attention's and MLPs' output);
    logits of every sequence in float32.
    """
    experts = load.batched * (3 * model.active + max(1, model.top_k) * model.hidden)
    attention = load.batched * (model.heads + 2 * model.kv_heads) * model.head_dim
    logits = 4 * LOGIT_COPIES * min(load.sequences, load.batched) * model.vocab
    return 2 * (experts + attention + 4 * load.batched * model.hidden) + logits


def share_lines(model: Architecture, device: Device, load: Workload, weights: int | None = None) -> tuple[Line, ...]:
    """Return the lines that count against vLLM's share. `weights`: bytes of the checkpoint on disk, None if unknown."""
    on_disk = model.weight_bytes() if weights is None else weights
    how = "computed" if weights is None else "sizes of the files"
    if load.dense != BF16:
        on_disk += model.weight_bytes(load.dense) - model.weight_bytes()
        how += f", dense layers in {load.dense.name}"
    held = load.draft.bytes if load.draft else 0
    draft = [Line(name="draft", bytes=held, share=True, how="its recipe")] if held else []
    padded = f"computed, to multiples of {device.align}"
    return (
        Line(name="weights", bytes=on_disk, share=True, how=how),
        *draft,
        Line(name="padding of experts", bytes=model.padding_bytes(device.align), share=True, how=padded),
        Line(name="KV cache", bytes=kv_bytes(model, load), share=True, how="computed, vLLM's blocks"),
        Line(name="activations", bytes=activation_bytes(model, load), share=True, how="computed, an estimate"),
        Line(name="graphs, workspaces", bytes=int(device.runtime.value * GIB), share=True, how=device.runtime.origin),
    )


def make(model: Architecture, device: Device, load: Workload) -> Budget:
    """Return the budget of serving `load` on `device`."""
    figures = {"system, other programs": device.resident, "vLLM outside its share": device.host}
    beside = [
        Line(name=name, bytes=int(figure.value * GIB), share=False, how=figure.origin)
        for name, figure in figures.items()
    ]
    return Budget(device.memory_bytes, (*share_lines(model, device, load), *beside))


def most_share(device: Device) -> float:
    """The highest --gpu-memory-utilization that leaves other programs their memory, rounded down to two decimals."""
    others = (device.resident.value + device.host.value) / device.memory.value
    return int(100 * max(0.0, min(device.most.value, 1.0 - others))) / 100


def fits(model: Architecture, device: Device, load: Workload) -> bool:
    """Whether serving `load` fits into the highest share that the device allows."""
    return make(model, device, load).share <= most_share(device)


def missing(model: Architecture, device: Device, load: Workload) -> int:
    """Bytes that serving `load` needs beyond the highest share; 0 or less if it fits."""
    budget = make(model, device, load)
    return int((budget.share - most_share(device)) * budget.total)


def most_sequences(model: Architecture, device: Device, load: Workload) -> int:
    """The number of sequences of `load.context` tokens that fit at once."""
    lines = share_lines(model, device, replace(load, concurrency=1))
    spare = most_share(device) * device.memory_bytes - sum(line.bytes for line in lines)
    return 0 if spare < 0 else 1 + int(spare // model.kv_held(load.context, load.kv))


def most_tokens(model: Architecture, device: Device, load: Workload) -> int:
    """The most tokens that each of `load.concurrency` sequences can have, up to the model's limit; 0 if none fits."""
    return bisect_left(  # more tokens never take less memory
        range(1, model.longest + 1), x=True, key=lambda tokens: not fits(model, device, replace(load, context=tokens))
    )
