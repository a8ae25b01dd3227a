"""Facts about the model directory: config.json, index, and safetensors headers compared with the files' sizes."""

import struct
from pathlib import Path
from typing import Any

from sparkforge.core.errors import InputError
from sparkforge.core.files import parse_json, read_json, unreadable
from sparkforge.core.process import ProbeError
from sparkforge.plan import architecture, families
from sparkforge.plan.families import Family
from validate.facts.fact import Reading
from validate.facts.target import Target, once

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COMPANION_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
CONFIG_LIMIT = 10_000_000  # bytes; a config.json has a few kilobytes
HEADER_LIMIT = 100_000_000  # bytes; the safetensors library refuses longer headers too


def directory(target: Target) -> Path:
    """Return the model directory. Raises ProbeError if none was given, or if it is not a readable directory."""
    model = path(target)
    if model is None:
        raise ProbeError("no model directory was given")
    if denied := unreadable(Path(model)):
        raise ProbeError(denied[0])
    if not Path(model).is_dir():
        raise ProbeError(f"{model} is not a directory")
    return Path(model)


def path(target: Target) -> str | None:
    """Return the model directory as the caller named it; None if none was given."""
    model = target.options.model or target.argument("--model")
    return str(model) if model is not None else None


@once
def config(target: Target) -> dict[str, Any]:
    """Return the content of config.json. Raises ProbeError without a directory, OSError, ValueError."""
    return dict(read_json(directory(target) / "config.json", largest=CONFIG_LIMIT))


@once
def family(target: Target) -> Family | None:
    """Return the row of the model's family; None without a model, or if the check model-format refuses the model."""
    try:
        return families.load()[architecture.parse(config(target), "config.json").family]
    except (ProbeError, OSError, ValueError, InputError):
        return None


def layer(target: Target) -> dict[str, Any]:
    """Return sizes of one layer and entries of its family's row, for the child programs; empty without a family."""
    row = family(target)
    if row is None:
        return {}
    model = architecture.parse(config(target), "config.json")
    sizes = {name: getattr(model, name) for name in ("experts", "top_k", "hidden", "intermediate")}
    experts = row.experts.model_dump(include={"activation", "bias", "routing", "selector"}) if row.experts else {}
    return {**sizes, **experts, "sinks": row.sinks, "windows": bool(model.sliding_layers)}


@once
def weight_map(target: Target) -> dict[str, str]:
    """Return tensor name → shard file, from the index; a single file needs no index. Raises ProbeError without both."""
    root = directory(target)
    if (root / INDEX).is_file():
        return dict(read_json(root / INDEX, largest=HEADER_LIMIT)["weight_map"])
    if (root / SINGLE).is_file():
        return dict.fromkeys(header(root / SINGLE)[0], SINGLE)
    raise ProbeError(f"{root} has neither {INDEX} nor {SINGLE}")


def header(file: Path) -> tuple[set[str], int]:
    """Tensor names of a safetensors file and the file's size in bytes according to its header.

    Layout: u64 little-endian header length, JSON header, data; `data_offsets` count from the end of the header
    (safetensors format description). Raises ValueError for anything else.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int(struct.unpack("<Q", start)[0]) if len(start) == 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size - 8):
            raise ValueError("is cut off within its header")
        table = parse_json(stream.read(length), str(file))
    tensors = {name: entry for name, entry in table.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    return set(tensors), 8 + length + end


@once
def survey(target: Target) -> tuple[list[str], list[str], int]:
    """Return missing shards, damaged shards as `file: damage`, and the bytes of all present shards."""
    root, shards = directory(target), weight_map(target)
    missing, damaged, total = [], [], 0
    for shard in sorted(set(shards.values())):
        file = root / shard
        if not file.is_file():
            missing.append(shard)
            continue
        total += file.stat().st_size
        damaged += [f"{shard}: {damage}" for damage in _damage(file, {t for t, s in shards.items() if s == shard})]
    return missing, damaged, total


def _damage(file: Path, expected: set[str]) -> list[str]:
    try:
        names, promised = header(file)
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        return [str(error) if isinstance(error, ValueError) else "has no safetensors header"]
    damage = []
    if file.stat().st_size != promised:
        damage.append(f"has {file.stat().st_size} bytes, its header promises {promised}")
    if expected - names:
        damage.append(f"lacks {len(expected - names)} tensors that the index places there")
    return damage


def files_missing(target: Target) -> list[str]:
    """Return the missing files, other than weights, that vLLM needs to tokenize and to end an answer."""
    return [name for name in COMPANION_FILES if not (directory(target) / name).is_file()]


READINGS = (
    Reading("model.path", "--model", path),
    Reading("model.config", "config.json", config),
    Reading("model.model_type", "config.json", lambda target: config(target)["model_type"]),
    Reading(
        "model.quant_method",
        "config.json quantization_config",
        lambda target: (config(target).get("quantization_config") or {}).get("quant_method"),
    ),
    Reading("model.shards_missing", INDEX, lambda target: survey(target)[0]),
    Reading("model.shards_damaged", "safetensors headers against file sizes", lambda target: survey(target)[1]),
    Reading("model.weight_bytes", "sizes of the safetensors files", lambda target: survey(target)[2]),
    Reading("model.files_missing", "model directory", files_missing),
)
