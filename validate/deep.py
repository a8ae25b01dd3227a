"""Deep facts: what only torch and vllm can tell. One child process with a time limit tells them all."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from validate import checkpoint, deep_child
from validate.bounded import Answer, ProbeError, ask, ending, entries
from validate.facts import Fact
from validate.scene import Scene

SOURCES = {name: source for name, source, _ in deep_child.ASKED}


def gather(scene: Scene) -> dict[str, Fact]:
    """Every deep fact; those the child did not tell carry how it ended. Never raises for what the child does."""
    options = scene.options
    with tempfile.TemporaryDirectory(prefix="sparkforge-validate-") as directory:
        answers = Path(directory) / "answers.jsonl"
        request = json.dumps({"model": checkpoint.path(scene), "serve_args": list(options.serve_args)})
        command: list[str | Path] = [options.python, "-P", Path(deep_child.__file__), request, answers]
        try:
            why = _why(ask(command, seconds=options.deep_seconds, env=options.environ), options.deep_seconds)
        except ProbeError as error:
            why = str(error)
        told = {one["name"]: Fact(one["value"], one["source"], one["error"]) for one in entries(answers)}
    return {name: told.get(name, Fact(None, source, why)) for name, source in SOURCES.items()}


def _why(answer: Answer, seconds: float) -> str:
    if answer.code is None:
        return f"torch and vllm did not answer within {seconds:g} s"
    return f"the child process {ending(answer.code)} before it could tell: {answer.last_line() or 'no output'}"
