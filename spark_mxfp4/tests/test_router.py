"""The router's kernels compiled for a CPU, with fibers for threads, against torch; and the choice of variants."""

import ctypes

import pytest
import torch

import cpu_kernels
from spark_mxfp4.kernels import router
from spark_mxfp4.kernels.router import CLUSTERS, TICKETS, Routes, choose, fits, reference, variants

pytestmark = pytest.mark.needs("c++")
HOST_SLICES = 32  # more than any variant has


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    loaded = ctypes.CDLL(cpu_kernels.shared_library(folder, "router.cpp"))
    loaded.route_on_cpu.argtypes = (ctypes.c_void_p, ctypes.c_int)
    return loaded


def run(library, x, weight, bias, top_k, variant, padding=None):
    """Return the routes of one launch into poisoned memory; check that no thread hangs and the ticket is 0 again."""
    tokens, experts = x.shape[0], weight.shape[0]
    table = torch.full((2, tokens, top_k), torch.nan)
    parts, ticket = torch.full((HOST_SLICES, tokens, experts), torch.nan), torch.zeros(1, dtype=torch.int32)
    pointers = (weight, bias, x, padding, table[0], table[1], parts, ticket)
    job = router.Router(
        *(None if tensor is None else tensor.data_ptr() for tensor in pointers),
        tokens, *weight.shape, top_k, x.stride(0),
    )  # fmt: skip
    assert library.route_on_cpu(ctypes.byref(job), variant) == 0
    assert ticket.item() == 0
    return Routes.of(table)


def layer(experts, columns, tokens, scale=0.03):
    generator = torch.Generator().manual_seed(experts + columns + tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return normal(tokens, columns).bfloat16(), (normal(experts, columns) * scale).bfloat16(), normal(experts).bfloat16()


def same(routes, expected):
    return torch.equal(routes.ids, expected.ids) and torch.allclose(routes.shares, expected.shares, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("experts", "columns", "tokens", "top_k", "variant"),
    [
        (128, 2880, 1, 4, 0), (128, 2880, 16, 4, 0), (128, 2880, 9, 4, 1), (128, 2880, 8, 4, 4), (128, 2880, 3, 4, 6),
        (32, 72, 11, 4, 0), (20, 128, 13, 8, 0), (250, 1000, 5, 8, 1), (100, 6144, 11, 5, 2), (6, 8, 2, 6, 3),
        (32, 2880, 16, 4, 5),
    ],
)  # fmt: skip
def test_routes_are_those_of_torch(library, experts, columns, tokens, top_k, variant):
    x, weight, bias = layer(experts, columns, tokens)
    assert same(run(library, x, weight, bias, top_k, variant), reference(x, weight, bias, top_k))


@pytest.mark.parametrize("variant", [0, 1, 4])
def test_the_lowest_of_equal_experts_wins(library, variant):
    x, weight, _ = layer(64, 96, 5)
    weight[:] = weight[0]
    bias = (torch.arange(64) * 7 % 3).bfloat16()
    routes = run(library, x, weight, bias, 4, variant)
    assert routes.ids[0].tolist() == [2, 5, 8, 11]  # 7 e % 3 = 2
    assert same(routes, reference(x, weight, bias, 4))


@pytest.mark.parametrize("variant", [0, 4])
def test_padding_and_nan_are_routed_as_vllm_does(library, variant):
    x, weight, _ = layer(32, 96, 4)
    x[1, 5] = torch.nan
    routes = run(library, x, weight, None, 4, variant, torch.tensor([False, False, True, False]))
    assert routes.ids[1:3].tolist() == [[0, 1, 2, 3], [-1] * 4]
    assert not routes.shares[1:3].any()
    expected = reference(x, weight, None, 4)
    assert torch.equal(routes.ids[[0, 3]], expected.ids[[0, 3]])


def test_a_table_holds_experts_and_shares():
    routes = choose(torch.tensor([[1.0, 3.0, 2.0, 3.0]]).bfloat16(), 2)
    assert routes.ids.tolist() == [[1, 3]]
    assert routes.shares.tolist() == [[0.5, 0.5]]
    table = torch.stack([routes.shares, routes.ids.view(torch.float32)])
    assert all(map(torch.equal, Routes.of(table), routes))


def test_variants_fit_the_size_and_the_gpu():
    tickets = tuple(TICKETS)
    sizes = {(128, 2880, 9): (0, 1, 2), (128, 2880, 12): (1,), (256, 2880, 9): (1,), (32, 6144, 12): (2,),
             (128, 8192, 9): ()}  # fmt: skip
    assert {size: variants(*size) for size in sizes} == {size: (*own, *tickets) for size, own in sizes.items()}
    assert set(CLUSTERS).isdisjoint(TICKETS)
    assert (router.slices(3, 2880), router.slices(6, 2880)) == (8, 1)


def test_unsupported_sizes_and_devices_are_refused():
    x, weight, bias = layer(32, 96, 2)
    assert not fits(2, weight, 4)  # not on a GPU
    with pytest.raises(ValueError, match=r"use torch\.nn\.functional\.linear"):
        router.route(x, weight, bias, 4)
    with pytest.raises(ValueError, match="not bfloat16"):
        router.route(x.float(), weight, bias, 4)
