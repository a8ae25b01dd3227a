"""The GPU kernels against float32 on fresh random layers, with outputs poisoned, in graphs, and repeated."""

import math

import pytest
import torch

from gpu import captured
from spark_mxfp4.experts import GPT_OSS, SILU, ExpertWeights, TopK
from spark_mxfp4.kernels import fused, hopper
from spark_mxfp4.kernels.check import (
    EDGES,
    MODELS,
    OTHERS,
    ROUTINGS,
    error,
    poisoned,
    random_routing,
    random_weights,
    reference,
)
from spark_mxfp4.kernels.gpu import GpuKernel
from spark_mxfp4.kernels.hopper import HopperKernel, LayerPlan, grouped_layer, whole_layer
from spark_mxfp4.kernels.mxfp8 import quantize_rows
from spark_mxfp4.mxfp4 import quantize_mxfp8

pytestmark = pytest.mark.device
BF16, W4A8 = 0.006, 0.1  # largest errors: bf16 between the products; E4M3 activations with three bits of mantissa
TILES = {"triton bf16": fused.Tiles(64, 16, 64, 4, 3), "triton W4A8": fused.Tiles(128, 64, 128, 4, 2, scaled=True)}
HOPPER, GPU = HopperKernel("hopper"), GpuKernel()
LIMITS = {"hopper": BF16, "triton bf16": BF16, "triton W4A8": W4A8}


def layer(experts, hidden, intermediate, tokens, top_k, routing="even", *, bias=True):
    """Return a random layer's weights, activations and routing."""
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    return random_weights(experts, hidden, intermediate, bias=bias), x, *random_routing(tokens, experts, top_k, routing)


def run(kernel, x, weights, ids, shares, expert_map=None, activation=GPT_OSS):
    if kernel in TILES:
        return poisoned(fused.tiled, x, weights, TopK(ids, shares, expert_map), activation, TILES[kernel])
    return poisoned(HOPPER.run, x, HOPPER.prepare(weights), ids, shares, expert_map, activation)


@pytest.fixture(params=LIMITS)
def kernel(request):
    if request.param == "hopper" and not HOPPER.available(torch.device("cuda")):
        pytest.skip("no Hopper GPU, or no nvcc, here")
    return request.param


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 16, 33, 64, 100, 257, 1000, 2048])
def test_layer_is_right_for_every_routing_and_repeats_to_the_bit(kernel, tokens, routing):
    weights, x, ids, shares = layer(16, 320, 224, tokens, 5, routing)
    got = run(kernel, x, weights, ids, shares)
    assert error(got, reference(x, weights, ids, shares)) < LIMITS[kernel]
    for _ in range(3):
        assert torch.equal(got, run(kernel, x, weights, ids, shares))


@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), [*EDGES, *MODELS.values()])
@pytest.mark.parametrize("tokens", [1, 50, 600])
def test_layer_is_right_for_every_size(kernel, experts, top_k, hidden, intermediate, tokens):
    weights, x, ids, shares = layer(experts, hidden, intermediate, tokens, top_k, bias=experts != 8)
    got = run(kernel, x, weights, ids.long() if tokens == 50 else ids, shares)
    assert error(got, reference(x, weights, ids, shares)) < LIMITS[kernel]


@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), OTHERS.values())
@pytest.mark.parametrize("tokens", [1, 9, 64, 600])
def test_layer_of_another_family_is_right(kernel, experts, top_k, hidden, intermediate, tokens):
    weights, x, ids, shares = layer(experts, hidden, intermediate, tokens, top_k, bias=False)
    got = run(kernel, x, weights, ids, shares, activation=SILU)
    assert error(got, reference(x, weights, ids, shares, activation=SILU)) < LIMITS[kernel]


@pytest.mark.parametrize("tokens", [1024, 4096, 8192])
def test_gpt_oss_120b_prefill_is_right(kernel, tokens):
    weights, x, ids, shares = layer(128, 2880, 2880, tokens, 4, "uneven")
    got = run(kernel, x, weights, ids, shares)
    assert error(got, reference(x, weights, ids, shares)) < LIMITS[kernel]


@pytest.fixture
def on_hopper():
    if not HOPPER.available(torch.device("cuda")):
        pytest.skip("no Hopper GPU, or no nvcc, here")


@pytest.mark.parametrize("shape", hopper.GROUPED)
@pytest.mark.parametrize("tokens", [1, 8, 65, 400, 3000])
def test_every_hopper_shape_is_right(on_hopper, shape, tokens):
    weights, x, ids, shares = layer(8, 352, 288, tokens, 4, "uneven")
    got = poisoned(grouped_layer, x, HOPPER.prepare(weights), TopK(ids, shares), (shape, shape))
    assert error(got, reference(x, weights, ids, shares)) < BF16


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 33, 200])
@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), [*EDGES, MODELS["gpt-oss-20b"]])
def test_one_launch_is_right_for_every_plan(on_hopper, experts, top_k, hidden, intermediate, tokens, routing):
    weights, x, ids, shares = layer(experts, hidden, intermediate, tokens, top_k, routing)
    prepared = HOPPER.prepare(weights)
    wanted = reference(x, weights, ids, shares)
    for shape in hopper.LAYERS:
        for parts in (1, 2, 5):
            call = (whole_layer, x, prepared, TopK(ids, shares), LayerPlan(shape, parts, processors=shape > 3 and 48))
            got = poisoned(*call)
            assert error(got, wanted) < BF16
            assert torch.equal(got, poisoned(*call))


def test_one_launch_beside_another_on_a_second_stream(on_hopper):
    layers = [random_weights(16, 2880, 2880) for _ in range(2)]
    prepared = [HOPPER.prepare(weights) for weights in layers]
    x = torch.randn(4, 2880, device="cuda").bfloat16()
    routes = [random_routing(4, 16, 4) for _ in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    got = [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(whole_layer(x, prepared[i], TopK(*routes[i])))
    torch.cuda.synchronize()
    for i, weights in enumerate(layers):
        wanted = reference(x, weights, *routes[i])
        assert all(error(result, wanted) < BF16 for result in got[i])
        assert all(torch.equal(result, got[i][0]) for result in got[i])


def test_half_of_the_experts_on_each_of_two_devices_adds_up(kernel):
    weights, x, ids, shares = layer(10, 128, 96, 77, 3)
    for local in ([0, 2, 4, 6, 8], [9, 7, 5, 3, 1]):
        expert_map = torch.full((10,), -1, dtype=torch.int32, device="cuda")
        expert_map[local] = torch.arange(5, dtype=torch.int32, device="cuda")
        local_weights = ExpertWeights(*(type(p)(*(tensor[local].contiguous() for tensor in p)) for p in weights))
        got = run(kernel, x, local_weights, ids, shares, expert_map)
        assert error(got, reference(x, weights, ids, shares, local)) < LIMITS[kernel]


@pytest.mark.parametrize("tokens", [1, 8, 9, 300])
def test_without_local_experts_the_output_is_zero(kernel, tokens):
    weights, x, ids, shares = layer(4, 128, 96, tokens, 4)
    nowhere = torch.full((4,), -1, dtype=torch.int32, device="cuda")
    assert not run(kernel, x, weights, ids, shares, nowhere).any()


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_graph_follows_new_inputs_and_routings(kernel, tokens):
    weights = random_weights(16, 320, 224)
    prepared = HOPPER.prepare(weights) if kernel == "hopper" else weights
    x = torch.randn(tokens, 320, device="cuda").bfloat16()
    ids, shares = random_routing(tokens, 16, 4)

    def layer():
        if kernel == "hopper":
            return HOPPER.run(x, prepared, ids, shares)
        return fused.tiled(x, prepared, TopK(ids, shares), tiles=TILES[kernel])

    graph, got = captured(layer)
    for routing in ("even", "one", "uneven"):
        x.copy_(torch.randn_like(x))
        for old, new in zip((ids, shares), random_routing(tokens, 16, 4, routing), strict=True):
            old.copy_(new)
        got.fill_(torch.nan)
        graph.replay()
        assert error(got, reference(x, weights, ids, shares)) < LIMITS[kernel]


@pytest.mark.parametrize("scale", [0, 1, 128, 129, 254])
def test_extreme_scales_are_exact(scale):
    weights = random_weights(4, 64, 64, bias=False)
    weights.gate_up.scales[:, ::2] = scale  # the gates, which the activation limits to 7
    weights.gate_up.weight[:, ::2] = 0x11  # 0.5, so that nothing overflows before that
    x = torch.rand(9, 64, device="cuda").bfloat16() * (2.0**100 if scale < 2 else 1 / 64)  # ups exceed their limit
    ids, shares = random_routing(9, 4, 2)
    got = GPU.run(x, GPU.prepare(weights), ids, shares)
    wanted = reference(x, weights, ids, shares)
    assert torch.isfinite(wanted).all()
    assert error(got, wanted) < BF16


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_with_their_token(kernel, value):
    weights = random_weights(4, 64, 64)
    x = torch.randn(40, 64, device="cuda").bfloat16()
    x[3, 5] = value
    ids, shares = random_routing(40, 4, 2)
    got = run(kernel, x, weights, ids, shares)
    others = torch.arange(40, device="cuda") != 3
    assert error(got[others], reference(x, weights, ids, shares)[others]) < LIMITS[kernel]
    if math.isnan(value):
        assert got[3].isnan().all()


def test_scale_255_makes_the_output_nan():
    weights = random_weights(2, 64, 64)
    weights.down.scales[1, 7, 0] = 255
    x = torch.randn(5, 64, device="cuda").bfloat16()
    ids = torch.tensor([[0], [1], [0], [1], [0]], dtype=torch.int32, device="cuda")
    got = GPU.run(x, GPU.prepare(weights), ids, torch.ones(5, 1, device="cuda"))
    assert got[[1, 3], 7].isnan().all()
    assert got.isnan().sum() == 2


def test_prepare_and_restore_give_back_every_byte():
    weights = random_weights(3, 2880, 96)
    for got, wanted in zip(GPU.restore(GPU.prepare(weights), 2880, 96), weights, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_quantise_to_the_reference_bits(dtype):
    x = torch.cat([torch.randn(512, 320) * 10.0 ** torch.randint(-37, 37, (512, 1)), torch.randn(512, 320)]).to(dtype)
    x[0, 0], x[1, 40], x[2] = torch.inf, torch.nan, 0
    x[3] = 2.0**-130
    elements, scales = quantize_mxfp8(x)
    got, got_scales = quantize_rows(x.cuda())
    assert torch.equal(got_scales.cpu(), scales)
    assert torch.equal(got.view(torch.uint8).cpu(), elements.view(torch.uint8))
