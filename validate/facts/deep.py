"""Deep facts, which only torch and vLLM know: a child process with a time limit queries them."""

from pathlib import Path

from validate.facts import deep_child
from validate.facts.child import Outcome, Program
from validate.facts.fact import Fact
from validate.facts.target import Target

SOURCES = {name: source for name, source, _ in deep_child.QUESTIONS}
IMPORTS = ("torch", "vllm.engine.arg_utils", "vllm.utils.argparse_utils", *deep_child.OPTION_MODULES)


def program(target: Target) -> Program:
    """Return the program that queries torch and vLLM."""
    return Program(Path(deep_child.__file__), "torch and vllm", target.options.deep_seconds, IMPORTS)


def facts(_target: Target, outcome: Outcome) -> dict[str, Fact]:
    """Return every deep fact; missing facts have the reason why the child ended."""
    known = {name: Fact(entry["value"], entry["source"], entry["error"]) for name, entry in outcome.entries.items()}
    return {name: known.get(name, Fact(None, source, outcome.why)) for name, source in SOURCES.items()}
