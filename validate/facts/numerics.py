"""Facts about numbers: one small MoE layer with the server's kernel, in a child process that may hang."""

from pathlib import Path

from sparkforge.core import gpus
from sparkforge.plan import families
from validate.facts import checkpoint, deep, software
from validate.facts.child import Outcome, Program
from validate.facts.fact import Fact
from validate.facts.target import Target

CHILD = Path(__file__).with_name("numerics_child.py")
SOURCE = "a small MXFP4 MoE layer, run by validate/facts/numerics_child.py"
NAMES = ("state", "kernel", "device", "tolerance", "difference", "graph_difference", "charged", "loaded")
RAN, NOT_COMPILED, OTHER = "ran", "not compiled", "other experts"
EAGER = "cuda, eager"  # the child's word for a GPU with a kernel that does not support CUDA graphs
PLUGIN, VLLM = "plugin", "vllm"  # the origin of the experts' kernel: our plugin, or vLLM's selection


def program(target: Target) -> Program | None:
    """Return the program that runs the layer; None if it is not run."""
    if not_run(target):
        return None
    way = way_of(target)
    imports = deep.IMPORTS if way == VLLM else ("torch",)
    request = {"way": way, "gpu_fields": gpus.STATE_FIELDS}
    return Program(CHILD, "the layer", target.options.numerics_seconds, imports, request)


def facts(target: Target, outcome: Outcome) -> dict[str, Fact]:
    """Return every fact of the check `numerics`; missing facts have the reason why the child ended."""
    if why := not_run(target):
        return {f"numerics.{name}": Fact(why if name == "state" else None, SOURCE) for name in NAMES}
    missing = {f"numerics.{name}": Fact(None, SOURCE, outcome.why) for name in NAMES}
    computed = {name: Fact(entry["value"], SOURCE) for name, entry in outcome.entries.items()}
    return {**missing, "numerics.state": Fact(RAN, SOURCE), **computed}


def way_of(target: Target) -> str:
    """Return the origin of the experts' kernel, by the server's arguments and variables."""
    if target.stack == "embedded":
        return PLUGIN
    named = target.argument("--quantization") == "spark-mxfp4"
    return PLUGIN if named and target.options.environ.get("SPARK_MXFP4_KERNEL") != VLLM else VLLM


def not_run(target: Target) -> str:
    """Return the reason why the layer is not run; empty if it is run, or if the child must report an error.

    Without FlashInfer's module the first call would take minutes. The layer has experts of the default family.
    """
    row, own = checkpoint.family(target), families.load()[families.default()].experts
    kinds = [(e.activation, e.bias) if e else None for e in (row.experts if row else own, own)]
    if kinds[0] != kinds[1]:
        return OTHER
    if way_of(target) == PLUGIN:
        return ""
    try:
        return "" if software.moe_module(target) in software.cached_modules(target) else NOT_COMPILED
    except Exception:  # noqa: BLE001 - another fact has the reason
        return ""
