"""How fast a model can decode and prefill at best: bytes over bandwidth, arithmetic over rate, whichever takes longer.

The result is a ceiling, not a forecast: memory traffic and arithmetic are assumed to overlap perfectly. It counts all
weights that a step touches, the keys and values that it reads and writes, and the arithmetic of matrix products, but no
activations, norms, softmax, sampling or launches. Quantised dense layers are read in their format and multiplied at the
rate of bf16, as in weight-only kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sparkforge.plan.architecture import BITS, Architecture, DenseFormat, Draft
from sparkforge.plan.budget import Workload
from sparkforge.plan.devices import Device

MOST_STEPS = 10_000  # beyond that, steps grow, so that the loop ends for any shape
MEMORY, COMPUTE, UNKNOWN, RATES_UNKNOWN = "memory", "compute", "?", "memory?"


def experts_touched(experts: int, top_k: int, tokens: int) -> float:
    """Experts of a layer that `tokens` tokens touch, in expectation, if routing is even and independent.

    E * (1 - (1 - k/E)^M). Real routing is uneven: it touches fewer.
    """
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens) if experts else 0.0


@dataclass(frozen=True)
class Work:
    """The least work of a step of `tokens`: bytes of memory traffic, and FLOP at the experts' and the dense rate."""

    bytes: float
    expert_flops: float
    dense_flops: float
    expert_bytes: float = 0.0  # included in `bytes`
    tokens: int = 0


@dataclass(frozen=True)
class Time:
    """The least time of `work`, in seconds, and its bound. None: the device's figures are not known."""

    work: Work
    memory: float | None
    compute: float | None

    @property
    def seconds(self) -> float | None:
        """The longer of memory and compute time; None if the bandwidth is not known."""
        return None if self.memory is None else max(self.memory, self.compute or 0.0)

    @property
    def bound(self) -> str:
        """The limit of the step, memory or compute; with a question mark where the device's figures are not known."""
        if self.memory is None:
            return UNKNOWN
        if self.compute is None:
            return RATES_UNKNOWN
        return COMPUTE if self.compute > self.memory else MEMORY


def time(work: Work, device: Device) -> Time:
    """Return the least time of `work` on `device`."""
    bandwidth, experts, dense = device.bytes_a_second, device.flops(device.experts), device.flops("bf16")
    compute = work.expert_flops / experts + work.dense_flops / dense if experts and dense else None
    return Time(work, work.bytes / bandwidth if bandwidth else None, compute)


def decode(model: Architecture, batch: int, load: Workload, touched: float | None = None, *, tokens: int = 1) -> Work:
    """Return the work of a step that decodes or verifies `tokens` of each of `batch` sequences.

    Each sequence has `load.context` tokens already. `touched` is the number of experts per layer; None: even routing.
    """
    context, kv, dense, rows = load.context, load.kv, load.dense, batch * tokens
    hit = experts_touched(model.experts, model.top_k, rows) if touched is None else touched
    attended = batch * attention_flops(model, context, context + tokens)
    head = 2 * rows * model.vocab * model.hidden
    weights, expert_bytes = weights_read(model, hit, dense), model.expert_layers * hit * model.expert_bytes
    moved = weights + head_bytes(model, dense) + batch * model.kv_read(context, kv) + rows * token_bytes(model, kv)
    return Work(moved, rows * expert_flops(model), rows * dense_flops(model) + attended + head, expert_bytes, rows)


def break_even(model: Architecture, device: Device, batch: int, load: Workload, draft: Draft) -> float | None:
    """Tokens per step at which `draft` gives no speedup and no slowdown: the step's time over that without a draft.

    The draft's weights are read `draft.passes` times; its arithmetic and its own KV cache are left out. None: the
    bandwidth is not known.
    """
    plain = time(decode(model, batch, load), device).seconds
    verified = time(decode(model, batch, load, tokens=draft.tokens + 1), device).seconds
    drafted = time(Work(draft.passes * draft.bytes, 0, 0), device).seconds
    return None if plain is None or verified is None or drafted is None else (verified + drafted) / plain


def prefill(model: Architecture, prompt: int, prompts: int, load: Workload) -> Iterator[Work]:
    """Yield the steps that read `prompts` prompts of `prompt` tokens each.

    A step reads `load.batched` tokens (--max-num-batched-tokens), across prompts. Logits are computed for each prompt's
    last token only, as vLLM does.
    """
    kv, dense = load.kv, load.dense
    step = max(load.batched, prompts * prompt // MOST_STEPS)
    for begin in range(0, prompts * prompt, step):
        end = min(begin + step, prompts * prompt)
        pieces = list(_pieces(begin, end, prompt))
        tokens, ends = end - begin, sum(last == prompt for _, last in pieces)
        hit = experts_touched(model.experts, model.top_k, tokens)
        weights = weights_read(model, hit, dense) + (head_bytes(model, dense) if ends else 0.0)
        moved = weights + sum(model.kv_read(first, kv) for first, _ in pieces) + tokens * token_bytes(model, kv)
        attended = sum(attention_flops(model, first, last) for first, last in pieces)
        flops = tokens * dense_flops(model) + attended + 2 * ends * model.vocab * model.hidden
        expert_bytes = model.expert_layers * hit * model.expert_bytes
        yield Work(moved, tokens * expert_flops(model), flops, expert_bytes, tokens)


def first_token_seconds(model: Architecture, device: Device, prompt: int, prompts: int, load: Workload) -> float | None:
    """Seconds until the last of `prompts` prompts, sent together, can have its first token.

    None if the device's bandwidth or rates are not known: without arithmetic, a prompt's time is meaningless.
    """
    times = [time(work, device) for work in prefill(model, prompt, prompts, load)]
    if any(step.memory is None or step.compute is None for step in times):
        return None
    return sum(step.seconds or 0.0 for step in times)


def weights_read(model: Architecture, touched: float, dense: DenseFormat) -> float:
    """Bytes of the layers' weights that a step reads: `touched` experts per layer, and all other weights."""
    always = sum(part.bytes for part in model.parts(dense)[1:-1] if part.role != "experts")
    return always + model.expert_layers * touched * model.expert_bytes


def head_bytes(model: Architecture, dense: DenseFormat) -> float:
    """Bytes of the LM head, which is the embedding where both are tied."""
    return model.vocab * model.hidden * BITS["bf16" if model.tied else dense.head] / 8


def token_bytes(model: Architecture, kv: str) -> int:
    """Bytes that each token moves: its embedding, which is read, and its keys and values, which are written."""
    return 2 * model.hidden + model.kv_token(kv)


def expert_flops(model: Architecture) -> int:
    """FLOP of a token in its experts, all layers."""
    return 2 * model.expert_layers * model.top_k * model.expert


def dense_flops(model: Architecture) -> int:
    """FLOP of a token in the attention's projections, the dense layers and the routers."""
    return 2 * sum(part.count for part in model.between if part.role in ("attention", "dense", "router"))


def attention_flops(model: Architecture, first: int, last: int) -> int:
    """FLOP of scores and weighted sums for the tokens at positions `first` to `last` - 1, within a layer's window."""
    seen = _seen(last) - _seen(first)
    in_window = _seen(last, model.window) - _seen(first, model.window)
    pairs = model.full_layers * seen + model.sliding_layers * in_window
    return model.score_flops * pairs


def _seen(tokens: int, window: int | None = None) -> int:
    """Return the pairs (token, attended token) of the first `tokens` positions; a token also attends to itself."""
    ramp = tokens if window is None else min(tokens, window)
    return ramp * (ramp + 1) // 2 + (tokens - ramp) * (window or 0)


def _pieces(begin: int, end: int, prompt: int) -> Iterator[tuple[int, int]]:
    """Split a step's tokens by prompts; yield each piece's first position in its prompt, and its last plus 1."""
    while begin < end:
        first = begin % prompt
        last = min(prompt, first + end - begin)
        yield first, last
        begin += last - first
