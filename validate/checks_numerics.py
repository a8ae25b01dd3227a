"""The check of what the experts' kernel computes."""

from __future__ import annotations

from validate.finding import Check, Judgement, View, failed, passed, warned
from validate.numerics import NOT_COMPILED

BUILD = "./inv build.kernels   # then validate again"


def numerics(view: View) -> Judgement:
    """The layer's output is the reference's, within what rounding explains, and a CUDA graph replays it bit for bit."""
    if view.text("numerics.state") == NOT_COMPILED:
        return warned(
            "not run: FlashInfer's MoE module is not compiled yet, and the server's first start will do that", BUILD
        )
    kernel, found, allowed = (
        view.text("numerics.kernel"),
        view.number("numerics.difference"),
        view.number("numerics.tolerance"),
    )
    told = f"{kernel} differs from the reference by {found:.2%}, {allowed:.0%} is rounding"
    if found > allowed:
        return failed(told)
    if view.is_none("numerics.graph_difference") and view.text("numerics.device") == "cpu":
        return passed(f"{told}; no GPU, so no CUDA graph")
    if (replayed := view.number("numerics.graph_difference")) > 0:
        return failed(f"{told}, but a CUDA graph's replay differs from it by {replayed:g}", "add --enforce-eager")
    return passed(f"{told}; a CUDA graph replays it bit for bit")


CHECKS = (
    Check(
        "numerics",
        "A small MXFP4 MoE layer through the kernel that will serve gives the reference's numbers.",
        (
            "numerics.state",
            "numerics.kernel",
            "numerics.device",
            "numerics.tolerance",
            "numerics.difference",
            "numerics.graph_difference",
        ),
        numerics,
        "./inv logs; a kernel that computes wrongly must not serve: choose another --moe-backend and report this",
    ),
)
