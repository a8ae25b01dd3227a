"""The checks of kernels' results: the experts alone, and every part of two layers."""

from validate.checks.finding import CheckList, CheckResult, View, failed, passed, warned
from validate.facts.numerics import EAGER, NOT_COMPILED, OTHER

BUILD = "./inv build.kernels   # then validate again"
NOT_RUN = {
    NOT_COMPILED: ("FlashInfer's MoE module is not compiled yet; the server's first start compiles it", BUILD),
    OTHER: ("the check's layer has other experts than this model's family", "./inv bench.acc   # judges its answers"),
}

# Device → the reason why no CUDA graph was captured.
NO_GRAPH = {"cpu": "no GPU, so no CUDA graph", EAGER: "the kernel does not support CUDA graphs"}

CHECKS = CheckList[View]()


@CHECKS.add(needs=("numerics",), fix="./inv logs   # choose another --moe-backend; report this")
def _numerics(view: View) -> CheckResult:
    """A small MXFP4 MoE layer gives the reference's numbers with the server's kernel."""
    if not_run := NOT_RUN.get(view.text("numerics.state")):
        return warned(f"not run: {not_run[0]}", not_run[1])
    kernel, difference = view.text("numerics.kernel"), view.number("numerics.difference")
    allowed = view.number("numerics.tolerance")
    evidence = f"{kernel} differs from the reference by {difference:.2%}, {allowed:.0%} is rounding"
    if difference > allowed:
        return failed(evidence)
    if view.is_none("numerics.graph_difference") and (reason := NO_GRAPH.get(view.text("numerics.device"))):
        return passed(f"{evidence}; {reason}")
    if (replayed := view.number("numerics.graph_difference")) > 0:
        evidence = f"{evidence}, but a CUDA graph's replay differs from it by {replayed:g}"
        return failed(evidence, "./inv up -- --enforce-eager")
    return passed(f"{evidence}; a CUDA graph replays it bit for bit")


# Relative RMS difference that rounding explains, by a part's format. Measured on the CPU's backends: bfloat16 0.17 %,
# MXFP8 3.3 %, MXFP4 13.4 %; an FP8 cache 9.6 %, since the softmax amplifies the error of a key.
# By calculation FP8 equals MXFP8. A window that is off by one gives 4 %, missing sinks 20 %.
TOLERANCES = {"bf16": 0.01, "fp8": 0.06, "mxfp8": 0.06, "mxfp4": 0.20}
FP8_CACHE = 0.15


@CHECKS.add(needs=("layers", "numerics"), fix="./inv logs   # choose another backend for it, and report this")
def _layers(view: View) -> CheckResult:
    """Each part of two gpt-oss layers gives the reference's numbers in the classes that vLLM selects here."""
    if not_run := NOT_RUN.get(view.text("layers.state")):
        return warned(f"not run: {not_run[0]}", not_run[1])
    bf16 = TOLERANCES["bf16"]
    linear, head = (TOLERANCES.get(view.text(f"layers.{name}"), bf16) for name in ("linear", "head"))
    limits = {"qkv_proj": linear, "o_proj": linear, "lm_head": head, "experts": view.number("numerics.tolerance")}
    limits["attention"] = FP8_CACHE if view.text("layers.cache") == "fp8" else bf16
    differences = view.numbers("layers.differences")
    wrong = []
    for part, difference in differences.items():
        allowed = limits.get(part.partition(" ")[0], bf16)
        if not difference <= allowed:  # NaN too
            wrong.append(f"{part} differs from the reference by {difference:.2%}, {allowed:.0%} is rounding")
    if wrong:
        return failed("; ".join(wrong))
    worst = max(differences, key=lambda part: differences[part])
    return passed(f"of {len(differences)} parts {worst} differs most from the reference, by {differences[worst]:.2%}")
