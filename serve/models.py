"""The configurations that `serve/models.toml` holds: what can be planned for without the checkpoint on disk."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.errors import PlanTableError

TABLE = Path(__file__).with_name("models.toml")
# How serve/training names sizes → how config.json does.
NAMES = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}


@dataclass(frozen=True)
class Known:
    """What a model's config.json says of sizes, and who says so. `tensor_bytes`: all weights, None if not told."""

    name: str
    config: dict[str, Any]
    source: str
    tensor_bytes: int | None = None
    tensor_bytes_source: str = ""


def load(table: Path = TABLE) -> dict[str, Known]:
    """Return every known configuration by name. Raises PlanTableError."""
    try:
        rows = tomllib.loads(table.read_text(encoding="utf-8"))["configs"]
        return {name: _known(name, row, table.parent) for name, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PlanTableError(
            f"{table.name} cannot be used", why, f"git diff {table.parent.name}/{table.name}"
        ) from error


def _known(name: str, row: dict[str, Any], folder: Path) -> Known:
    sizes = _sizes(folder / row["sizes"]) if "sizes" in row else {}
    told = row.get("tensor_bytes")
    config = {**row["config"], **sizes}
    return Known(name, config, row["source"], told and int(told), row.get("tensor_bytes_source", ""))


def _sizes(file: Path) -> dict[str, int]:
    """Return the sizes in a safetensors file's metadata by config.json's names; none if it is not there.

    Its README has the layout: header length, then JSON. Without sizes only a plan for this very model is refused.
    """
    if not file.exists():
        return {}
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    told = json.loads(header["__metadata__"]["sizes"])
    return {config: int(told[name]) for name, config in NAMES.items()}
