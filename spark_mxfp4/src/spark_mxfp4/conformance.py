"""Check a mixture-of-experts kernel before it may serve: `python -m spark_mxfp4.conformance my_kernel:Kernel`.

Each case is one small layer, run as a server runs it: sizes padded to the kernel's alignments, weights through
`prepare`, then `run`. The result is compared with a slow float32 computation on the same MXFP4 weights.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from spark_mxfp4 import operator, registry
from spark_mxfp4.experts import GPT_OSS, SILU, Activation, ExpertWeights, Projection, TopK
from spark_mxfp4.kernel import MoeKernel
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference
from spark_mxfp4.mxfp4 import BLOCK

# Rounding to bfloat16 gives 0.2 to 0.5 % (validate/facts/numerics_child.py has the same bound), a missing clamp 40 %.
TOLERANCE = 0.02
SPREAD = 24.0  # inputs' standard deviation: gates and ups of these small layers reach the activation's limit of 7


class Case(NamedTuple):
    """One layer: T tokens, E experts of which each token takes k, hidden size H, intermediate size I."""

    name: str
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    routing: str = "even"  # a kind of check.random_routing
    bias: bool = True
    elsewhere: bool = False  # every second expert is on another device
    activation: Activation = GPT_OSS  # others only for kernels with `activations`


CASES = (
    Case("one token", 1, 8, 4, 128, 128),
    Case("a batch", 16, 8, 4, 128, 128),
    Case("more tokens than a tile has rows", 150, 4, 2, 64, 96),
    Case("sizes that are no power of two", 7, 5, 3, 96, 160),
    Case("gpt-oss' 2880 divided by four ranks", 3, 2, 1, 96, 736),
    Case("experts without a token", 33, 32, 4, 64, 64, routing="uneven"),
    Case("every token to the same experts", 33, 8, 2, 64, 64, routing="one"),
    Case("no bias", 5, 4, 2, 64, 64, bias=False),
    Case("experts on another device", 24, 8, 4, 128, 128, elsewhere=True),
    Case("no token", 0, 4, 2, 64, 64),
)
OTHER_ACTIVATIONS = (Case("plain SiLU", 9, 4, 2, 64, 96, bias=False, activation=SILU),)  # for kernels that take them


class CaseResult(NamedTuple):
    """The result of a case: the norm of the difference over the norm of the reference, and the problem, if any.

    `unsupported` is the reason if the kernel refuses experts on another device. Such a kernel may serve without expert
    parallelism.
    """

    case: Case
    difference: float
    problem: str
    unsupported: str = ""


def check(kernel: MoeKernel, device: str | torch.device = "cpu", cases: tuple[Case, ...] = CASES) -> list[CaseResult]:
    """Run every case in bfloat16 and return the results. Raises ValueError with the name of the first wrong case.

    Memory that the kernel allocates by `torch.empty` is filled with NaN, so that an unwritten element counts as an
    error.
    """
    results = [run_case(kernel, case, device, seed) for seed, case in enumerate(meant(kernel, cases))]
    for result in results:
        if result.problem:
            raise ValueError(
                f"kernel {kernel.name!r} must not serve · case {result.case.name!r}: {result.problem} · "
                "compare it with spark_mxfp4.experts.moe on that case"
            )
    return results


def meant(kernel: MoeKernel, cases: tuple[Case, ...] = CASES) -> tuple[Case, ...]:
    """Return `cases`, and the cases for other activations if `kernel` supports those."""
    return cases + OTHER_ACTIVATIONS * kernel.activations


@torch.no_grad()
def run_case(kernel: MoeKernel, case: Case, device: str | torch.device = "cpu", seed: int = 0) -> CaseResult:
    """Run one case. An exception of the kernel becomes the problem, unless it refuses experts on another device."""
    torch.manual_seed(seed)
    hidden, intermediate = kernel.padded(case.hidden, case.intermediate)
    weights = random_weights(case.experts, case.hidden, case.intermediate, device, bias=case.bias)
    ids, shares = random_routing(case.tokens, case.experts, case.top_k, case.routing, device)
    x = (SPREAD * torch.randn(case.tokens, case.hidden, device=device)).bfloat16()
    expert_map, local = None, None
    loaded = ExpertWeights(
        _padded(weights.gate_up, 2 * intermediate, hidden), _padded(weights.down, hidden, intermediate)
    )
    if case.elsewhere:
        local = list(range(0, case.experts, 2))
        expert_map = torch.full((case.experts,), -1, dtype=torch.int32, device=device)
        expert_map[local] = torch.arange(len(local), dtype=torch.int32, device=device)
        loaded = ExpertWeights(*(Projection(*(t if t is None else t[local] for t in p)) for p in loaded))
    padded = x.new_zeros(case.tokens, hidden)
    padded[:, : case.hidden] = x
    inputs = (padded.clone(), ids.clone(), shares.clone())

    def run() -> torch.Tensor:
        return operator.run(kernel, padded, prepared, TopK(ids, shares, expert_map), case.activation)

    try:
        with poisoned():
            before = ExpertWeights(*(Projection(*(t if t is None else t.clone() for t in p)) for p in loaded))
            prepared = kernel.prepare(loaded)
            output = run()
            restored = kernel.restore(prepared, hidden, intermediate) if kernel.has_own_layout else before
    except Exception as failure:  # noqa: BLE001 - whatever a kernel raises, it must not serve
        refuses = case.elsewhere and isinstance(failure, NotImplementedError)
        problem, unsupported = f"it raised {type(failure).__name__}: {failure}", str(failure)
        return CaseResult(case, math.nan, *(("", unsupported) if refuses else (problem, "")))
    if tuple(output.shape) != tuple(padded.shape) or output.dtype != padded.dtype:
        return CaseResult(
            case,
            math.nan,
            f"it returned {output.dtype} {tuple(output.shape)}, not {padded.dtype} {tuple(padded.shape)}",
        )
    if not all(torch.equal(a, b) for a, b in zip(inputs, (padded, ids, shares), strict=True)):
        return CaseResult(case, math.nan, "it changed its inputs")
    if not _same_bytes(restored, before):
        return CaseResult(case, math.nan, "restore does not return the weights that prepare got")
    if not case.tokens:
        return CaseResult(case, 0.0, "")
    difference = error(output[:, : case.hidden], reference(x, weights, ids, shares, local, case.activation))
    problem = (
        "" if difference <= TOLERANCE else f"it differs by {difference:.2%}, and rounding explains {TOLERANCE:.0%}"
    )
    if not problem and output.device.type == "cuda" and kernel.cuda_graphs:
        problem = _replayed(run, output)
    return CaseResult(case, difference, problem)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside the context, fill tensors of `torch.empty` with NaN or the largest integer."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


def _padded(projection: Projection, rows: int, columns: int) -> Projection:
    """Return a projection padded with zeros to `rows` outputs and `columns` inputs, as by vLLM's loader."""
    weight, scales, bias = projection

    def grown(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return the tensor in the corner of a larger tensor of zeros."""
        larger = tensor.new_zeros(tensor.shape[0], *shape)
        larger[tuple(map(slice, tensor.shape))] = tensor
        return larger

    return Projection(
        grown(weight, rows, columns // 2),
        None if scales is None else grown(scales, rows, columns // BLOCK),
        None if bias is None else grown(bias, rows),
    )


def _same_bytes(restored: ExpertWeights, loaded: ExpertWeights) -> bool:
    """Tell whether the tensors are equal. A bias of zeros equals no bias, because some kernels add zeros."""
    for before, after in zip(loaded, restored, strict=True):
        if before.bias is None and after.bias is not None:
            if after.bias.shape != before.weight.shape[:2] or after.bias.any():
                return False
            after = after._replace(bias=None)  # noqa: PLW2901
        if not all(
            a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b.to(a.dtype)))
            for a, b in zip(before, after, strict=True)
        ):
            return False
    return True


def _replayed(call: Callable[[], torch.Tensor], eager: torch.Tensor) -> str:
    """Capture a CUDA graph of `call`, replay it, and return how the result differs from the eager output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch requires a warm-up on a stream that is not the default one
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = call()
    except RuntimeError as failure:
        return f"a CUDA graph cannot capture it ({failure}); set cuda_graphs = False"
    captured.fill_(math.nan)  # an element that the replay does not write stays NaN
    graph.replay()
    torch.cuda.synchronize()
    return "" if torch.equal(captured, eager) else "a CUDA graph's replay gives other numbers"


def main(arguments: list[str]) -> int:
    """Check the kernel that the command line names and print a line for each case; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spark_mxfp4.conformance", description=__doc__)
    parser.add_argument("kernel", help="a name as in SPARK_MXFP4_KERNEL: module:Class, ./folder#Class, torch, …")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        kernel = registry.load(options.kernel)
    except (ValueError, NotImplementedError) as failure:
        print(failure, file=sys.stderr)
        return 1
    results = [run_case(kernel, case, options.device, seed) for seed, case in enumerate(meant(kernel))]
    for result in results:
        verdict, detail = ("FAIL", result.problem) if result.problem else ("ok", f"{result.difference:.2%}")
        if result.unsupported:
            verdict, detail = "no", f"not supported: {result.unsupported}"
        print(f"{verdict:4}  {result.case.name}  {detail}")
    failed = sum(bool(result.problem) for result in results)
    limits = ", without expert parallelism" if any(result.unsupported for result in results) else ""
    verdict = f"{failed} of {len(results)} cases are wrong: it must not serve" if failed else f"it may serve{limits}"
    print(f"kernel {kernel.name!r} on {options.device}: {verdict}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
