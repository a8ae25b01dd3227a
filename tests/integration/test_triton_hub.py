"""The real triton_kernels, as vLLM's wheel ships it, behind our adapter, as far as a CPU goes.

Its signatures are checked by the adapter itself; its quantiser and Hopper's order of bytes run. Its products are Triton
and need a GPU: here they are replaced by torch, from its own tensors, and its routing by its own torch reference.
"""

import importlib
import sys
import zipfile

import pytest
import torch

from spark_mxfp4 import hf, registry
from spark_mxfp4.experts import ExpertWeights
from spark_mxfp4.hf.experts import PackedExperts
from spark_mxfp4.kernels import triton_hub
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference
from spark_mxfp4.mxfp4 import dequantize, quantize
from sparkforge import pins
from sparkforge.sources import fetch

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    component = pins.load().component("spark", "vllm-wheel")
    [name] = [name for name in component.files if name.endswith("x86_64.whl")]
    target = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(fetch.fetch_pinned(component, name)) as wheel:
        wheel.extractall(target, [m for m in wheel.namelist() if m.startswith("vllm/third_party/triton_kernels/")])
    yield target / "vllm" / "third_party" / "triton_kernels"
    for module in [module for module in sys.modules if module.partition(".")[0] == "triton_kernels"]:
        del sys.modules[module]


@pytest.fixture
def hopper(folder, monkeypatch):
    """The package with Hopper's layout, which it would choose on an H200, and torch in place of its Triton kernels."""
    registry.load(f"hub:{folder}")
    layout, ogs, routing, swiglu, mxfp = (
        importlib.import_module(f"triton_kernels.{name}")
        for name in ("tensor_details.layout", "matmul_ogs", "routing", "swiglu", "numerics_details.mxfp")
    )
    chosen = (layout.HopperMXValueLayout, {"mx_axis": 1})
    monkeypatch.setattr(layout, "make_default_matmul_mxfp4_w_layout", lambda mx_axis: chosen)
    monkeypatch.setattr(routing, "routing", routing.routing_torch)
    histc = torch.histc  # of integers on GPUs only
    monkeypatch.setattr(torch, "histc", lambda values, **bounds: histc(values.float(), **bounds))

    def matmul(  # noqa: PLR0917 (matmul_ogs')
        x, w, bias, data, gather_indx=None, scatter_indx=None, precision_config=None, gammas=None, fused_activation=None
    ):
        packed = w.storage.layout.unswizzle_data(w.storage.data)
        values = mxfp.upcast_from_mxfp_torch(packed, precision_config.weight_scale.storage.data, torch.float32, axis=1)
        assert list(values.shape) == list(w.shape)
        source = torch.arange(len(x)) if gather_indx is None else gather_indx.src_indx // data.n_expts_act
        expert = torch.repeat_interleave(torch.arange(data.n_expts_tot), data.expt_hist)
        output = torch.einsum("pk,pkn->pn", x[source].float(), values[expert]) + bias[expert]
        output = output if gammas is None else output * gammas[:, None]
        if fused_activation is not None:
            assert fused_activation.specs.fn is swiglu.swiglu_fn
            alpha, limit = fused_activation.fn_args
            output = swiglu.swiglu_torch(output, alpha, swiglu.PrecisionConfig(limit))
        if scatter_indx is not None:
            output = output[scatter_indx.src_indx].unflatten(0, (-1, data.n_expts_act)).sum(1)
        return output.to(x.dtype)

    monkeypatch.setattr(ogs, "matmul_ogs", matmul)
    return registry.load(f"hub:{folder}")


def test_the_real_package_has_what_the_adapter_calls(folder):
    assert triton_hub.load(f"hub:{folder}").keys() == triton_hub.REQUIRED.keys()


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (320, 224), (96, 160)])
def test_hoppers_layout_keeps_every_byte(hopper, hidden, intermediate):
    weights = random_weights(3, hidden, intermediate, "cpu")
    prepared = hopper.prepare(weights)
    assert not torch.equal(prepared.gate_up.weight.flatten()[:1000], weights.gate_up.weight.flatten()[:1000])
    for back, original in zip(hopper.restore(prepared, hidden, intermediate), weights, strict=True):
        assert torch.equal(back.weight, original.weight)
        assert torch.equal(back.scales, original.scales)


def test_a_layer_through_its_tensors_and_routing_is_the_reference(hopper):
    weights, x = random_weights(5, 96, 160, "cpu"), torch.randn(23, 96)
    ids, shares = random_routing(23, 5, 3, "uneven", "cpu")
    wide = ExpertWeights(*(p._replace(bias=p.bias.float()) for p in weights))
    assert error(hopper.run(x, hopper.prepare(weights), ids, shares), reference(x, wide, ids, shares)) < 1e-5


def test_its_quantiser_keeps_values_that_mxfp4_holds(hopper):
    x = dequantize(*quantize(torch.randn(7, 96)))
    blocks, scales = hopper.quantize(x)
    assert torch.equal(dequantize(blocks, scales), x)
    rounded = torch.randn(64, 96)
    assert not torch.equal(hopper.quantize(rounded)[1], quantize(rounded)[1])  # its scales are rounded up, ours down


def test_a_model_is_converted_to_it_and_back(hopper, random_model):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = AutoModelForCausalLM.from_pretrained(random_model, quantization_config=Mxfp4Config(dequantize=True)).float()
    ids = torch.tensor([[200006, *range(1000, 1020)]])
    with torch.no_grad():
        expected = model(ids).logits
        hf.convert_and_replace(model, hopper.name)
        assert all(isinstance(layer.mlp.experts, PackedExperts) for layer in model.model.layers)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        hf.convert_and_replace(model, "torch")
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
