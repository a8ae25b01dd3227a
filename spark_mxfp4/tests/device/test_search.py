"""Layers of untuned sizes are right before and after the search for shapes, with poisoned memory."""

import pytest
import torch

from spark_mxfp4.kernels import hopper, search, tuning
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference
from spark_mxfp4.kernels.gpu import GpuKernel

pytestmark = pytest.mark.device
BF16 = 0.006
SIZES = [(16, 6144, 2048, 2), (256, 2048, 768, 8), (32, 2880, 2880, 4), (64, 4096, 1536, 6), (8, 4096, 14336, 2)]


@pytest.fixture(autouse=True)
def own_results(search_on):
    if not hopper.HopperKernel.available(torch.device("cuda")):
        pytest.skip("no Hopper GPU, or no nvcc, here")


@pytest.mark.parametrize(("experts", "hidden", "intermediate", "top_k"), SIZES)
def test_a_layer_is_right_before_and_after_its_search_which_is_kept(experts, hidden, intermediate, top_k, monkeypatch):
    kernel, plain = GpuKernel(), random_weights(experts, hidden, intermediate)
    prepared = kernel.prepare(plain)
    assert kernel.variant(prepared) == "hopper"

    def check():
        for tokens in (1, 3, 16, 64, 300, 1024, 4096):
            x = torch.randn(tokens, hidden, device="cuda").bfloat16()
            ids, shares = random_routing(tokens, experts, top_k)
            torch.cuda.empty_cache()
            poison = torch.full((1 << 28,), torch.nan, device="cuda")
            del poison
            got = kernel.run(x, prepared, ids, shares)
            assert error(got, reference(x, plain, ids, shares)) < BF16

    check()
    state = torch.cuda.get_rng_state()
    kernel.tune(prepared)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    adopted = dict(tuning._adopted)
    assert len(adopted) == 1
    check()
    tuning._adopted.clear()
    monkeypatch.setattr(search, "choose", lambda *_: pytest.fail("the kept result was not read"))
    kernel.tune(prepared)
    assert tuning._adopted == adopted


def test_nothing_is_searched_while_a_graph_is_captured():
    kernel = GpuKernel()
    prepared = kernel.prepare(random_weights(8, 352, 288))
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        kernel.tune(prepared)
        x.add_(1)
    assert tuning._adopted == {}
