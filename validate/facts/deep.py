"""Deep facts: what only torch and vLLM know. One child process with a time limit asks them."""

from validate.facts import deep_child
from validate.facts.child import run_child
from validate.facts.fact import Fact
from validate.facts.target import Target

SOURCES = {name: source for name, source, _ in deep_child.QUESTIONS}


def gather(target: Target) -> dict[str, Fact]:
    """Every deep fact; those that the child did not write carry how it ended. Never raises for what the child does."""
    entries, why = run_child(deep_child.__file__, target, "torch and vllm", target.options.deep_seconds)
    facts = {name: Fact(entry["value"], entry["source"], entry["error"]) for name, entry in entries.items()}
    return {name: facts.get(name, Fact(None, source, why)) for name, source in SOURCES.items()}
