"""The check of the last measured speed against what the device allows."""

from __future__ import annotations

from sparkforge.plan import speed
from sparkforge.plan.devices import by_gpu
from validate.checks.finding import CheckList, CheckResult, FactMissing, View, failed, passed, warned
from validate.checks.serving import architecture, load

MOST = 10_000_000  # tokens, or requests at once
# A container's state is a volume of its own; the host's is not mounted, since Docker would make a missing one as root.
NOTHING = (
    "nothing was measured here yet (./inv bench.perf); a container does not see what was measured from its host: "
    "./inv plan MODEL --device this, on the host, compares that"
)
DOCTOR = "./inv doctor   # then ./inv bench.perf again"
REMOVE = "./inv doctor; then, to start and measure again: find .sparkforge/bench -name {} -delete"

CHECKS = CheckList[View]()


@CHECKS.add(
    "measured-speed",
    "The last measured speed is not far under what memory and arithmetic allow.",
    needs=("gpu", "model", "serve", "measured"),
    fix=DOCTOR,
)
def _measured_speed(view: View) -> CheckResult:
    if view.is_none("measured.file"):
        return passed(NOTHING)
    device = by_gpu(view.text("gpu.name"))
    if device is None or device.bytes_a_second is None:
        return passed(
            f"no memory bandwidth is known for {view.text('gpu.name')}, so there is no ceiling to compare with"
        )
    shape = [view.number(f"measured.{name}") for name in ("prompt", "answer", "concurrency")]
    first = view.number("measured.ttft_ms")
    if not all(1 <= size <= MOST for size in shape) or first <= 0:
        raise FactMissing("measured.prompt, answer, concurrency or ttft_ms makes no sense")
    model = architecture(view)
    served = load(view, model)
    between = None if view.is_none("measured.tpot_ms") else view.number("measured.tpot_ms")
    prompt, answer, concurrency = (int(size) for size in shape)
    measured = speed.Measured(prompt=prompt, answer=answer, concurrency=concurrency, ttft_ms=first, tpot_ms=between)
    comparisons = list(speed.compare(model, device, measured, served))
    evidence = f"{view.text('measured.file')}: {'; '.join(comparison.told for comparison in comparisons)}"
    causes = "; ".join(comparison.causes for comparison in comparisons if comparison.causes)
    if not causes:
        return passed(evidence)
    if any(comparison.refused for comparison in comparisons):
        # A machine that was started since may be well again (its power supply was pulled): only a new figure tells.
        if not view.flag("measured.before_boot"):
            return failed(f"{evidence}. Likely: {causes}", REMOVE.format(view.text("measured.file")))
        evidence += "; the machine was started since"
    return warned(f"{evidence}. Likely: {causes}", DOCTOR)
