"""The Spark's roofline by serve profile and by format, as the Markdown tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkforge.plan import budget, devices, roofline, speed
from sparkforge.plan.architecture import Architecture, DenseFormat
from sparkforge.plan.budget import Workload
from sparkforge.plan.choose import ServerOptions, candidates, dense_formats
from sparkforge.plan.devices import GIB, Device

DEVICE = "spark"
TOKENS = (1, 4, 16, 64, 256)  # of the experts' table
BEHIND = 1024  # tokens behind each sequence, beside --max-model-len
PIECE = 8192  # tokens a sequence in the last tables
USERS = (1, 4, 16, 64)  # of the table of formats


def tables(model: Architecture, profiles: Mapping[str, ServerOptions]) -> str:
    """Return five tables: formats, experts, decode, prefill and memory."""
    device = devices.named(DEVICE)
    flags = {name: profiles[name] for name in candidates(device, profiles)}
    return "\n\n".join(
        (
            _formats(model, device, dense_formats(device, profiles)),
            _experts(model, device),
            _decode(model, device, flags),
            _prefill(model, device, flags),
            _memory(model, device, flags),
        )
    )


def _formats(model: Architecture, device: Device, compared: Sequence[DenseFormat]) -> str:
    """A row a format of attention and LM head: bytes of a token's weights, speeds, and memory that is free for KV."""
    rows = []
    alone = device.bytes_a_second or 1.0
    for dense in compared:
        named = {part.name: part.bytes for part in model.parts(dense)}
        read = sum(named[name] for name in ("attention qkv", "attention o", "lm_head"))
        read += int(model.layers * model.top_k * model.expert_bytes)
        rates = [speed.ceiling(model, device, users, BEHIND, "bf16", dense) or 0.0 for users in USERS]
        won = model.weight_bytes() - model.weight_bytes(dense)
        tokens = won // (model.full_layers * model.kv_layer_token("bf16"))
        rows.append(
            (
                dense.attention,
                dense.head,
                f"{read / 1e9:.2f}",
                f"{alone / read:.0f}",
                *(f"{rate:.1f}" for rate in rates),
                f"{won / GIB:.2f}",
                f"{tokens:,}",
            )
        )
    users = (f"{count} user{'s' if count > 1 else ''}" for count in USERS)
    heads = ("attention", "LM head", "GB a token, weights", "tok/s by these alone", *users, "GiB won", "KV tokens won")
    return _table(heads, rows, 2)


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
        longest, load = profile.longest(model.longest), profile.load(Workload(1, 1))
        together = load.sequences
        for batch, behind in ((1, BEHIND), (4, BEHIND), (together, BEHIND), (1, longest)):
            time = roofline.time(roofline.decode(model, batch, behind, load.kv, load.dense), device)
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
            works = list(roofline.prefill(model, prompt, 1, load.batched, load.kv, load.dense))
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
