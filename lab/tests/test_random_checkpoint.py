"""The checkpoint of random weights, read back."""

import json

import numpy as np
import pytest

from lab.served import dummy, random_checkpoint


@pytest.fixture
def small(monkeypatch):
    """Sizes of a small model in place of gpt-oss-20b's."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {**small, "num_hidden_layers": 4, "num_local_experts": 3, "vocab_size": 500}
    monkeypatch.setattr(dummy, "SIZES", {"20b": sizes})


def read(folder):
    """Return the file's tensors as numpy has them."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    types = {"U8": np.uint8, "BF16": np.uint16}
    read = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        begin, end = entry["data_offsets"]
        read[name] = np.frombuffer(data[8 + size + begin : 8 + size + end], types[entry["dtype"]]).reshape(
            entry["shape"]
        )
    return read, data


@pytest.mark.usefixtures("small")
def test_a_random_checkpoint_has_the_models_tensors_no_two_weights_equal(tmp_path):
    for name in random_checkpoint.TOKENIZER:
        (tmp_path / name).write_text("{}")
    folder = random_checkpoint.write_checkpoint(tmp_path / "out", "20b", 2, tokenizer=tmp_path)
    tensors, data = read(folder)
    assert len(data) >= sum(tensor.nbytes for tensor in tensors.values())
    assert tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"].shape == (3, 192, 2, 16)
    scales = [tensor for name, tensor in tensors.items() if name.endswith("_scales")]
    low, high = random_checkpoint.SCALES
    assert all(low <= tensor.min() <= tensor.max() < high for tensor in scales)
    weights = [tensor.tobytes() for name, tensor in tensors.items() if tensor.ndim > 1 and "bias" not in name]
    assert len(set(weights)) == len(weights)
    values = (tensors["lm_head.weight"].astype(np.uint32) << 16).view(np.float32)
    assert values.std() == pytest.approx(random_checkpoint.DEVIATIONS["dense"], rel=0.05)
    assert "model.layers.2.mlp.router.weight" not in tensors
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.usefixtures("small")
def test_a_hole_is_as_long_as_the_weights(tmp_path):
    for name in random_checkpoint.TOKENIZER:
        (tmp_path / name).write_text("{}")
    lengths = []
    for hole in (False, True):
        folder = random_checkpoint.write_checkpoint(tmp_path / str(hole), "20b", tokenizer=tmp_path, hole=hole)
        lengths.append((folder / "model.safetensors").stat().st_size)
    assert lengths[0] == lengths[1]
    assert not any(read(folder)[1][-lengths[0] // 2 :])


def test_the_sizes_are_those_of_gpt_oss_120b():
    total = sum(tensor.size for _, tensor in random_checkpoint.tensors(dummy.config("120b")))
    assert 65.2e9 < total < 65.3e9


@pytest.mark.parametrize("arguments", [["--size", "7b"], ["--layers", "3"], ["--layers", "38"]])
def test_a_model_that_there_is_not_is_refused(tmp_path, arguments, capsys):
    assert random_checkpoint.main(["--output", str(tmp_path), *arguments]) == 2
    assert "there is no" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("out", "arguments", "problem"),
    [
        ("/proc/nowhere", [], "cannot write /proc/nowhere/model.safetensors"),
        ("here", ["--tokenizer", "/nonexistent"], "/nonexistent/chat_template.jinja"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_one_clear_error(tmp_path, out, arguments, problem, capsys):
    assert random_checkpoint.main(["--output", str(tmp_path / out), "--size", "20b", *arguments]) != 0
    assert problem in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "here").exists()
