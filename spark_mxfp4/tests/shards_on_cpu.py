"""The measurement over two GPUs, as two processes on a CPU: gloo stands in for NCCL, torch for kernels and graphs."""

import torch
from torch import distributed

import common
import measure_shards
from spark_mxfp4.experts import moe

TINY = common.LayerSizes(4, 2, 64, 128)
TIMES = {1: 8.0, 3: 12.0}  # of the second process; the first takes half as long


class OnCpu:
    """What the GPU's kernel promises."""

    def prepare(self, weights):
        return weights

    def run(self, x, weights, ids, shares, expert_map=None):
        return moe(x, weights, ids, shares, expert_map)


def measure_rank(rank, rendezvous, output, tokens=(1, 3)):
    """Measure as process `rank`."""
    join = distributed.init_process_group

    def timed(once, count, *, before):
        once(0)
        assert before is distributed.barrier  # or one GPU would wait for the other in its own time
        return TIMES[count] * (rank + 1) / 2

    torch.set_num_threads(1)
    torch.cuda.set_device = torch.cuda.empty_cache = lambda *_: None
    distributed.init_process_group = lambda _, *, device_id, **options: join("gloo", **options)
    measure_shards.MODEL, measure_shards.DEVICE, measure_shards.GpuKernel = TINY, "cpu", OnCpu
    measure_shards.graph_time, measure_shards.count_of = timed, lambda number: number
    measure_shards._facts = lambda: {"device": "none"}
    measure_shards.measure_rank(rank, rendezvous, tokens, output)
