"""The real triton_kernels, as vLLM's wheel ships it, behind our adapter, as far as possible on a CPU.

The adapter checks the signatures; the quantiser and Hopper's layout run. The products are Triton kernels, which need a
GPU; spark_mxfp4/tests/test_triton_hub.py has a stand-in for them.
"""

import importlib
import sys
import zipfile

import pytest
import torch

from spark_mxfp4 import registry
from spark_mxfp4.kernels import triton_hub
from spark_mxfp4.kernels.check import random_weights
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
    """The package with Hopper's layout, as on an H200."""
    registry.load(f"hub:{folder}")
    layout = importlib.import_module("triton_kernels.tensor_details.layout")
    chosen = (layout.HopperMXValueLayout, {"mx_axis": 1})
    monkeypatch.setattr(layout, "make_default_matmul_mxfp4_w_layout", lambda mx_axis: chosen)
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


def test_its_quantiser_keeps_values_that_mxfp4_holds(hopper):
    x = dequantize(*quantize(torch.randn(7, 96)))
    blocks, scales = hopper.quantize(x)
    assert torch.equal(dequantize(blocks, scales), x)
    rounded = torch.randn(64, 96)
    assert not torch.equal(hopper.quantize(rounded)[1], quantize(rounded)[1])  # the hub rounds scales up, we round down
