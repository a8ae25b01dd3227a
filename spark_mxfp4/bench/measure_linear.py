"""`python bench/measure_linear.py`: the speed of the dense products on this GPU, compared with their peers.

Every time is the median of CUDA graph replays. A graph runs several matrices in turn, so that no weight is in cache,
and each product waits for the previous product, as in a model. The peers are torch's bf16 product, its FP8 product with
one scale a row (cuBLAS), with and without the quantisation of activations, and vLLM's FP8 and Marlin kernels if vLLM
can be imported (`peer_linear`). Results for 0 tokens are the time to move the bytes of a weight in the same chain of
graph nodes: copied (half of them read, half written), or only read by a kernel. The reading kernel is timed twice:
started after the previous kernel has ended, and started early, while the previous kernel still runs, as our kernels
are. There are so many weights that early kernels never read the same weight at once. The figures are saved after each
shape.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from common import ceilings, output_file, print_row, token_counts
from spark_mxfp4.kernels.check import PRODUCTS, error
from spark_mxfp4.kernels.linear import Format, Weight, reference, run
from spark_mxfp4.kernels.timing import REPLAYS, graph_time
from spark_mxfp4.mxfp4 import E4M3_LARGEST

TOKENS = (1, 2, 4, 8, 16, 32, 64)
CACHE = 1 << 28  # bytes of weights, more than any cache holds
THREAD_WORDS = 4  # words of 4 bytes that a thread loads at once
MOST_WORDS = 1024 * THREAD_WORDS
AT_ONCE = 16  # kernels that may overlap if each starts early: no two of them may read the same weight
Row = dict[str, Any]


def measure(rows: int, columns: int, tokens: tuple[int, ...], copy: float) -> Iterator[Row]:
    """Yield a row for each format and number of tokens: time, share of the copy bandwidth, error; peers likewise.

    `copy` is the copy bandwidth in GB/s.
    """
    count = max(2, CACHE // (rows * columns // 2))
    matrices = [torch.randn(rows, columns, device="cuda").bfloat16() * 0.02 for _ in range(count)]
    states = {number: torch.randn(number, columns, device="cuda").bfloat16() for number in tokens}
    for number, x in states.items():
        us = graph_time(partial(_multiply, x, matrices), 2 * count)
        yield _row("bf16", number, us, matrices[0].nbytes, copy)
    yield from _fp8(matrices, tokens, copy)
    for format_ in Format:
        weights = [Weight.pack(matrix, format_) for matrix in matrices]
        exact = reference(matrices[0], format_)
        for number, x in states.items():
            off = error(run(x, weights[0]), x.float() @ exact.T)
            us = graph_time(partial(_run, x, weights), 2 * count)
            yield {**_row(format_.name, number, us, weights[0].nbytes, copy), "error": off}
        del exact
        yield from bytes_alone(format_.name, [weight.data for weight in weights], copy)
        del weights
    yield from _vllm(matrices, states, copy)
    yield from bytes_alone("bf16", matrices, copy)  # last: it overwrites them


def _multiply(x: torch.Tensor, matrices: list[torch.Tensor], i: int) -> torch.Tensor:
    return x @ matrices[i % len(matrices)].T


def _run(x: torch.Tensor, weights: list[Weight], i: int) -> torch.Tensor:
    return run(x, weights[i % len(weights)])


def _fp8(matrices: list[torch.Tensor], tokens: tuple[int, ...], copy: float) -> list[Row]:
    weights = [matrix.to(torch.float8_e4m3fn) for matrix in matrices]
    scale = torch.ones(1, matrices[0].shape[0], device="cuda")

    def multiply(x: torch.Tensor, x_scale: torch.Tensor, i: int) -> torch.Tensor:
        """Return the product of E4M3 `x` [M, K] with matrix `i`, bfloat16 [M, N]."""
        return torch._scaled_mm(  # noqa: SLF001 (torch has no other name for it)
            x, weights[i % len(weights)].T, x_scale, scale, out_dtype=torch.bfloat16
        )

    def with_quantisation(x: torch.Tensor, i: int) -> torch.Tensor:
        """Quantise bfloat16 `x` [M, K] by rows to E4M3, then multiply."""
        x_scale = x.abs().amax(1, keepdim=True).float() / E4M3_LARGEST
        return multiply((x / x_scale).to(torch.float8_e4m3fn), x_scale, i)

    rows = []
    for number in tokens:
        x = torch.randn(number, matrices[0].shape[1], device="cuda").bfloat16()
        x_fp8, unit_scale = x.to(torch.float8_e4m3fn), torch.ones(number, 1, device="cuda")
        product_us = graph_time(partial(multiply, x_fp8, unit_scale), 2 * len(weights))
        total_us = graph_time(partial(with_quantisation, x), 2 * len(weights))
        rows += [
            _row("cuBLAS FP8", number, product_us, weights[0].nbytes, copy),
            _row("cuBLAS FP8 with quantisation", number, total_us, weights[0].nbytes, copy),
        ]
    return rows


def _vllm(matrices: list[torch.Tensor], states: dict[int, torch.Tensor], copy: float) -> Iterator[Row]:
    """Yield the rows of vLLM's kernels. If vLLM is absent or a kernel fails, a row has the reason."""
    try:
        import peer_linear  # noqa: PLC0415 (it imports vLLM)
    except ImportError as problem:
        yield {**_missing("vLLM"), "absent": f"vLLM cannot be imported: {problem}"}
        return
    for peer in peer_linear.peers():
        try:
            yield from _peer(peer, matrices, states, copy)
        except Exception as problem:  # noqa: BLE001 (a peer may raise anything; the rest is still measured)
            yield {**_missing(peer.name), "failed": f"{type(problem).__name__}: {problem}"[:300]}


def _peer(peer: Any, matrices: list[torch.Tensor], states: dict[int, torch.Tensor], copy: float) -> Iterator[Row]:
    """Yield a row for each number of tokens of a `peer_linear.PeerKernel`."""
    weights = [peer.prepare(matrix) for matrix in matrices]
    exact = reference(matrices[0], peer.format)
    for number, x in states.items():
        activations = peer.quantise(x)
        off = error(weights[0].multiply(activations), x.float() @ exact.T)

        def once(i: int, activations: Any = activations) -> torch.Tensor:
            """Multiply by weight `i`, in turn."""
            product: torch.Tensor = weights[i % len(weights)].multiply(activations)
            return product

        us = graph_time(once, 2 * len(weights))
        yield {**_row(peer.name, number, us, weights[0].nbytes, copy), "error": off}


class ReadLaunch(NamedTuple):
    """Launch parameters of the reading kernel: threads a block, loads in flight a thread, blocks a multiprocessor."""

    threads: int
    loads: int
    blocks: int


LAUNCHES = (
    ReadLaunch(128, 8, 4), ReadLaunch(256, 4, 2), ReadLaunch(256, 4, 4), ReadLaunch(256, 8, 1), ReadLaunch(256, 8, 2),
    ReadLaunch(512, 4, 2), ReadLaunch(512, 8, 1), ReadLaunch(1024, 4, 1),
)  # fmt: skip


@triton.jit
def read_kernel(
    words: tl.tensor, out: tl.tensor, count: tl.tensor,
    WORDS: tl.constexpr, LOADS: tl.constexpr, EARLY: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Read `count` words (int32); the blocks take pieces of WORDS words in turn. `out` has MOST_WORDS words.

    EARLY: the next kernel may start while this one runs, and this one ends after the previous kernel.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
    lanes = tl.arange(0, WORDS)
    total = tl.zeros([WORDS], tl.int32)
    step = tl.num_programs(0) * WORDS
    for first in range(tl.program_id(0) * WORDS, count, step * LOADS):
        for load in tl.static_range(LOADS):
            offsets = first + load * step + lanes
            total ^= tl.load(words + offsets, offsets < count, other=0)
    if EARLY:
        cuda.gdc_wait()
    # One value in 2^32 is written, so that almost nothing is stored but the compiler must keep every load.
    tl.store(out + lanes, total, total == 0x5EED5EED)


def read(words: torch.Tensor, out: torch.Tensor, launch: ReadLaunch, *, early: bool) -> None:
    """Read `words` (int32, a multiple of four) once, 16 bytes at a time; see `read_kernel` for `out`."""
    read_kernel[(launch.blocks * _processors(words.device),)](
        words,
        out,
        words.numel(),
        WORDS=launch.threads * THREAD_WORDS,
        LOADS=launch.loads,
        EARLY=early,
        num_warps=launch.threads // 32,
        **({"launch_pdl": True} if early else {}),
    )


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def bytes_alone(name: str, weights: Sequence[torch.Tensor], copy: float) -> Iterator[Row]:
    """Yield the times to copy and to read the bytes of `weights`, one kernel after another; overwrites half of each.

    The reading kernel is timed with all LAUNCHES; the fastest result counts.
    """
    words = [weight.view(-1).view(torch.uint8) for weight in weights]
    size = words[0].numel() // 32 * 32  # two halves of whole 16-byte words
    whole = [weight[:size].view(torch.int32) for weight in words]
    out = torch.zeros(MOST_WORDS, dtype=torch.int32, device=whole[0].device)
    for title, early in (("read the weight's bytes", False), ("read the weight's bytes, started early", True)):
        if early and len(whole) < AT_ONCE:
            continue
        times = {launch: graph_time(partial(_read, whole, out, launch, early), 2 * len(whole)) for launch in LAUNCHES}
        best = min(times, key=lambda launch: times[launch])
        yield {**_row(f"{title}, {name}", 0, times[best], size, copy), **best._asdict()}
    halves = [weight.view(2, -1) for weight in whole]
    us = graph_time(partial(_copy, halves), 2 * len(halves))
    yield _row(f"copy half of the weight's bytes onto the other, {name}", 0, us, size, copy)


def _read(weights: list[torch.Tensor], out: torch.Tensor, launch: ReadLaunch, early: bool, i: int) -> None:
    read(weights[i % len(weights)], out, launch, early=early)


def _copy(halves: list[torch.Tensor], i: int) -> torch.Tensor:
    """Copy with a kernel, as `common.ceilings` does, not with the driver's copy."""
    first, second = halves[i % len(halves)]
    return torch.bitwise_not(first, out=second)


def _row(name: str, tokens: int, us: float, nbytes: int, copy: float) -> Row:
    return {"name": name, "tokens": tokens, "us": round(us, 2), "of_copy": round(nbytes / us / 1e3 / copy, 3)}


def _missing(name: str) -> Row:
    return {"name": name, "tokens": 0, "us": None, "of_copy": None}


def _named(names: str | None) -> Iterable[str]:
    """Return the shapes in --shapes, by default all. Exits if a shape is unknown."""
    wanted = names.split(",") if names else list(PRODUCTS)
    if unknown := [name for name in wanted if name not in PRODUCTS]:
        sys.exit(f"cannot measure {', '.join(unknown)} · there are qkv, o and head · name some of these")
    return wanted


def main() -> None:
    """Make the selected measurements and save JSON."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output", required=True, type=output_file, help="JSON file for the figures")
    flags.add_argument("--tokens", type=token_counts, default=TOKENS, help="comma-separated; default: 1 to 64")
    flags.add_argument(
        "--shapes", help="comma-separated, of qkv, o and head; default: these, and those of one of two devices"
    )
    arguments = flags.parse_args()
    names = _named(arguments.shapes)
    if not torch.cuda.is_available():
        sys.exit("cannot measure · torch sees no NVIDIA GPU · use a GPU machine and a torch that is built for CUDA")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "replays": REPLAYS, "ceilings": ceilings(), "shapes": {},
    }  # fmt: skip
    print_row("ceilings", result["ceilings"])
    for name in names:
        rows, columns = PRODUCTS[name]
        figures: list[Row] = []
        result["shapes"][name] = {"rows": rows, "columns": columns, "figures": figures}
        for row in measure(rows, columns, arguments.tokens, result["ceilings"]["copy_gbs"]):
            figures.append(row)
            _print(f"{name}, {row['name']}", row)
        torch.cuda.empty_cache()
        _save(arguments.output, result)
    result["ceilings_after"] = ceilings()
    _save(arguments.output, result)


def _print(title: str, row: Row) -> None:
    if row["us"] is None:
        print(f"{title}: {row.get('absent') or row.get('failed')}", flush=True)
    else:
        print_row(title, {key: value for key, value in row.items() if key != "name"})


def _save(output: Path, result: dict[str, Any]) -> None:
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
