"""Time `own_kernel` and this library's kernel: `python benchmark_own_kernel.py`, on the GPU if there is one.

A row is one layer with the tokens of one step. Weights and routing are random. The default sizes suit a CPU.
For those of gpt-oss-120b give `--hidden 2880 --intermediate 2880 --experts 128`.
"""

import argparse
import statistics
import time

import torch

from spark_mxfp4 import registry
from spark_mxfp4.kernels.check import random_routing, random_weights


def milliseconds(kernel_name: str, tokens: int, options: argparse.Namespace) -> float:
    """Return the median time of one layer in milliseconds, from `--repeats` runs after two warm-up runs."""
    torch.manual_seed(tokens)
    kernel, device = registry.load(kernel_name), options.device
    hidden, intermediate = kernel.padded(options.hidden, options.intermediate)
    weights = kernel.prepare(random_weights(options.experts, hidden, intermediate, device))
    ids, shares = random_routing(tokens, options.experts, options.top_k, device=device)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    times = []
    for _ in range(2 + options.repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        kernel.run(x, weights, ids, shares)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times[2:])


def main() -> None:
    """Print a table: tokens, milliseconds of both kernels, and the speed-up of your kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=device)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    for name, value in (("experts", 8), ("top-k", 4), ("hidden", 256), ("intermediate", 256), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    ours = registry.chosen_name(options.device)
    if ours not in registry.KERNELS:  # SPARK_MXFP4_KERNEL names your kernel
        ours = registry.DEVICE_KERNELS.get(options.device, registry.DEFAULT_KERNEL)
    print(f"tokens  own_kernel ms  {ours} ms  ratio")
    with torch.no_grad():
        for tokens in options.tokens:
            mine_ms, ours_ms = (milliseconds(name, tokens, options) for name in ("own_kernel:OwnKernel", ours))
            print(f"{tokens:6}  {mine_ms:13.3f}  {ours_ms:{len(ours) + 3}.3f}  {ours_ms / mine_ms:5.2f}")


if __name__ == "__main__":
    main()
