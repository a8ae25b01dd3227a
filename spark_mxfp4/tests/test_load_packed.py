"""Load a packed checkpoint: loading and saving keep its bytes; other checkpoints are refused with a reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spark_mxfp4 import hf

EXPERTS = ("_blocks", "_scales")


@pytest.fixture
def checkpoint(make_model, tmp_path):
    hf.convert_and_replace(make_model()).save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


def on_disk(folder):
    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


def test_the_checkpoints_bytes_arrive_unchanged_and_are_saved_unchanged(checkpoint, tmp_path):
    stored = on_disk(checkpoint)
    packed = {key for key in stored if key.endswith(EXPERTS)}
    assert len(packed) == 3 * 4
    # Bytes that conversion to floats would change: all elements -0, and the smallest and largest scales.
    for key in packed:
        stored[key] = torch.full_like(stored[key], 0x88 if key.endswith("_blocks") else 254)
        stored[key].view(-1)[::3] = 0
    save_file(stored, checkpoint / "model.safetensors", metadata={"format": "pt"})
    loaded = hf.load_packed(str(checkpoint))
    state = loaded.state_dict()
    assert all(torch.equal(state[key], stored[key]) for key in packed)
    loaded.save_pretrained(tmp_path / "again")
    again = on_disk(tmp_path / "again")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[key], stored[key]) for key in stored)


def test_a_saved_checkpoint_is_stock_mxfp4_to_transformers_itself(checkpoint, make_model, answer):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    assert json.loads((checkpoint / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    hf.load_packed(str(checkpoint)).save_pretrained(checkpoint.with_name("again"))
    stock = AutoModelForCausalLM.from_pretrained(
        checkpoint.with_name("again"), quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    torch.testing.assert_close(answer(stock.float())[0], answer(make_model())[0], rtol=1e-4, atol=1e-4)


def test_dtype_and_kernel_are_taken(checkpoint, answer):
    loaded = hf.load_packed(str(checkpoint), "own_kernels:Padded", device="cpu", dtype=torch.bfloat16)
    experts = loaded.model.layers[1].mlp.experts
    assert experts.kernel.name == "own_kernels:Padded"
    assert experts.down_proj_bias.dtype == loaded.lm_head.weight.dtype == torch.bfloat16
    assert answer(loaded)[0].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "it is a model of type 'llama', not 'gpt_oss'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its quant_method is 'fp8', not 'mxfp4'"),
        ({"quantization_config": None}, "it is not quantized, not 'mxfp4' · load it by transformers and use convert"),
        ({"swiglu_limit": 3.0}, "swiglu_limit 3.0"),
    ],
)
def test_other_checkpoints_are_refused_by_name(checkpoint, changes, message):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        hf.load_packed(str(checkpoint))


def test_an_incomplete_checkpoint_is_refused_and_a_wrong_kernel_before_the_weights_are_read(checkpoint):
    stored = on_disk(checkpoint)
    scales = stored.pop(name := "model.layers.1.mlp.experts.down_proj_scales")
    for parts, message in (
        ({}, f"1 of its weights are wrong, first: {name} is missing"),
        ({name: scales[:, :8].contiguous()}, r"is torch\.uint8 \(5, 8, 3\) instead of torch\.uint8 \(5, 64, 3\)"),
    ):
        save_file(stored | parts, checkpoint / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            hf.load_packed(str(checkpoint))
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="there is no kernel 'tritn'"):
        hf.load_packed(str(checkpoint), "tritn")
