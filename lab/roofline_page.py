"""Writes the computed tables of docs/performance.md: `python -m lab.roofline_page`.

The tables are the Spark's roofline by format of the dense layers, and the experts' weights that a step reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkforge.core.files import write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.models import recipes as models
from sparkforge.plan import choose, devices, roofline, speed
from sparkforge.plan.architecture import Architecture, DenseFormat, parse
from sparkforge.plan.budget import Workload
from sparkforge.plan.devices import GIB, Device
from sparkforge.serve import profiles

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- made by .venv/bin/python -m lab.roofline_page -->", "<!-- end of what it made -->"
MODEL, DEVICE = "gpt-oss-120b", "spark"
TOKENS = (1, 4, 16, 64, 256)  # of the experts' table
CONTEXT = 1024  # tokens already in each sequence
USERS = (1, 4, 16, 64)  # of the table of formats


def replaced(text: str) -> str:
    """Return the page with new tables between the markers. Raises ValueError if the markers are missing."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} lacks the markers {BEGIN} and {END}")
    model, device = parse(models.load()[MODEL].config, MODEL), devices.named(DEVICE)
    formats = choose.dense_formats(device, profiles.load_options())
    tables = f"{formats_table(model, device, formats)}\n\n{experts_table(model, device)}"
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def formats_table(model: Architecture, device: Device, compared: Sequence[DenseFormat]) -> str:
    """Return a row for each format of attention and LM head: bytes of a token's weights, speeds, and memory for KV."""
    rows = []
    alone = device.bytes_a_second or 1.0
    for dense in compared:
        named = {part.name: part.bytes for part in model.parts(dense)}
        read = sum(named[name] for name in ("attention qkv", "attention o", "lm_head"))
        read += int(model.layers * model.top_k * model.expert_bytes)
        rates = [speed.ceiling(model, device, users, Workload(CONTEXT, dense=dense)) or 0.0 for users in USERS]
        won = model.weight_bytes() - model.weight_bytes(dense)
        tokens = won // (model.full_layers * model.kv_layer_token("bf16"))
        speeds = (f"{alone / read:.0f}", *(f"{rate:.1f}" for rate in rates))
        rows.append((dense.attention, dense.head, f"{read / 1e9:.2f}", *speeds, f"{won / GIB:.2f}", f"{tokens:,}"))
    users = (f"{count} user{'s' if count > 1 else ''}" for count in USERS)
    formats = ("attention", "LM head", "GB a token, weights", "tok/s by weights alone")
    return _table((*formats, *users, "GiB saved", "KV tokens gained"), rows, 2)


def experts_table(model: Architecture, device: Device) -> str:
    """Return a row for each number of tokens: bytes of the experts that they select, over the bandwidth."""
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


if __name__ == "__main__":
    write_atomic(PAGE, replaced(PAGE.read_text(encoding="utf-8")))
