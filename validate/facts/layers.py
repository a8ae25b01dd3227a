"""Facts about the parts of a model: two gpt-oss layers through vLLM's engine, in a child process that may hang."""

from sparkforge.plan.choose import dense_format, kv_type
from validate.facts import deep, numerics
from validate.facts.child import Outcome, Program
from validate.facts.fact import Fact
from validate.facts.target import Target

CHILD = numerics.CHILD.with_name("layers_child.py")
SOURCE = "two gpt-oss layers of random numbers, served by validate/facts/layers_child.py"
NAMES = ("state", "differences", "linear", "head", "cache")
IMPORTS = (
    *deep.IMPORTS, "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.layers.fused_moe.layer", "vllm.model_executor.model_loader",
)  # fmt: skip


def program(target: Target) -> Program | None:
    """Return the program that serves the layers; None if it is not run."""
    if numerics.not_run(target):
        return None
    return Program(CHILD, "the engine", target.options.numerics_seconds, IMPORTS)


def facts(target: Target, outcome: Outcome) -> dict[str, Fact]:
    """Return every fact of the check `layers`; missing facts have the reason why the child ended."""
    if reason := numerics.not_run(target):
        state = {"state": Fact(reason, SOURCE)}
        return {f"layers.{name}": state.get(name, Fact(None, SOURCE)) for name in NAMES}
    dense, arguments = dense_format(target.options.serve_args, target.options.environ), target.options.serve_args
    known = {"state": numerics.RAN, "linear": dense.attention, "head": dense.head, "cache": kv_type(arguments)}
    return {
        "layers.differences": Fact(None, SOURCE, outcome.why),
        **{f"layers.{name}": Fact(value, "the server's arguments and variables") for name, value in known.items()},
        **{name: Fact(entry["value"], SOURCE) for name, entry in outcome.entries.items()},
    }
