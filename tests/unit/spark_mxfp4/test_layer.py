"""The kernels of a layer of few tokens, compiled for a CPU with threads as fibers, called by hopper.py as on a GPU."""

import ctypes
from types import SimpleNamespace

import cpu_kernels
import pytest
import torch

from spark_mxfp4.kernels import hopper
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference
from spark_mxfp4.kernels.hopper import LayerPlan
from spark_mxfp4.kernels.layout import pack

pytestmark = pytest.mark.needs("c++")
BF16 = 0.006


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernels' doors; the array of shared memory is the stand-in's."""
    folder = tmp_path_factory.mktemp("layer")
    sources = ("layer.cuh", "gemm.cuh", "routing.cuh", "rows.cuh")
    return ctypes.CDLL(
        cpu_kernels.shared_library(
            folder, "layer.cpp", *sources, change=lambda text: text.replace("extern __shared__", "extern")
        )
    )


@pytest.fixture
def gpu_on_cpu(library, monkeypatch):
    """Hopper.py with these doors, memory that holds NaN or -1 at first, and a GPU of one multiprocessor."""
    library.spark_error = lambda number: f"{number} threads wait for ever".encode()
    monkeypatch.setattr(hopper, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))
    empty = torch.empty

    def poisoned(*sizes, **options):
        tensor = empty(*sizes, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", poisoned)


def run(weights, x, ids, shares, plan, expert_map=None):
    return hopper.whole_layer(x, pack(weights), ids, shares, expert_map, plan)


@pytest.mark.usefixtures("gpu_on_cpu")
@pytest.mark.parametrize("plan", [LayerPlan(1, 1), LayerPlan(1, 3), LayerPlan(2, 1), LayerPlan(2, 2), LayerPlan(3, 2)])
@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "top_k", "tokens", "routing"),
    [
        (4, 64, 64, 2, 1, "even"), (4, 384, 96, 2, 3, "even"), (3, 96, 480, 3, 2, "uneven"),
        (2, 448, 64, 1, 9, "one"), (40, 32, 32, 8, 5, "even"), (1, 32, 1984, 1, 2, "even"), (8, 32, 64, 4, 9, "even"),
    ],
)  # fmt: skip
def test_a_layer_is_right_however_its_work_is_cut(experts, hidden, intermediate, top_k, tokens, routing, plan):
    torch.manual_seed(hidden + tokens)
    weights = random_weights(experts, hidden, intermediate, "cpu")
    x = torch.randn(tokens, hidden).bfloat16()
    ids, shares = random_routing(tokens, experts, top_k, routing, device="cpu")
    got = run(weights, x, ids, shares, plan)
    assert error(got, reference(x, weights, ids, shares)) < BF16


@pytest.mark.usefixtures("gpu_on_cpu")
@pytest.mark.parametrize("here", [[], [1, 3]])
def test_experts_that_are_elsewhere_count_nothing(here):
    weights = random_weights(4, 64, 96, "cpu")
    x = torch.randn(3, 64).bfloat16()
    ids, shares = random_routing(3, 4, 2, device="cpu")
    expert_map = torch.full((4,), -1, dtype=torch.int32)
    expert_map[here] = torch.tensor(here, dtype=torch.int32)
    got = run(weights, x, ids, shares, LayerPlan(1, 1), expert_map)
    wanted = reference(x, weights, ids, shares, here)
    assert error(got, wanted) < BF16 if here else not got.any()
