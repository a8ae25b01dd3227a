"""The Spark's roofline by format, as the Markdown tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkforge.plan import devices, roofline, speed
from sparkforge.plan.architecture import Architecture, DenseFormat
from sparkforge.plan.choose import ServerOptions, dense_formats
from sparkforge.plan.devices import GIB, Device

DEVICE = "spark"
TOKENS = (1, 4, 16, 64, 256)  # of the experts' table
BEHIND = 1024  # tokens behind each sequence
USERS = (1, 4, 16, 64)  # of the table of formats


def tables(model: Architecture, profiles: Mapping[str, ServerOptions]) -> str:
    """Return two tables: formats and experts."""
    device = devices.named(DEVICE)
    return f"{_formats(model, device, dense_formats(device, profiles))}\n\n{_experts(model, device)}"


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


def _table(heads: Sequence[str], rows: Sequence[tuple[str, ...]], labels: int) -> str:
    """Return a Markdown table; the first `labels` columns are aligned left."""
    rule = " | ".join("---" if index < labels else "---:" for index in range(len(heads)))
    return "\n".join(f"| {line} |" for line in (" | ".join(heads), rule, *(" | ".join(row) for row in rows)))
