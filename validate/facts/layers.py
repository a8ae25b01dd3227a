"""Facts about the parts of a model: two gpt-oss layers through vLLM's engine, in a child process that may hang."""

from sparkforge.plan.choose import dense_format, kv_type
from validate.facts import numerics
from validate.facts.child import run_child
from validate.facts.fact import Fact
from validate.facts.target import Target

CHILD = numerics.CHILD.with_name("layers_child.py")
SOURCE = "two gpt-oss layers of random numbers, served by validate/facts/layers_child.py"
NAMES = ("state", "differences", "linear", "head", "cache")


def gather(target: Target) -> dict[str, Fact]:
    """Every fact of the check `layers`; those that the child did not write carry how it ended. Never raises."""
    if reason := numerics.not_run(target):
        state = {"state": Fact(reason, SOURCE)}
        return {f"layers.{name}": state.get(name, Fact(None, SOURCE)) for name in NAMES}
    entries, why = run_child(CHILD, target, "the engine", target.options.numerics_seconds)
    dense, arguments = dense_format(target.options.serve_args, target.options.environ), target.options.serve_args
    known = {"state": numerics.RAN, "linear": dense.attention, "head": dense.head, "cache": kv_type(arguments)}
    return {
        "layers.differences": Fact(None, SOURCE, why),
        **{f"layers.{name}": Fact(value, "the server's arguments and variables") for name, value in known.items()},
        **{name: Fact(entry["value"], SOURCE) for name, entry in entries.items()},
    }
