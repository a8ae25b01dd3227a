"""`set_experts_implementation("spark_mxfp4")`: switch on and off, update copies, refuse unsupported models."""

import pytest
import torch

from spark_mxfp4 import hf
from spark_mxfp4.hf import implementation as hf_implementation


def test_it_can_be_chosen_and_taken_back(model, answer):
    logits, tokens = answer(model)
    model.set_experts_implementation("spark_mxfp4")
    got, again = answer(model)
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
    assert again == tokens
    assert hf_implementation._COPY in model.model.layers[0].mlp.experts.__dict__  # our implementation ran
    assert not [key for key in model.state_dict() if "spark" in key]
    model.set_experts_implementation("eager")
    torch.testing.assert_close(answer(model)[0], logits, rtol=1e-5, atol=1e-5)


def test_it_equals_the_converted_model_where_rounding_matters(make_model, answer):
    chosen, converted = make_model(exact=False), hf.convert_and_replace(make_model(exact=False))
    chosen.set_experts_implementation("spark_mxfp4")
    torch.testing.assert_close(answer(chosen)[0], answer(converted)[0], rtol=1e-5, atol=1e-5)


def test_changed_weights_are_noticed(model, answer):
    model.set_experts_implementation("spark_mxfp4")
    before = answer(model)[0]
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(0.5)
    changed = answer(model)[0]
    assert not torch.allclose(before, changed)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(answer(model)[0], changed, rtol=1e-4, atol=1e-4)


def test_the_kernel_of_the_environment_is_taken(model, answer, monkeypatch):
    model.set_experts_implementation("spark_mxfp4")
    before = answer(model)[0]
    monkeypatch.setenv("SPARK_MXFP4_KERNEL", "own_kernels:Padded")
    torch.testing.assert_close(answer(model)[0], before, rtol=1e-5, atol=1e-5)
    assert model.model.layers[0].mlp.experts.__dict__[hf_implementation._COPY][1].name == "own_kernels:Padded"


def test_training_is_refused(model, ids):
    model.set_experts_implementation("spark_mxfp4")
    model.train()
    with pytest.raises(NotImplementedError, match=r"cannot train · rounding to MXFP4 has no gradient"):
        model(ids)


def test_another_family_is_refused_by_name():
    from transformers import MixtralConfig, MixtralForCausalLM

    one = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    config = MixtralConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_local_experts=2, **one)
    model = MixtralForCausalLM(config).eval()
    model.set_experts_implementation("spark_mxfp4")
    with torch.no_grad(), pytest.raises(ValueError, match="does not know MixtralExperts"):
        model(torch.tensor([[1, 2]]))
