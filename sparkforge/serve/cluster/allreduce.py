"""`python allreduce.py ARGUMENT`: all-reduces of several sizes with the other nodes; the first node prints JSON.

It runs as a file below the interpreter that serves, which has torch, and imports nothing of ours. NCCL where there is a
GPU, else Gloo. Every size is checked: a sum that is wrong is an error, not a speed.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

SIZES = (8 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes: a step of one user, of ten, and the link's bandwidth
ROUNDS = 20


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return the backend and, for each size, the microseconds of an all-reduce and the bus bandwidth in GB/s."""
    import torch  # noqa: PLC0415 - only here, where it is installed
    from torch import distributed  # noqa: PLC0415

    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    nodes = options["nodes"]
    distributed.init_process_group(
        backend,
        init_method=f"tcp://{options['address']}:{options['port']}",
        rank=options["rank"],
        world_size=nodes,
        timeout=timedelta(seconds=options["seconds"]),
    )
    rows = []
    for size in SIZES:
        tensor = torch.full((size // 4,), float(options["rank"] + 1), device=device)
        distributed.all_reduce(tensor)
        if not bool((tensor == nodes * (nodes + 1) / 2).all()):
            raise ValueError(f"an all-reduce of {size} bytes has a wrong sum")
        begun = time.perf_counter()
        for _ in range(ROUNDS):
            distributed.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / ROUNDS
        bandwidth = 2 * (nodes - 1) / nodes * size / seconds / 1e9
        rows.append({"bytes": size, "microseconds": round(seconds * 1e6, 1), "gigabytes_a_second": round(bandwidth, 3)})
    distributed.destroy_process_group()
    return {"backend": backend, "sizes": rows}


if __name__ == "__main__":
    answer = measure(json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(answer) + "\n")
