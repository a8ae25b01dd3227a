"""Facts about numbers: one small MoE layer through the kernel that will serve, in a child process that may hang."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from validate import checkpoint, software
from validate.bounded import Answer, ProbeError, ask, ending, entries
from validate.facts import Fact
from validate.scene import Scene

CHILD = Path(__file__).with_name("numerics_child.py")
SOURCE = "a small MXFP4 MoE layer, run by validate/numerics_child.py"
NAMES = ("state", "kernel", "device", "tolerance", "difference", "graph_difference")
RAN, NOT_COMPILED = "ran", "not compiled"
# Stack → whose kernel runs the experts there: our plugin's, or the one that vLLM selects.
WAYS = {"embedded": "plugin"}


def gather(scene: Scene) -> dict[str, Fact]:
    """Every fact of the numerics check; those that the child did not tell carry how it ended. Never raises."""
    way = WAYS.get(scene.stack, "vllm")
    if way == "vllm" and not _compiled(scene):
        return {f"numerics.{name}": Fact(NOT_COMPILED if name == "state" else None, SOURCE) for name in NAMES}
    options = scene.options
    with tempfile.TemporaryDirectory(prefix="sparkforge-numerics-") as folder:
        answers = Path(folder) / "answers.jsonl"
        request = json.dumps({"way": way, "model": checkpoint.path(scene), "serve_args": list(options.serve_args)})
        try:
            answer = ask(
                [options.python, "-P", CHILD, request, answers], seconds=options.numerics_seconds, env=options.environ
            )
            why = _why(answer, options.numerics_seconds)
        except ProbeError as error:
            why = str(error)
        told = {one["name"]: Fact(one["value"], SOURCE) for one in entries(answers)}
    missing = {f"numerics.{name}": Fact(None, SOURCE, why) for name in NAMES}
    return {**missing, "numerics.state": Fact(RAN, SOURCE), **told}


def _compiled(scene: Scene) -> bool:
    """Whether FlashInfer's MoE module lies ready, without which the first call would compile for minutes.

    If that cannot be told, the child tells what is wrong.
    """
    try:
        return software.moe_module(scene) in software.cached_modules(scene)
    except Exception:  # noqa: BLE001 - a fact of its own says why
        return True


def _why(answer: Answer, seconds: float) -> str:
    if answer.code is None:
        return f"the layer did not come back within {seconds:g} s"
    return f"the child process {ending(answer.code)}: {answer.last_line() or 'no output'}"
