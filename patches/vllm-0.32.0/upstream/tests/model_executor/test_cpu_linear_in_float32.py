# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Linear layers in bfloat16 on a CPU without instructions for it."""

import pytest
import torch
from torch.nn.functional import linear

from vllm import _custom_ops as ops
from vllm.model_executor.layers import utils

COLUMNS = 96


def make_layer(rows: int, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(rows, COLUMNS, dtype=dtype), False)
    return layer


@pytest.fixture(params=[False, True], ids=["without", "with"])
def has_bfloat16(request, monkeypatch):
    """Whether torch's CPU library multiplies bfloat16. oneDNN is not used."""
    monkeypatch.setattr(ops, "_supports_onednn", False)
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: request.param
    )
    return request.param


@pytest.mark.parametrize("rows", [80, 8192, 20_000])
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_float32(has_bfloat16, rows, shape, with_bias):
    layer = make_layer(rows, torch.bfloat16)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    x = torch.randn(*shape, COLUMNS, dtype=torch.bfloat16)
    bias = torch.randn(rows, dtype=torch.bfloat16) if with_bias else None
    out = utils.cpu_unquantized_gemm(layer, x, layer.weight, bias)
    exact = linear(
        x.double(), layer.weight.double(), None if bias is None else bias.double()
    )
    assert out.dtype == torch.bfloat16 and out.shape == (*shape, rows)
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=2**-5)


def test_only_bfloat16_without_instructions_is_converted(has_bfloat16):
    for dtype in (torch.bfloat16, torch.float32):
        layer = make_layer(80, dtype)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        converts = layer.cpu_linear is getattr(utils, "linear_in_float32", None)
        assert converts == (dtype == torch.bfloat16 and not has_bfloat16)
