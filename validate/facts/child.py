"""Child programs of the validator that query torch and vLLM in the server's interpreter. They may crash or hang.

Importing vLLM takes longer than the queries, so one process imports it and each program runs in a fork of that process.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sparkforge.core.files import parse_json, read_bytes
from sparkforge.core.process import ProbeError, ask, ending, last_line
from validate.facts import checkpoint
from validate.facts.fact import Fact
from validate.facts.target import Target

FORKS = Path(__file__).with_name("forks_child.py")
IMPORT_SECONDS, FORK_SECONDS = 120.0, 10.0


class Program(NamedTuple):
    """A program: its file, the subject of a sentence about its failure, its time limit, and additions to its request.

    `imports` are the modules that are imported before its fork, if possible.
    """

    file: Path
    subject: str
    seconds: float
    imports: Sequence[str]
    request: Mapping[str, Any] = {}


class Outcome(NamedTuple):
    """The facts that a program wrote, by name, a sentence about its crash or timeout, and the seconds it took."""

    entries: Mapping[str, dict[str, Any]] = {}
    why: str = ""
    seconds: float = 0.0


class Asks(Protocol):
    """A module of facts with a program; if `program` returns None, `facts` gets an empty outcome."""

    def program(self, target: Target) -> Program | None:
        """Return the program that gathers facts; None if none is needed."""

    def facts(self, target: Target, outcome: Outcome) -> dict[str, Fact]:
        """Return every fact of the module; missing facts have the reason why the program ended."""


def gather(target: Target, *modules: Asks) -> tuple[dict[str, Fact], list[float]]:
    """Return the facts of the modules' programs, and each program's seconds. A program's failure is never raised."""
    programs = [module.program(target) for module in modules]
    outcomes = iter(run_programs(target, [program for program in programs if program]))
    facts: dict[str, Fact] = {}
    seconds = []
    for module, program in zip(modules, programs, strict=True):
        outcome = next(outcomes) if program else Outcome()
        facts |= module.facts(target, outcome)
        seconds.append(outcome.seconds)
    return facts, seconds


def run_programs(target: Target, programs: Sequence[Program]) -> list[Outcome]:
    """Run the programs one after another, each with a request for the model and the server's arguments.

    If the imports crash or hang, each program imports separately, so that its queries before the crash are answered.
    """
    if not programs:
        return []
    outcomes, is_done = _run(target, programs, IMPORT_SECONDS)
    if not is_done and any(program.imports for program in programs):
        outcomes, _ = _run(target, [program._replace(imports=()) for program in programs], 0.0)
    return outcomes


def _run(target: Target, programs: Sequence[Program], import_seconds: float) -> tuple[list[Outcome], bool]:
    options = target.options
    common = {
        "model": checkpoint.path(target), "serve_args": list(options.serve_args), "layer": checkpoint.layer(target)
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="sparkforge-validate-") as folder:
        files = [Path(folder) / str(number) for number in range(len(programs))]
        plan = [
            {
                "program": str(program.file),
                "request": json.dumps({**common, **program.request}),
                "seconds": program.seconds,
                "files": str(file),
                "imports": list(program.imports),
            }
            for program, file in zip(programs, files, strict=True)
        ]
        (Path(folder) / "plan.json").write_text(json.dumps(plan))
        command: list[str | Path] = [options.python, "-P", FORKS, Path(folder) / "plan.json"]
        limit = import_seconds + sum(program.seconds for program in programs) + FORK_SECONDS
        try:
            answer = ask(command, seconds=limit, env=options.environ)
        except ProbeError as error:
            return [Outcome(why=str(error)) for _ in programs], True
        outcomes = []
        for program, file in zip(programs, files, strict=True):
            ends, code, seconds, printed = entries(file.with_suffix(".end")), answer.code, 0.0, answer.last_line()
            if ends:
                code, seconds = ends[0]["code"], ends[0]["seconds"]
                printed = last_line(file.with_suffix(".output").read_text(errors="replace"))
            late = f"{program.subject} did not answer within {program.seconds:g} s"
            why = late if code is None else f"the child process {ending(code)}: {printed}"
            written = {entry["name"]: entry for entry in entries(file.with_suffix(".answers"))}
            outcomes.append(Outcome(written, why, seconds))
        return outcomes, files[0].with_suffix(".end").exists()


def entries(answers: Path) -> list[dict[str, Any]]:
    """Return the JSON objects that a child appended to `answers`, one for each line; an incomplete line is skipped."""
    objects = []
    for line in read_bytes(answers).splitlines() if answers.is_file() else ():
        with suppress(ValueError):
            value = parse_json(line, str(answers), finite=False)  # a wrong kernel gives NaN
            if isinstance(value, dict):
                objects.append(value)
    return objects
