"""The check of what the experts' kernel computes."""

from __future__ import annotations

from validate.checks.finding import CheckList, CheckResult, View, failed, passed, warned
from validate.facts.numerics import EAGER, NOT_COMPILED

BUILD = "./inv build.kernels   # then validate again"

# Device → why nothing was captured there.
NO_GRAPH = {"cpu": "no GPU, so no CUDA graph", EAGER: "the kernel says that no CUDA graph can hold it"}

CHECKS = CheckList[View]()


@CHECKS.add(
    "numerics",
    "A small MXFP4 MoE layer through the kernel that will serve gives the reference's numbers.",
    needs=("numerics",),
    fix="./inv logs; a kernel that computes wrongly must not serve: choose another --moe-backend and report this",
    about=(
        "A layer of 4 experts is computed by the kernel that will serve, and compared with float64: at most 2 % "
        "root mean square for bfloat16 activations, 10 % for MXFP8. On a GPU a CUDA graph must replay the same "
        "bits; FlashInfer's kernel has not run on 12.x."
    ),
)
def _numerics(view: View) -> CheckResult:
    if view.text("numerics.state") == NOT_COMPILED:
        return warned(
            "not run: FlashInfer's MoE module is not compiled yet, and the server's first start will do that", BUILD
        )
    kernel, difference, allowed = (
        view.text("numerics.kernel"),
        view.number("numerics.difference"),
        view.number("numerics.tolerance"),
    )
    evidence = f"{kernel} differs from the reference by {difference:.2%}, {allowed:.0%} is rounding"
    if difference > allowed:
        return failed(evidence)
    if view.is_none("numerics.graph_difference") and (reason := NO_GRAPH.get(view.text("numerics.device"))):
        return passed(f"{evidence}; {reason}")
    if (replayed := view.number("numerics.graph_difference")) > 0:
        return failed(f"{evidence}, but a CUDA graph's replay differs from it by {replayed:g}", "add --enforce-eager")
    return passed(f"{evidence}; a CUDA graph replays it bit for bit")
