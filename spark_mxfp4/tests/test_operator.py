"""The operator in the graphs of torch.compile and vLLM: it is registered correctly and returns the kernel's result."""

import pytest
import torch

from spark_mxfp4 import operator, registry
from spark_mxfp4.experts import GPT_OSS, SILU, ExpertWeights, Projection, TopK, moe
from spark_mxfp4.mxfp4 import quantize

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 64, 32, 2


def projection(rows, columns):
    blocks, scales = quantize(torch.randn(EXPERTS, rows, columns))
    return Projection(blocks.flatten(-2), scales, torch.randn(EXPERTS, rows))


@pytest.fixture
def arguments():
    torch.manual_seed(4)
    weights = ExpertWeights(projection(2 * INTERMEDIATE, HIDDEN), projection(HIDDEN, INTERMEDIATE))
    shares, ids = torch.topk(torch.rand(9, EXPERTS), TOP_K)
    return torch.randn(9, HIDDEN), weights, ids, shares


@pytest.mark.parametrize("mapped", [False, True])
def test_opcheck_accepts_the_operator(arguments, mapped):
    x, weights, ids, shares = arguments
    expert_map = torch.tensor([-1, 0, 1, -1, 2, 3], dtype=torch.int32) if mapped else None
    torch.library.opcheck(
        operator.moe_operator, (x, *weights.gate_up, *weights.down, ids, shares, expert_map, [*GPT_OSS], "torch")
    )


def test_traced_with_any_number_of_tokens_it_equals_the_kernel(arguments):
    x, weights, ids, shares = arguments
    kernel = registry.load("torch")
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def layer(x, ids, shares):
        return 2 * operator.run(kernel, x, weights, TopK(ids, shares))

    for tokens in (9, 5, 7, 6):  # sizes that no other axis has
        part = [tensor[:tokens].clone() for tensor in (x, ids, shares)]
        torch.testing.assert_close(layer(*part), 2 * moe(part[0], weights, *part[1:]))
    assert len(graphs) == 1


def test_a_profile_shows_the_operator_without_torch_compile(arguments):
    x, weights, ids, shares = arguments
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        operator.run(registry.load("torch"), x, weights, TopK(ids, shares))
    assert "spark_mxfp4::moe" in {event.name for event in profile.events()}


def test_another_activation_reaches_the_kernel_traced_or_not(arguments):
    x, weights, ids, shares = arguments
    kernel = registry.load("torch")

    def layer(x):
        return operator.run(kernel, x, weights, TopK(ids, shares), SILU)

    wanted = moe(x, weights, ids, shares, None, SILU)
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), wanted)


def test_dense_weights_are_taken_and_a_kernel_that_returns_its_input_is_copied(arguments):
    x, weights, ids, shares = arguments
    dense = ExpertWeights(*(Projection(torch.randn(EXPERTS, n, k)) for n, k in ((64, 64), (64, 32))))
    got = operator.moe_operator(x, *dense.gate_up, *dense.down, ids, shares, None, [*GPT_OSS], "torch")
    assert torch.equal(got, moe(x, dense, ids, shares))
    got = operator.moe_operator(x, *weights.gate_up, *weights.down, ids, shares, None, [*GPT_OSS], "own_kernels:plain")
    assert torch.equal(got, x)
    assert got.data_ptr() != x.data_ptr()
