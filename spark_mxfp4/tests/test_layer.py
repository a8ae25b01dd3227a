"""The kernels that compute a layer for few tokens, compiled for a CPU with fibers as threads; hopper.py calls them."""

import ctypes

import pytest
import torch

import cpu_kernels
from cpu_kernels import BF16, activations
from spark_mxfp4.experts import GPT_OSS, SILU, TopK
from spark_mxfp4.kernels import hopper, tuning
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference
from spark_mxfp4.kernels.hopper import LayerPlan
from spark_mxfp4.kernels.layout import pack

pytestmark = pytest.mark.needs("c++")

# Declarations in a GPU's shared memory, and what replaces them here: one object for each block.
SHARED = {
    "extern __shared__ uint8_t raw[];": "uint8_t* raw = spark::raw + blockIdx.x * BLOCK_BYTES;",
    "__shared__ Few few;": "Few& few = of_block<Few>();",
    "__shared__ Queue queue;": "Queue& queue = of_block<Queue>();",
    "__shared__ uint64_t rows_full[S::STAGES], grid_ready, sorted;": (
        "auto& [rows_full, grid_ready, sorted] = of_block<Barriers>();"
    ),
}


def for_blocks(text):
    for on_gpu, here in SHARED.items() if "whole_layer(" in text else ():
        assert text.count(on_gpu) == 1
        text = text.replace(on_gpu, here)
    return text.replace("extern __shared__", "extern")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer")
    loaded = ctypes.CDLL(cpu_kernels.shared_library(folder, "layer.cpp", change=for_blocks))
    loaded.spark_planes.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return loaded


HOPPER_SHARED, GB10_SHARED = 232_448, 101_376  # bytes that a block can have
PLANS = [
    LayerPlan(1, 1), LayerPlan(1, 3), LayerPlan(2, 1), LayerPlan(2, 2), LayerPlan(3, 2, (3, 1)),
    *(LayerPlan(shape, 2, (1, 1)) for shape in hopper.SMALL_LAYERS),
]  # fmt: skip


def run(weights, x, ids, shares, plan, expert_map=None, activation=GPT_OSS):
    return hopper.whole_layer(x, pack(weights), TopK(ids, shares, expert_map), plan, activation)


@pytest.mark.usefixtures("gpu_on_cpu")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "top_k", "tokens", "routing"),
    [
        (4, 64, 64, 2, 1, "even"), (4, 384, 96, 2, 3, "even"), (3, 96, 480, 3, 2, "uneven"),
        (2, 448, 64, 1, 9, "one"), (40, 32, 32, 8, 5, "even"), (1, 32, 1984, 1, 2, "even"), (8, 32, 64, 4, 9, "even"),
        (3, 64, 64, 3, 9, "even"), (9, 32, 32, 9, 1, "even"),
    ],
)  # fmt: skip
def test_a_layer_is_right_for_every_plan(experts, hidden, intermediate, top_k, tokens, routing, plan):
    torch.manual_seed(hidden + tokens)
    weights = random_weights(experts, hidden, intermediate, "cpu")
    x = activations(tokens, hidden)
    ids, shares = random_routing(tokens, experts, top_k, routing, device="cpu")
    got = run(weights, x, ids, shares, plan)
    assert error(got, reference(x, weights, ids, shares)) < BF16


@pytest.mark.usefixtures("gpu_on_cpu")
def test_plain_silu_without_limits_is_supported():
    weights, x = random_weights(4, 64, 96, "cpu"), activations(5, 64)
    ids, shares = random_routing(5, 4, 2, device="cpu")
    got = run(weights, x, ids, shares, LayerPlan(5, 1), activation=SILU)
    wanted = reference(x, weights, ids, shares, activation=SILU)
    assert error(got, wanted) < BF16 < error(run(weights, x, ids, shares, LayerPlan(5, 1)), wanted)


@pytest.mark.usefixtures("gpu_on_cpu")
@pytest.mark.parametrize("here", [[], [1, 3]])
def test_experts_on_another_device_add_nothing(here):
    weights = random_weights(4, 64, 96, "cpu")
    x = activations(3, 64)
    ids, shares = random_routing(3, 4, 2, device="cpu")
    expert_map = torch.full((4,), -1, dtype=torch.int32)
    expert_map[here] = torch.tensor(here, dtype=torch.int32)
    got = run(weights, x, ids, shares, LayerPlan(1, 1), expert_map)
    wanted = reference(x, weights, ids, shares, here)
    assert error(got, wanted) < BF16 if here else not got.any()


@pytest.mark.usefixtures("gpu_on_cpu")
def test_activations_may_lie_anywhere(monkeypatch):
    addresses, rows = [], hopper._rows
    monkeypatch.setattr(hopper, "_rows", lambda x: addresses.append(x.data_ptr()) or rows(x))
    weights, (ids, shares) = random_weights(4, 64, 96, "cpu"), random_routing(3, 4, 2, device="cpu")
    x = torch.randn(1 + 3 * 64).bfloat16()[1:].view(3, 64)
    assert x.data_ptr() % 16
    got = run(weights, x, ids, shares, LayerPlan(1, 1))
    assert error(got, reference(x, weights, ids, shares)) < BF16
    assert not any(address % 16 for address in addresses)


# In a block with one row per item, eight warps multiply, the ninth copies weights and the tenth activations.
@pytest.mark.usefixtures("gpu_on_cpu")
@pytest.mark.parametrize(
    ("blocks", "block", "warp"), [(1, 0, 0), (1, 0, 9), (3, 0, 9), (3, 1, 9), (3, 1, 8), (3, 2, 0), (4, 0, 4)]
)
@pytest.mark.parametrize(("sizes", "tokens", "parts"), [((1, 64, 64), 3, 2), ((1, 32, 1984), 2, 1)])
def test_no_warp_has_to_keep_up_with_the_others(library, claim_gpu, blocks, block, warp, sizes, tokens, parts):
    claim_gpu(get_device_properties=cpu_kernels.properties(blocks))
    weights, x = random_weights(*sizes, "cpu"), activations(tokens, sizes[1])
    ids, shares = random_routing(tokens, 1, 1, device="cpu")
    library.make_slow(block, warp)
    try:
        got = run(weights, x, ids, shares, LayerPlan(1, parts))
    finally:
        library.make_slow(-1, -1)
    assert error(got, reference(x, weights, ids, shares)) < BF16


@pytest.fixture
def gb10(library, gpu_on_cpu, claim_gpu):
    """A GPU of 48 multiprocessors with 99 KB for a block, and without kernels for single products."""
    properties = cpu_kernels.properties(48, GB10_SHARED)
    claim_gpu(get_device_properties=properties, get_device_capability=(12, 1), get_device_name="NVIDIA GB10")
    library.limit_bytes(GB10_SHARED)
    yield
    library.limit_bytes(HOPPER_SHARED)


@pytest.mark.usefixtures("gb10")
@pytest.mark.parametrize(
    ("sizes", "top_k", "tokens", "shape"),
    [
        ((8, 96, 160), 4, 1, 5), ((8, 32, 64), 4, 2, 5), ((20, 64, 64), 4, 9, 5), ((4, 160, 96), 2, 13, 7),
        ((4, 64, 64), 2, 33, 8), ((1, 96, 64), 1, 18, 8), ((2, 64, 96), 2, 57, 9), ((1, 64, 64), 1, 64, 9),
        ((2, 64, 64), 1, 150, 9), ((3, 32, 32), 2, 601, 9),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bias", [True, False])
def test_within_a_gb10s_limits_every_load_is_right_by_one_launch(monkeypatch, sizes, top_k, tokens, shape, bias):
    plans, plan = [], tuning.plan
    monkeypatch.setattr(tuning, "plan", lambda *load: plans.append(plan(*load)) or plans[-1])
    torch.manual_seed(tokens)
    weights, x = random_weights(*sizes, "cpu", bias=bias), activations(tokens, sizes[1])
    ids, shares = random_routing(tokens, sizes[0], top_k, device="cpu")
    got = hopper.HopperKernel("hopper").run(x, pack(weights), ids, shares)
    assert error(got, reference(x, weights, ids, shares)) < BF16
    assert [chosen["shape"] for chosen in plans] == [shape]


@pytest.mark.usefixtures("gb10")
def test_a_shape_with_too_much_shared_memory_for_a_gb10_is_refused():
    weights, (ids, shares) = random_weights(2, 32, 32, "cpu"), random_routing(1, 2, 1, device="cpu")
    with pytest.raises(RuntimeError, match="could not be started"):
        run(weights, activations(1, 32), ids, shares, LayerPlan(3, 1))


def vectors(x, chunks):
    pairs = [8 * (v // 2) + 2 * (v % 2) + w % 2 * 4 + w // 2 * 32 for v in range(8) for w in range(4)]
    columns = torch.tensor([first + i for first in pairs for i in range(2)])
    padded = torch.zeros(x.shape[0], chunks * 64, dtype=x.dtype)
    padded[:, : x.shape[1]] = x
    return padded.view(x.shape[0], chunks, 64)[..., columns].view(-1, chunks, 8, 8)


@pytest.fixture(params=[(5, 3, 96, ()), (9, 4, 64, (0, 2)), (30, 9, 160, ()), (600, 9, 64, (4,))])
def sorted_pairs(request, gpu_on_cpu):
    """Top-2 pairs of some tokens, sorted by one block, or by two for 600 tokens; some experts are on other devices."""
    tokens, experts, hidden, elsewhere = request.param
    x = activations(tokens, hidden)
    ids, _ = random_routing(tokens, experts, 2, device="cpu")
    here = [expert for expert in range(experts) if expert not in elsewhere]
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(len(here), dtype=torch.int32)
    weights = pack(random_weights(len(here), hidden, 64, "cpu"))
    routed = hopper.Routed(x, weights, ids, expert_map if elsewhere else None, 16, hopper.ROW_MULTIPLE)
    return x, expert_map[ids.flatten().long()], routed, weights.gate_up.weight.shape[2]


def test_pairs_are_sorted_by_expert_and_each_experts_rows_begin_at_a_multiple_of_eight(sorted_pairs):
    x, local, routed, chunks = sorted_pairs
    ordered = torch.empty(len(x), chunks * 64, dtype=x.dtype)
    routed.sort(ordered, chunks)
    assert torch.equal(ordered.view(-1, chunks, 8, 8), vectors(x, chunks))
    assert (routed.row_of_pair[local < 0] == -1).all()
    row, tiles = 0, []
    for expert in range(int(local.max()) + 1):
        pairs = (local == expert).nonzero().flatten()
        rows = range(row, row + len(pairs))
        assert routed.row_of_pair[pairs].tolist() == list(rows)
        assert routed.token_of_row[row : row + len(pairs)].tolist() == (pairs // 2).tolist()
        number = -(-len(pairs) // 16)
        size = -(-len(pairs) // max(number, 1) // 8) * 8
        tiles += [[expert, row + i * size, min(size, len(pairs) - i * size), 0] for i in range(number)]
        row += -(-len(pairs) // 8) * 8
    assert routed.tile_count.item() == len(tiles)
    assert routed.tiles[: len(tiles)].tolist() == tiles


def test_planes_have_each_pairs_activations_in_the_order_of_the_matrix_instruction(sorted_pairs):
    x, _, routed, chunks = sorted_pairs
    planes = routed.planes(chunks)
    routed.sort()
    routed.write_planes(planes, chunks)
    written = planes[: chunks * routed.rows * 64].view(chunks, routed.rows, 8, 8)
    wanted = vectors(x, chunks)
    for pair, row in enumerate(routed.row_of_pair.tolist()):
        for vector in range(8 if row >= 0 else 0):
            assert torch.equal(written[:, row, vector ^ row % 8], wanted[pair // 2, :, vector])
    nobodys = set(range(routed.rows)) - set(routed.row_of_pair.tolist())
    assert all(written[:, row].isnan().all() for row in nobodys)
