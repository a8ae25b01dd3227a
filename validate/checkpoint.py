"""Facts about the model directory: config, index, and the safetensors headers against the sizes of the files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from validate.bounded import ProbeError
from validate.facts import Reading
from validate.scene import Scene, once

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COMPANION_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
HEADER_LIMIT = 100_000_000  # bytes; the safetensors library refuses longer headers too


def directory(scene: Scene) -> Path:
    """The model directory; raises ProbeError if none was given or it is none."""
    chosen = scene.options.model or scene.argument("--model")
    if chosen is None:
        raise ProbeError("no model directory was given")
    if not Path(chosen).is_dir():
        raise ProbeError(f"{chosen} is not a directory")
    return Path(chosen)


def path(scene: Scene) -> str | None:
    """The model directory as it was given, or None."""
    chosen = scene.options.model or scene.argument("--model")
    return str(chosen) if chosen is not None else None


@once
def config(scene: Scene) -> dict[str, Any]:
    """config.json as a table."""
    return dict(json.loads((directory(scene) / "config.json").read_text(encoding="utf-8")))


@once
def weight_map(scene: Scene) -> dict[str, str]:
    """Tensor name → shard file, from the index; a single file without index stands for itself."""
    root = directory(scene)
    if (root / INDEX).is_file():
        return dict(json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if (root / SINGLE).is_file():
        return dict.fromkeys(header(root / SINGLE)[0], SINGLE)
    raise ProbeError(f"{root} has neither {INDEX} nor {SINGLE}")


def header(file: Path) -> tuple[set[str], int]:
    """Tensor names of a safetensors file and the size in bytes that its header promises.

    Layout: u64 little-endian header length, JSON header, data; `data_offsets` count from the end of the header
    (safetensors format description). Raises ValueError for anything else.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int(struct.unpack("<Q", start)[0]) if len(start) == 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size - 8):
            raise ValueError("is cut off within its header")
        table = json.loads(opened.read(length))
    tensors = {name: entry for name, entry in table.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    return set(tensors), 8 + length + end


@once
def survey(scene: Scene) -> tuple[list[str], list[str], int]:
    """Missing shards, damaged shards as `file: what`, and bytes of all shards that are there."""
    root, named = directory(scene), weight_map(scene)
    missing, damaged, total = [], [], 0
    for shard in sorted(set(named.values())):
        file = root / shard
        if not file.is_file():
            missing.append(shard)
            continue
        total += file.stat().st_size
        damaged += [f"{shard}: {what}" for what in _damage(file, {t for t, s in named.items() if s == shard})]
    return missing, damaged, total


def _damage(file: Path, expected: set[str]) -> list[str]:
    try:
        names, promised = header(file)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [str(error) if isinstance(error, ValueError) else "has no safetensors header"]
    found = []
    if file.stat().st_size != promised:
        found.append(f"has {file.stat().st_size} bytes, its header promises {promised}")
    if expected - names:
        found.append(f"lacks {len(expected - names)} tensors that the index places there")
    return found


def files_missing(scene: Scene) -> list[str]:
    """Files beside the weights that vLLM needs to tokenize and to stop, and that are not there."""
    return [name for name in COMPANION_FILES if not (directory(scene) / name).is_file()]


READINGS = (
    Reading("model.path", "--model", path),
    Reading("model.config", "config.json", config),
    Reading("model.model_type", "config.json", lambda scene: config(scene)["model_type"]),
    Reading(
        "model.quant_method",
        "config.json quantization_config",
        lambda scene: (config(scene).get("quantization_config") or {}).get("quant_method"),
    ),
    Reading("model.shards_missing", INDEX, lambda scene: survey(scene)[0]),
    Reading("model.shards_damaged", "safetensors headers against file sizes", lambda scene: survey(scene)[1]),
    Reading("model.weight_bytes", "sizes of the safetensors files", lambda scene: survey(scene)[2]),
    Reading("model.files_missing", "model directory", files_missing),
)
