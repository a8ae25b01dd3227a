"""gpt-oss-120b's experts split over two GPUs: each part against float32, and NCCL's sum against one GPU's output."""

import os

import pytest
import torch
from torch.cuda import nccl

from measure_shards import GPUS, NO_MULTICAST, SPLITS, shard
from spark_mxfp4.experts import ExpertWeights, Projection
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference
from spark_mxfp4.kernels.gpu import GpuKernel

pytestmark = pytest.mark.device
os.environ.update(NO_MULTICAST)
EXPERTS, SIZE, TOP_K = 128, 2880, 4
BF16, SUMMED = 0.006, 0.01  # of one part; of two parts, each rounded to bf16, and their sum rounded again


def on(device, weights):
    return ExpertWeights(*(Projection(*(tensor.to(device) for tensor in p)) for p in weights))


def run(device, weights, x, ids, shares, expert_map):
    with torch.cuda.device(device):
        kernel = GpuKernel()
        prepared = kernel.prepare(weights)
        poison = [torch.full((1 << 24,), torch.nan, device=device) for _ in range(4)]
        del poison
        return kernel.run(x, prepared, ids, shares, expert_map)


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return random_weights(EXPERTS, SIZE, SIZE, "cpu")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 1024])
def test_each_part_is_right_on_each_gpu_and_nccls_sum_is_one_gpus_output(weights, split, tokens):
    devices = [torch.device("cuda", index) for index in range(min(GPUS, torch.cuda.device_count()))]
    x = torch.randn(tokens, SIZE).bfloat16()
    ids, shares = random_routing(tokens, EXPERTS, TOP_K, "uneven", "cpu")
    outputs = []
    for rank in range(GPUS):
        device = devices[rank % len(devices)]
        own, expert_map = shard(weights, split, rank)
        own, inputs = on(device, own), [tensor.to(device) for tensor in (x, ids, shares)]
        got = run(device, own, *inputs, None if expert_map is None else expert_map.to(device))
        local = None if expert_map is None else (expert_map >= 0).nonzero().flatten().tolist()
        whole = on(device, weights) if local else own  # the reference numbers experts as the router does
        wanted = reference(inputs[0], whole, *inputs[1:], local)
        if wanted.any():  # one token's experts may all be on the other GPU
            assert error(got, wanted) < BF16
        else:
            assert not got.any()
        outputs.append(got)
    first = devices[0]
    whole = on(first, weights)
    inputs = [tensor.to(first) for tensor in (x, ids, shares)]
    alone, wanted = run(first, whole, *inputs, None), reference(inputs[0], whole, *inputs[1:])
    if len(devices) < GPUS:
        pytest.skip("one GPU: both parts are right on it; NCCL's sum of them needs two")
    nccl.all_reduce(outputs)
    for device in devices:
        torch.cuda.synchronize(device)
    assert torch.equal(outputs[0].cpu(), outputs[1].cpu())
    assert error(outputs[0], wanted) < SUMMED
    assert error(outputs[0], alone) < SUMMED
