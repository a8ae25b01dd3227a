"""Facts about numbers: one small MoE layer through the kernel that will serve, in a child process that may hang."""

from __future__ import annotations

from pathlib import Path

from sparkforge.core import gpus
from validate.facts import software
from validate.facts.child import run_child
from validate.facts.fact import Fact
from validate.facts.target import Target

CHILD = Path(__file__).with_name("numerics_child.py")
SOURCE = "a small MXFP4 MoE layer, run by validate/facts/numerics_child.py"
NAMES = ("state", "kernel", "device", "tolerance", "difference", "graph_difference", "charged", "loaded")
RAN, NOT_COMPILED = "ran", "not compiled"
EAGER = "cuda, eager"  # the child's word for a GPU with a kernel that no CUDA graph can hold
PLUGIN, VLLM = "plugin", "vllm"  # whose kernel runs the experts: our plugin's, or the one that vLLM selects


def gather(target: Target) -> dict[str, Fact]:
    """Every fact of the numerics check; those that the child did not write carry how it ended. Never raises."""
    if not ready(target):
        return {f"numerics.{name}": Fact(NOT_COMPILED if name == "state" else None, SOURCE) for name in NAMES}
    entries, why = run_child(
        CHILD, target, "the layer", target.options.numerics_seconds, way=way_of(target), gpu_fields=gpus.STATE_FIELDS
    )
    missing = {f"numerics.{name}": Fact(None, SOURCE, why) for name in NAMES}
    computed = {name: Fact(entry["value"], SOURCE) for name, entry in entries.items()}
    return {**missing, "numerics.state": Fact(RAN, SOURCE), **computed}


def way_of(target: Target) -> str:
    """Return whose kernel will run the experts, by the server's arguments and variables."""
    if target.stack == "embedded":
        return PLUGIN
    named = target.argument("--quantization") == "spark-mxfp4"
    return PLUGIN if named and target.options.environ.get("SPARK_MXFP4_KERNEL") != VLLM else VLLM


def ready(target: Target) -> bool:
    """Tell whether the experts' kernel is compiled; without FlashInfer's module the first call would take minutes.

    If that cannot be read, the child says what is wrong.
    """
    if way_of(target) == PLUGIN:
        return True
    try:
        return software.moe_module(target) in software.cached_modules(target)
    except Exception:  # noqa: BLE001 - a fact of its own says why
        return True
