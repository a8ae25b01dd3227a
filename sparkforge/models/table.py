"""models.toml: pinned revisions of checkpoints, and configurations that can be planned for without one on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from sparkforge.core import tables
from sparkforge.core.documents import parse_json
from sparkforge.core.errors import InputError
from sparkforge.core.tables import Record
from sparkforge.plan.architecture import KnownModel

TABLE = Path(__file__).with_name("models.toml")
OWNER = "openai"  # of the models whose bytes are known
HEADER_BYTES = 10_000_000  # of a safetensors file; ours has 20 kB
# Names of sizes in training/ → in config.json.
NAMES = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}


class Checkpoint(Record):
    """The revision of a repository that is fetched where none is named, and the source of that commit."""

    revision: str
    source: str


class ModelTable(Record):
    """The whole of models.toml."""

    models: dict[str, Checkpoint] = Field(default_factory=dict)
    configs: dict[str, KnownModel]


def load(table: Path = TABLE) -> dict[str, KnownModel]:
    """Return every known configuration by name. Raises InputError."""
    rows = tables.load(table, ModelTable).configs
    return {
        name: row.model_copy(update={"config": {**row.config, **_sizes(table.parent / row.sizes)}})
        if row.sizes
        else row
        for name, row in rows.items()
    }


def pinned_revision(repository: str) -> str:
    """Return the revision pinned for a repository; empty if there is none. Raises InputError."""
    pinned = tables.load(TABLE, ModelTable).models.get(repository)
    return pinned.revision if pinned else ""


def repositories(name: str) -> tuple[str, ...]:
    """Return the repository of a model that is known by this name; nothing for another."""
    known = tables.load(TABLE, ModelTable).configs
    return (f"{OWNER}/{name}",) if name in known and known[name].tensor_bytes else ()


def differences(config: Mapping[str, Any], repository: str) -> list[str]:
    """Return how a config.json differs from the one that models.toml holds for a model of OpenAI's."""
    owner, _, name = repository.rpartition("/")
    known = load().get(name) if owner in ("", OWNER) else None
    expected = known.config if known else {}
    different = {
        key: value for key, value in expected.items() if not isinstance(value, dict) and config.get(key) != value
    }
    return [f"{key} {str(config.get(key))[:40]} instead of {value}" for key, value in different.items()]


def _sizes(file: Path) -> dict[str, int]:
    """Return the sizes in a safetensors file's metadata by config.json's names; none if there is no such file.

    Its README has the layout: header length, then JSON. Without sizes only a plan for this very model is refused.
    """
    if not file.exists():
        return {}
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = parse_json(opened.read(min(size, HEADER_BYTES)), file.name)
        sizes = parse_json(header["__metadata__"]["sizes"], file.name)
        return {config: int(sizes[name]) for name, config in NAMES.items()}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(
            f"the sizes in {file.name} cannot be read",
            f"{type(error).__name__}: {' '.join(str(error).split())}",
            f"git checkout sparkforge/models/{file.name}",
            code="input.table",
        ) from error
