"""The measurement over two GPUs without one: the shards of a layer, and two processes whose sum is the layer."""

import json
import multiprocessing
import sys

import pytest
import torch

import measure_shards
import shards_on_cpu
from shards_on_cpu import TINY
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference


@pytest.mark.parametrize("split", measure_shards.SPLITS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_shards_add_up_to_the_layer(split, bias):
    weights = random_weights(*TINY[:1], *TINY[2:], "cpu", bias=bias)
    x, (ids, shares) = torch.randn(5, 64).bfloat16(), random_routing(5, 4, 2, device="cpu")
    total = torch.zeros(5, 64)
    for rank in range(measure_shards.GPUS):
        own, expert_map = measure_shards.shard(weights, split, rank)
        if split == "expert":
            assert expert_map.tolist() == [[0, 1, -1, -1], [-1, -1, 0, 1]][rank]
            assert torch.equal(own.gate_up.scales, weights.gate_up.scales[2 * rank : 2 * rank + 2])
            total += reference(x, weights, ids, shares, [2 * rank, 2 * rank + 1])
        else:
            assert expert_map is None
            assert own.gate_up.weight.shape == (4, 128, 32)
            total += reference(x, own, ids, shares)
    assert error(total, reference(x, weights, ids, shares)) < 1e-5


def test_two_processes_measure_the_same_layer(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    output = tmp_path / "shards.json"
    spawn = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "rendezvous"), str(output))
    ranks = [spawn.Process(target=shards_on_cpu.measure_rank, args=(rank, *arguments)) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    rows = json.loads(output.read_text())["rows"]
    assert rows["one"] == [{"tokens": 1, "products_us": 8.0}, {"tokens": 3, "products_us": 12.0}]
    for split in measure_shards.SPLITS:
        assert [(row["tokens"], row["us"], row["speedup"]) for row in rows[split]] == [(1, 8, 1), (3, 12, 1)]
        assert all(row["error"] < 0.01 for row in rows[split])


def test_one_gpu_is_refused_with_the_command_for_one(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["measure_shards", "--output", str(tmp_path / "s.json")])
    with pytest.raises(SystemExit, match=r"sees 1 NVIDIA GPUs.*run bench/measure_experts\.py --output"):
        measure_shards.main()
