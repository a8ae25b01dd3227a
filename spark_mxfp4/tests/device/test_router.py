"""The router's kernels against float32 on fresh random routers, with outputs poisoned, in graphs, and repeated."""

import pytest
import torch

from gpu import captured
from spark_mxfp4.kernels import router
from spark_mxfp4.kernels.check import poisoned
from spark_mxfp4.kernels.router import CLUSTERS, TICKETS, Routes, reference

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("compiled_kernels")]
VARIANTS = (*CLUSTERS, *TICKETS)


def layer(experts, columns, tokens):
    """Return weights with whole-number products, so that the order of sums changes no logit and ties are frequent."""
    x, weight = (
        torch.randint(-2, 3, shape, device="cuda").bfloat16() for shape in ((tokens, columns), (experts, columns))
    )
    return x, weight / 64, torch.randint(-3, 4, (experts,), device="cuda").bfloat16() / 4


def possible(variant, experts, columns):
    return variant in router.variants(experts, columns, torch.cuda.get_device_capability()[0])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("experts", "columns", "top_k"), [(128, 2880, 4), (32, 2880, 4), (100, 1000, 8), (256, 2048, 8)]
)
def test_routes_are_those_of_torch_and_repeat_to_the_bit(variant, experts, columns, top_k):
    if not possible(variant, experts, columns):
        pytest.skip("the variant does not take this size")
    for tokens in range(1, 17):
        x, weight, bias = layer(experts, columns, tokens)
        padding = torch.arange(tokens, device="cuda") % 4 == 3
        expected = reference(x, weight, bias, top_k, padding)
        for _ in range(3):
            routes = Routes.of(poisoned(router.route, x, weight, bias, top_k, padding, variant))
            assert torch.equal(routes.ids, expected.ids)
            torch.testing.assert_close(routes.shares, expected.shares, rtol=1e-5, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cuda_graph_holds_many_routers(variant):
    if not possible(variant, 128, 2880):
        pytest.skip("the variant does not take this size")
    layers = [layer(128, 2880, 4) for _ in range(20)]
    graph, tables = captured(lambda: [router.route(*one, 4, None, variant) for one in layers])
    for _ in range(5):
        for table in tables:
            table.fill_(torch.nan)
        graph.replay()
        for table, one in zip(tables, layers, strict=True):
            assert torch.equal(Routes.of(table).ids, reference(*one, 4).ids)
