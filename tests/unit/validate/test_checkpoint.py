"""Facts about the model directory: whole, damaged, incomplete."""

import json
import struct

import pytest

from validate.facts import checkpoint
from validate.facts.fact import take


def fact(name, target):
    return take(next(reading for reading in checkpoint.READINGS if reading.name == name), target)


def shard(path, tensors, *, cut=0):
    table, end = {}, 0
    for name in tensors:
        table[name] = {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}
        end += 4
    header = json.dumps({"__metadata__": {}, **table}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(end)
    path.write_bytes(data[: len(data) - cut] if cut >= 0 else data + bytes(-cut))


@pytest.fixture
def model(tmp_path):
    root = tmp_path / "model"
    root.mkdir()
    shard(root / "a.safetensors", ["x", "y"])
    shard(root / "b.safetensors", ["z"])
    (root / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}})
    )
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (root / "config.json").write_text(json.dumps(config))
    for name in checkpoint.COMPANION_FILES:
        (root / name).write_text("{}")
    return root


def test_whole_model(target, model):
    facts = {r.name: take(r, target(model=model)) for r in checkpoint.READINGS}
    assert {name: f.error for name, f in facts.items() if f.error} == {}
    assert facts["model.model_type"].value == "gpt_oss"
    assert facts["model.quant_method"].value == "mxfp4"
    assert (facts["model.shards_missing"].value, facts["model.shards_damaged"].value) == ([], [])
    assert facts["model.files_missing"].value == []
    assert facts["model.weight_bytes"].value == sum(p.stat().st_size for p in model.glob("*.safetensors"))


CUT = "within its header"
MODEL_DAMAGE = {
    "shard gone": (lambda m: (m / "b.safetensors").unlink(), "model.shards_missing", ["b.safetensors"]),
    "cut short": (lambda m: shard(m / "b.safetensors", ["z"], cut=1), "model.shards_damaged", "its header promises"),
    "too long": (lambda m: shard(m / "b.safetensors", ["z"], cut=-1), "model.shards_damaged", "its header promises"),
    "cut in the header": (lambda m: shard(m / "b.safetensors", ["z"], cut=30), "model.shards_damaged", CUT),
    "a web page": (lambda m: (m / "b.safetensors").write_text("<html>" * 9), "model.shards_damaged", CUT),
    "no header": (lambda m: (m / "b.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"), "model.shards_damaged",
                  "has no safetensors header"),
    "other tensors": (lambda m: shard(m / "b.safetensors", ["q"]), "model.shards_damaged", "lacks 1 tensors"),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "model.files_missing", ["tokenizer.json"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MODEL_DAMAGE)
def test_damaged_model(target, model, case):
    damage, name, wanted = MODEL_DAMAGE[case]
    damage(model)
    value = fact(name, target(model=model)).value
    assert value == wanted if isinstance(wanted, list) else wanted in value[0]


def test_a_model_of_a_single_file_or_no_directory(target, model, tmp_path):
    for path in [*model.glob("*.safetensors"), model / "model.safetensors.index.json"]:
        path.unlink()
    assert "neither" in fact("model.shards_missing", target(model=model)).error
    shard(model / "model.safetensors", ["x"])
    assert fact("model.shards_damaged", target(model=model)).value == []

    assert "is not a directory" in fact("model.model_type", target(model=tmp_path / "x")).error
    assert "no model directory" in fact("model.model_type", target()).error
    validated = target(serve_args=("--model", str(tmp_path)))
    assert "config.json" in fact("model.model_type", validated).error
