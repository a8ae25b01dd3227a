"""The grouped products compiled for a CPU, with fibers for threads, and called by hopper.py as on a GPU."""

import re

import pytest
import torch

import cpu_kernels
from cpu_kernels import BF16, activations
from spark_mxfp4.experts import GPT_OSS, SILU, TopK
from spark_mxfp4.kernels import extension, hopper
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference
from spark_mxfp4.kernels.layout import pack

pytestmark = pytest.mark.needs("c++")
SHAPES = hopper.GROUPED
LARGE = 8  # activations that reach the limits of the activation function with so few columns


def for_fibers(text):
    """Comment out `setmaxnreg`, which the CPU's assembler does not know."""
    return re.sub(r'"(setmaxnreg[^"]*)"', r'"/* \1 */"', text)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grouped")
    return extension.bind(cpu_kernels.shared_library(folder, "grouped.cpp", change=for_fibers), hopper.FUNCTIONS)


@pytest.fixture
def check(library, gpu_on_cpu, claim_gpu):
    """Return a function that compares a random layer, computed with given shapes, with float32.

    The function returns how often warpgroups waited for their turn to store.
    """

    def layer(shapes, sizes, tokens, top_k=1, routing="even", *, processors=1, here=None, activation=GPT_OSS):
        torch.manual_seed(tokens)
        library.count_turns()
        claim_gpu(get_device_properties=cpu_kernels.properties(processors))
        experts, hidden, _ = sizes
        weights, x = random_weights(*sizes, "cpu"), LARGE * activations(tokens, hidden)
        ids, shares = random_routing(tokens, experts, top_k, routing, "cpu")
        expert_map = None
        if here is not None:
            expert_map = torch.full((experts,), -1, dtype=torch.int32)
            expert_map[here] = torch.tensor(here, dtype=torch.int32)
        got = hopper.grouped_layer(x, pack(weights), TopK(ids, shares, expert_map), shapes, activation)
        wanted = reference(x, weights, ids, shares, here, activation)
        assert not got.isnan().any()
        assert error(got, wanted) < BF16 if wanted.any() else not got.any()
        return library.count_turns()

    return layer


def widths(shape):
    """Return a number of tokens for each width of the matrix instruction in `matrix_tokens`."""
    return [tokens for tokens in range(5, SHAPES[shape].tokens + 1, 8) if tokens not in (37, 53)]


# The two products have 6 and 5, 1 and 8, 11 and 1 chunks of 64 columns, and 10 and 6, 16 and 1, 2 and 11 tiles of 64
# rows. Most are no multiples of a stage's or a block's number.
@pytest.mark.parametrize("sizes", [(3, 352, 288), (3, 32, 480), (3, 672, 32)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_every_shape_is_right(check, shape, sizes, tokens):
    check((shape, shape), sizes, tokens, 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_activation_may_be_plain_silu(check, shape):
    check((shape, shape), (3, 352, 288), 7, 2, activation=SILU)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_width_of_the_matrix_instruction_is_right(check, shape):
    for tokens in widths(shape):
        check((shape, shape), (1, 32, 32), tokens)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tiles", "more"), [(1, -1), (1, 0), (1, 1), (2, 0), (2, 3)])
def test_an_experts_tokens_fill_a_tile_or_more(check, shape, tiles, more):
    tokens = tiles * SHAPES[shape].tokens + more
    check((shape, shape), (2, 96, 64), tokens, routing="one", processors=2)


@pytest.mark.parametrize("shapes", [(0, 5), (5, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("processors", [1, 2, 3, 20])
def test_blocks_share_the_tiles_of_shapes_that_differ(check, shapes, processors):
    check(shapes, (5, 192, 96), 33, 3, "uneven", processors=processors)


@pytest.mark.parametrize("here", [[], [1, 3]])
@pytest.mark.parametrize("shape", [1, 3, 5])
def test_experts_on_another_device_add_nothing(check, shape, here):
    check((shape, shape), (4, 64, 96), 30, 2, here=here)


# One block computes more than four tiles, with more chunks than the ring has stages. Of three warpgroups two wait. The
# last tile of each expert has no rows for some warpgroups.
@pytest.mark.parametrize(("sizes", "tiles"), [((6, 448, 96), 12), ((6, 96, 448), 6)])
def test_warpgroups_take_turns_at_storing_many_long_tiles(check, sizes, tiles):
    assert check((5, 5), sizes, 20, 2) == 2 * tiles
    assert check((5, 5), sizes, 20, 2, processors=20) == 0


def test_warpgroups_do_not_wait_if_tiles_fit_the_ring(check):
    assert check((5, 5), (6, 384, 384), 20, 2) == 0


# Warpgroups of four warps multiply; the next warp copies.
@pytest.mark.parametrize(
    ("shape", "warp"),
    [
        (0, 0), (0, 6), (0, 15), (0, 16), (2, 5), (2, 12), (3, 3), (3, 12), (4, 0), (4, 12), (5, 1), (5, 12),
    ],
)  # fmt: skip
def test_no_warp_has_to_keep_up_with_the_others(check, library, shape, warp):
    library.make_slow(0, warp)
    try:
        check((shape, shape), (3, 672, 96), 9, 2)
        check((shape, shape), (5, 32, 672), 9, 2)
        check((shape, shape), (5, 64, 64), 9, 2)
    finally:
        library.make_slow(-1, -1)


@pytest.mark.parametrize("top_k", [2, 3, 5])
def test_many_tokens_are_sorted_by_a_cluster(check, top_k):
    check((5, 5), (5, 32, 32), 1027, top_k)


@pytest.mark.parametrize("shape", [0, 5])
def test_long_rows_are_ordered_and_added_up_by_several_blocks(check, shape):
    check((shape, shape), (2, 2080, 32), 3, 2)
