"""`spark_mxfp4.hf` on a GPU: the tokens of transformers' dequantised path, and the peak of loading the 20b shape.

`TRITON_HUB=FOLDER` also runs a kernels hub with the interface of triton_kernels.

    python -m pytest tests/device/test_hf.py
"""

import os

import pytest
import torch

import packed_checkpoint
from spark_mxfp4 import hf, registry
from spark_mxfp4.experts import ExpertWeights
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference

pytestmark = pytest.mark.device
HUB = os.environ.get("TRITON_HUB")
KERNELS = ["triton", *([f"hub:{HUB}"] if HUB else [])]
SHAPE_20B = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "pad_token_id": 199999, "eos_token_id": 200002,
}  # fmt: skip
PROMPT = [200006, *range(1000, 1100)]


def tokens(model, count=24):
    ids = torch.tensor([PROMPT], device="cuda")
    return model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)[0].tolist()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    packed_checkpoint.write(folder, deviation=0.25, **{**SHAPE_20B, **small, "num_key_value_heads": 2})
    return folder


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_tiny_checkpoint_gives_the_tokens_of_the_dequantised_path(tiny_model, kernel):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    dense = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=Mxfp4Config(dequantize=True))
    dense = dense.to("cuda").eval()
    expected = tokens(dense)
    assert tokens(hf.convert_and_replace(dense, kernel)) == expected
    assert tokens(hf.load_packed(str(tiny_model), kernel, device="cuda")) == expected


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_20b_shape_loads_with_little_more_than_a_layer_above_the_packed_weights(tmp_path, kernel):
    pytest.importorskip("accelerate", reason="without it weights go through the CPU's memory")
    layer = packed_checkpoint.write(tmp_path, device="cuda", **SHAPE_20B)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = hf.load_packed(str(tmp_path), kernel, device="cuda")
    peak, end = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    print(f"20b shape, {kernel}: layer {layer} B, loaded {end} B, peak {peak} B")
    assert peak < end + 1.2 * layer  # 1.06 on an H200: the original layer, and a sixty-fourth of the prepared layer
    assert len(tokens(model)) == len(PROMPT) + 24


@pytest.mark.skipif(not HUB, reason="TRITON_HUB names no kernels hub")
@pytest.mark.parametrize("count", [1, 7, 300])
def test_a_hubs_layer_is_the_reference(count):
    kernel, weights = registry.load(f"hub:{HUB}"), random_weights(32, 2880, 2880)
    x, (ids, shares) = torch.randn(count, 2880, device="cuda").bfloat16(), random_routing(count, 32, 4)
    prepared = kernel.prepare(weights)
    assert error(kernel.run(x, prepared, ids, shares), reference(x, weights, ids, shares)) < 0.006
    restored = kernel.restore(prepared, 2880, 2880)
    assert isinstance(restored, ExpertWeights)
    assert torch.equal(restored.down.weight, weights.down.weight)
