"""The measurement over two GPUs without one: the parts of a layer, and two processes whose sum is the layer."""

import json
import multiprocessing
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from spark_mxfp4.experts import moe  # noqa: E402
from spark_mxfp4.kernels import measure_shards, timing  # noqa: E402
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference  # noqa: E402

TINY = timing.LayerSizes(4, 2, 64, 128)


@pytest.mark.parametrize("split", measure_shards.SPLITS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_parts_add_up_to_the_layer(split, bias):
    weights = random_weights(*TINY[:1], *TINY[2:], "cpu", bias=bias)
    x, (ids, shares) = torch.randn(5, 64).bfloat16(), random_routing(5, 4, 2, device="cpu")
    total = torch.zeros(5, 64)
    for rank in range(measure_shards.GPUS):
        own, expert_map = measure_shards.part(weights, split, rank)
        if split == "expert":
            assert expert_map.tolist() == [[0, 1, -1, -1], [-1, -1, 0, 1]][rank]
            assert torch.equal(own.gate_up.scales, weights.gate_up.scales[2 * rank : 2 * rank + 2])
            total += reference(x, weights, ids, shares, [2 * rank, 2 * rank + 1])
        else:
            assert expert_map is None
            assert own.gate_up.weight.shape == (4, 128, 32)
            total += reference(x, own, ids, shares)
    assert error(total, reference(x, weights, ids, shares)) < 1e-5


class OnCpu:
    """What the GPU's kernel promises, in torch."""

    def prepare(self, weights):
        return weights

    def run(self, x, weights, ids, shares, expert_map=None):
        return moe(x, weights, ids, shares, expert_map)


def test_two_processes_measure_the_same_layer(monkeypatch, tmp_path):
    join = measure_shards.distributed.init_process_group
    times = {1: 8.0, 3: 12.0}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(measure_shards, "MODEL", TINY)
    monkeypatch.setattr(measure_shards, "DEVICE", "cpu")
    monkeypatch.setattr(measure_shards, "GpuKernel", OnCpu)
    monkeypatch.setattr(measure_shards, "_facts", lambda: {"device": "none"})
    monkeypatch.setattr(measure_shards, "_time", lambda once, tokens: once(0) is None or times[tokens])
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(
        measure_shards.distributed, "init_process_group",
        lambda _, *, device_id, **options: join("gloo", **options),
    )  # fmt: skip
    arguments = (str(tmp_path / "meeting"), (1, 3), str(tmp_path / "shards.json"))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=measure_shards.measure_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    rows = json.loads((tmp_path / "shards.json").read_text())["rows"]
    assert rows["one"] == [{"tokens": 1, "products_us": 8.0}, {"tokens": 3, "products_us": 12.0}]
    for split in measure_shards.SPLITS:
        assert [(row["tokens"], row["us"], row["one_over_two"]) for row in rows[split]] == [(1, 8, 1), (3, 12, 1)]
        assert all(row["error"] < 0.01 for row in rows[split])


def test_one_gpu_is_refused_with_the_command_for_one(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["measure_shards", "--output", str(tmp_path / "s.json")])
    with pytest.raises(SystemExit, match=r"sees 1 NVIDIA GPUs.*run python -m spark_mxfp4\.kernels\.measure --output"):
        measure_shards.main()
