"""Convert a transformers model in place: answers, checkpoint names and bytes stay; unsupported models are refused."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from spark_mxfp4 import hf
from spark_mxfp4.hf.experts import PackedExperts
from spark_mxfp4.mxfp4 import dequantize, quantize

NAMES = ("gate_up_proj", "down_proj")


def experts_of(model):
    return [layer.mlp.experts for layer in model.model.layers]


def test_other_weights_are_rounded_to_the_nearest_mxfp4_value(make_model, answer):
    model = make_model(exact=False)
    wanted = {name: [quantize(w.t()) for w in getattr(experts_of(model)[1], name)] for name in NAMES}
    rounded = make_model(exact=False)
    with torch.no_grad():
        for experts in experts_of(rounded):
            for name in NAMES:
                weight = getattr(experts, name)
                weight.copy_(dequantize(*quantize(weight.transpose(1, 2).contiguous())).transpose(1, 2))
    before = answer(model)[0]
    hf.convert_and_replace(model)
    for name in NAMES:
        for expert, (blocks, scales) in enumerate(wanted[name]):
            state = experts_of(model)[1].state_dict()
            assert torch.equal(state[f"{name}_blocks"][expert], blocks)
            assert torch.equal(state[f"{name}_scales"][expert], scales)
    torch.testing.assert_close(answer(model)[0], answer(rounded)[0], rtol=1e-4, atol=1e-4)
    assert (answer(model)[0] - before).abs().max() > 0.01  # rounding changes logits, so equality is not trivial


def test_bfloat16_stays_bfloat16_and_close(make_model, answer):
    model = make_model(dtype=torch.bfloat16)
    logits, _ = answer(model)
    hf.convert_and_replace(model)
    assert model.lm_head.weight.dtype == experts_of(model)[0].gate_up_proj_bias.dtype == torch.bfloat16
    assert (answer(model)[0] - logits).abs().mean() < 0.02 * logits.abs().max()


def test_state_dict_has_the_checkpoints_names_and_fills_another_model(make_model, answer):
    first, second = (hf.convert_and_replace(make_model(seed)) for seed in (1, 2))
    state = first.state_dict()
    prefix = "model.layers.2.mlp.experts."
    assert {key.removeprefix(prefix) for key in state if key.startswith(prefix)} == {
        name + suffix for name in NAMES for suffix in ("_blocks", "_scales", "_bias")
    }
    assert state[f"{prefix}gate_up_proj_blocks"].shape == (5, 192, 2, 16)
    assert state[f"{prefix}down_proj_scales"].shape == (5, 64, 3)
    assert not torch.allclose(answer(first)[0], answer(second)[0])
    assert second.load_state_dict(state) == ([], [])
    assert torch.equal(answer(first)[0], answer(second)[0])


@pytest.mark.parametrize("kernel", ["Padded", "LaidOut"])
def test_own_sizes_and_layout_are_stored_once_and_undone(make_model, answer, kernel):
    plain, other = hf.convert_and_replace(make_model()), hf.convert_and_replace(make_model(), f"own_kernels:{kernel}")
    torch.testing.assert_close(answer(plain)[0], answer(other)[0], rtol=1e-5, atol=1e-5)
    assert experts_of(other)[0].gate_up_proj_blocks.numel() == 0  # not kept twice
    wanted, got = plain.state_dict(), other.state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[key], got[key]) for key in wanted)
    assert other.load_state_dict(wanted) == ([], [])
    assert answer(other)[1] == answer(plain)[1]
    half = other.to(torch.bfloat16)
    blocks = half.state_dict()["model.layers.0.mlp.experts.gate_up_proj_blocks"]
    assert torch.equal(blocks, experts_of(plain)[0].gate_up_proj_blocks)
    assert answer(half)[0].isfinite().all()


def test_a_kernel_tunes_each_layer_as_it_laid_it_out(model, monkeypatch):
    seen = []
    monkeypatch.setattr("spark_mxfp4.kernel.MoeKernel.tune", lambda _, prepared: seen.append(prepared))
    layers = experts_of(hf.convert_and_replace(model, "own_kernels:LaidOut"))
    assert all(prepared is experts.ready() for prepared, experts in zip(seen, layers, strict=True))


def test_converting_again_changes_the_kernel_only(model, answer, monkeypatch):
    _, tokens = answer(hf.convert_and_replace(model))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    monkeypatch.setenv("SPARK_MXFP4_KERNEL", "own_kernels:Padded")
    hf.convert_and_replace(model)
    assert {experts.kernel.name for experts in experts_of(model)} == {"own_kernels:Padded"}
    assert "own_kernels:Padded" in repr(experts_of(model)[0])
    assert answer(model)[1] == tokens
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_an_interrupted_conversion_is_finished_by_the_next(make_model, answer, monkeypatch):
    wanted, model = answer(hf.convert_and_replace(make_model())), make_model()
    calls = []

    def interrupted(dense):
        calls.append(dense)
        if len(calls) > 15:  # within the second layer: 5 experts, two projections
            raise KeyboardInterrupt
        return quantize(dense)

    monkeypatch.setattr("spark_mxfp4.kernel.quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf.convert_and_replace(model)
    assert [isinstance(experts, PackedExperts) for experts in experts_of(model)] == [True, False, False]
    monkeypatch.undo()
    got = answer(hf.convert_and_replace(model))
    assert torch.equal(got[0], wanted[0])


SMALL = {
    "vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1,
}  # fmt: skip


def changed(model, change):
    with torch.no_grad():
        change(model.model.layers)
    return model


def set_nan(layers):
    layers[1].mlp.experts.down_proj[3, 5, 7] = float("nan")


def replace(layers):
    for layer in layers:
        layer.mlp.experts = torch.nn.Identity()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: LlamaForCausalLM(LlamaConfig(**SMALL)), "type 'llama' · it is dense: it has no experts"),
        (lambda _: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2)), "its experts are not gpt-oss'"),
        (lambda _: torch.nn.Linear(2, 2), "type Linear · it is dense"),
        (lambda make: changed(make(), replace), "another library has replaced them"),
        (lambda make: changed(make(), lambda layers: replace(layers[:1])), "experts of 1 of 3 layers are not"),
        (lambda make: make(exact=False, intermediate_size=40), r"0\.mlp\.experts\.down_proj · 40 inputs are no"),
        (lambda make: make(swiglu_limit=5.0), "swiglu_limit 5.0, the kernels know 1.702 and 7.0"),
        (
            lambda make: changed(make(), lambda layers: layers[2].mlp.experts.to("meta")),
            r"layers\.2\.mlp\.experts · its weights are offloaded",
        ),
        (lambda make: changed(make(), set_nan), r"layers\.1\.mlp\.experts\.down_proj · expert 3 holds NaN or infinity"),
    ],
)
def test_other_models_and_weights_are_refused_by_name(make_model, make, message):
    model = make(make_model)
    with pytest.raises(ValueError, match=message):
        hf.convert_and_replace(model)
    if "NaN" not in message:  # noticed before anything is changed
        assert not any(isinstance(module, PackedExperts) for module in model.modules())


def test_an_unknown_kernel_is_refused_before_anything_is_changed(model):
    with pytest.raises(ValueError, match="there is no kernel 'tritn'"):
        hf.convert_and_replace(model, "tritn")
    assert not isinstance(experts_of(model)[0], PackedExperts)


def test_torch_compile_sees_one_operator_a_layer(model, ids):
    hf.convert_and_replace(model)
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 7, 64)
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(mlp, backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x)[0], mlp(x)[0])
    assert sum("spark_mxfp4" in name for name in seen) == 1


def test_progress_is_shown_layer_by_layer_and_can_be_turned_off(make_model, capfd):
    from transformers.utils import logging

    hf.convert_and_replace(make_model())
    assert "MXFP4 experts: 100%" in capfd.readouterr().err
    logging.disable_progress_bar()
    try:
        hf.convert_and_replace(make_model())
    finally:
        logging.enable_progress_bar()
    assert capfd.readouterr().err == ""
