"""The Spark's roofline by serve profile, as the Markdown tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkforge.plan import budget, devices, roofline
from sparkforge.plan.architecture import Architecture
from sparkforge.plan.budget import Workload
from sparkforge.plan.choose import ServerOptions
from sparkforge.plan.devices import GIB, Device

DEVICE = "spark"
TOKENS = (1, 4, 16, 64, 256)  # of the experts' table
BEHIND = 1024  # tokens behind each sequence, beside --max-model-len
PIECE = 8192  # tokens a sequence in the last table


def tables(model: Architecture, profiles: Mapping[str, ServerOptions]) -> str:
    """Return four tables: experts, decode, prefill and memory."""
    device = devices.named(DEVICE)
    flags = {name: profiles[name] for name in device.profiles}
    return "\n\n".join(
        (
            _experts(model, device),
            _decode(model, device, flags),
            _prefill(model, device, flags),
            _memory(model, device, flags),
        )
    )


def _experts(model: Architecture, device: Device) -> str:
    """A row a number of tokens: weights of the experts that they touch, over the memory's bandwidth."""
    rows = []
    for tokens in TOKENS:
        hit = roofline.experts_touched(model.experts, model.top_k, tokens)
        layer = hit * model.expert_bytes
        seconds = layer / (device.bytes_a_second or 1.0)
        times = (f"{seconds * 1e6:,.0f}", f"{seconds * model.layers * 1e3:.1f}")
        rows.append((str(tokens), f"{hit:.1f}", f"{layer / 1e6:,.0f}", *times))

    heads = ("tokens", "experts hit", "MB a layer", "µs a layer, at least", f"ms for {model.layers} layers, at least")
    return _table(heads, rows, 0)


def _decode(model: Architecture, device: Device, flags: dict[str, ServerOptions]) -> str:
    """Four rows a profile: one, four and all users BEHIND tokens deep, and one user at the longest context."""
    rows = []
    for name, profile in flags.items():
        longest, together = profile.longest(model.longest), profile.load(Workload(1, 1)).sequences
        for batch, behind in ((1, BEHIND), (4, BEHIND), (together, BEHIND), (1, longest)):
            time = roofline.time(roofline.decode(model, batch, behind, "bf16", "bf16"), device)
            seconds = time.seconds or 1.0
            speeds = (f"{seconds * 1e3:.1f}", f"{1 / seconds:.1f}", f"{batch / seconds:,.1f}")
            rows.append((name, f"{batch}", f"{behind:,}", f"{time.work.bytes / 1e9:.1f}", *speeds, time.bound))

    heads = ("profile", "at once", "tokens behind each", "GB a step", "ms, at least", "tok/s each, at most", "all")
    return _table((*heads, "bound"), rows, 1, label_last=True)


def _prefill(model: Architecture, device: Device, flags: dict[str, ServerOptions]) -> str:
    """Three rows a profile: prompts of BEHIND, of PIECE and of the longest; the times of its steps add up."""
    rows = []
    for name, profile in flags.items():
        load = profile.load(Workload(1, 1))
        for prompt in (BEHIND, PIECE, profile.longest(model.longest)):
            works = list(roofline.prefill(model, prompt, 1, load.batched, "bf16"))
            seconds = sum(roofline.time(work, device).seconds or 0.0 for work in works)
            bound = " and ".join(sorted({roofline.time(work, device).bound for work in works}))
            rows.append(
                (
                    name,
                    f"{prompt:,}",
                    f"{load.batched:,}",
                    f"{seconds * 1e3:,.0f}",
                    f"{prompt / seconds:,.0f}",
                    bound,
                )
            )

    heads = ("profile", "prompt", "tokens a step", "ms to first token, at least", "tok/s, at most", "bound")
    return _table(heads, rows, 1, label_last=True)


def _memory(model: Architecture, device: Device, flags: dict[str, ServerOptions]) -> str:
    """A row a profile: what its share leaves for keys and values, and how many sequences that holds."""
    rows = []
    for name, profile in flags.items():
        longest, share = profile.longest(model.longest), profile.number("--gpu-memory-utilization", 0)
        shared = device.model_copy(update={"most": device.most.model_copy(update={"value": share})})
        load = profile.load(Workload(PIECE, 1))
        lines = {line.name: line.bytes for line in budget.make(model, device, load).lines if line.share}
        cache = share * device.memory_bytes - sum(lines.values()) + lines["KV cache"]
        fitting = (
            budget.most_sequences(model, shared, profile.load(Workload(tokens, 1))) for tokens in (PIECE, longest)
        )
        rows.append((name, f"{share:g}", f"{cache / GIB:.1f}", *(str(count) for count in fitting), f"{load.sequences}"))

    heads = (
        "profile",
        "share",
        "GiB for the KV cache",
        f"sequences of {PIECE:,} tokens",
        "of --max-model-len",
        "let in",
    )
    return _table(heads, rows, 1)


def _table(heads: Sequence[str], rows: Sequence[tuple[str, ...]], labels: int, *, label_last: bool = False) -> str:
    """Return a Markdown table; the first `labels` columns, and the last one if `label_last`, are aligned left."""
    left = [index < labels or (label_last and index == len(heads) - 1) for index in range(len(heads))]
    rule = " | ".join("---" if is_left else "---:" for is_left in left)
    return "\n".join(f"| {line} |" for line in (" | ".join(heads), rule, *(" | ".join(row) for row in rows)))
