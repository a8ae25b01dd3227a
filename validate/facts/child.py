"""Programs beside the validator that ask torch and vLLM, in the interpreter that will serve. They may crash or hang."""

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkforge.core.files import parse_json, read_bytes
from sparkforge.core.process import ProbeError, ask, ending
from validate.facts import checkpoint
from validate.facts.target import Target


def run_child(
    program: str | Path, target: Target, name: str, seconds: float, **request: Any
) -> tuple[dict[str, dict[str, Any]], str]:
    """Run `program` with a request for the model and the server's arguments; return its facts by name, and its failure.

    The failure is a sentence about a crash or a timeout after `seconds`; missing facts are not in the
    result. `name` is the subject of that sentence. A failure of the program is never raised.
    """
    options = target.options
    request |= {
        "model": checkpoint.path(target), "serve_args": list(options.serve_args), "layer": checkpoint.layer(target)
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="sparkforge-validate-") as folder:
        answers = Path(folder) / "answers.jsonl"
        command: list[str | Path] = [options.python, "-P", program, json.dumps(request), answers]
        try:
            answer = ask(command, seconds=seconds, env=options.environ)
        except ProbeError as error:
            return {}, str(error)
        written = {entry["name"]: entry for entry in entries(answers)}
    if answer.code is None:
        return written, f"{name} did not answer within {seconds:g} s"
    return written, f"the child process {ending(answer.code)}: {answer.last_line()}"


def entries(answers: Path) -> list[dict[str, Any]]:
    """Return the JSON objects that a child appended to `answers`, one for each line; an incomplete line is skipped."""
    objects = []
    for line in read_bytes(answers).splitlines() if answers.is_file() else ():
        with suppress(ValueError):
            value = parse_json(line, str(answers), finite=False)  # a wrong kernel gives NaN
            if isinstance(value, dict):
                objects.append(value)
    return objects
