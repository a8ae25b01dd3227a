"""Child programs of the validator that query torch and vLLM in the server's interpreter. They may crash or hang.

Importing vLLM takes longer than the queries, so one process imports it and each program runs in a fork of that process.
The programs are DEEP (facts from torch and vLLM), NUMERICS (one small mixture-of-experts layer with the server's
kernel) and LAYERS (two gpt-oss layers through vLLM's engine).
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sparkforge.core import gpus
from sparkforge.core.files import parse_json, read_bytes
from sparkforge.core.process import ProbeError, ask, ending, last_line
from sparkforge.plan import families
from sparkforge.plan.choose import dense_format, kv_type
from validate.facts import checkpoint, deep_child, software
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
    """The facts that a program wrote, by name; a sentence about its crash or timeout (`why`); and its seconds."""

    entries: Mapping[str, dict[str, Any]] = {}
    why: str = ""
    seconds: float = 0.0


class Asks(NamedTuple):
    """A program and its facts. `program` returns None if the program is not needed.

    `facts` returns all facts from the program's outcome; missing facts have the reason why the program ended.
    """

    program: Callable[[Target], Program | None]
    facts: Callable[[Target, Outcome], dict[str, Fact]]


def gather(target: Target, *asked: Asks) -> tuple[dict[str, Fact], list[float]]:
    """Return the programs' facts, and each program's seconds. A program's failure is never raised."""
    programs = [asks.program(target) for asks in asked]
    outcomes = iter(run_programs(target, [program for program in programs if program]))
    facts: dict[str, Fact] = {}
    seconds = []
    for asks, program in zip(asked, programs, strict=True):
        outcome = next(outcomes) if program else Outcome()
        facts |= asks.facts(target, outcome)
        seconds.append(outcome.seconds)
    return facts, seconds


def run_programs(target: Target, programs: Sequence[Program]) -> list[Outcome]:
    """Run the programs one after another, each with a request for the model and the server's arguments.

    If the imports crash or hang, each program does its own imports, so that its queries before the crash are answered.
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
    """Return the JSON objects that a child appended to `answers`, one per line; an incomplete line is skipped."""
    objects = []
    for line in read_bytes(answers).splitlines() if answers.is_file() else ():
        with suppress(ValueError):
            value = parse_json(line, str(answers), finite=False)  # a wrong kernel gives NaN
            if isinstance(value, dict):
                objects.append(value)
    return objects


SOURCES = {name: source for name, source, _ in deep_child.QUESTIONS}
IMPORTS = ("torch", "vllm.engine.arg_utils", "vllm.utils.argparse_utils", *deep_child.OPTION_MODULES)


def _deep(target: Target) -> Program:
    return Program(Path(deep_child.__file__), "torch and vllm", target.options.deep_seconds, IMPORTS)


def _deep_facts(_target: Target, outcome: Outcome) -> dict[str, Fact]:
    known = {name: Fact(entry["value"], entry["source"], entry["error"]) for name, entry in outcome.entries.items()}
    return {name: known.get(name, Fact(None, source, outcome.why)) for name, source in SOURCES.items()}


DEEP = Asks(_deep, _deep_facts)


NUMERICS_CHILD = FORKS.with_name("numerics_child.py")
NUMERICS_SOURCE = "a small MXFP4 MoE layer, run by validate/facts/numerics_child.py"
NUMERICS_NAMES = ("state", "kernel", "device", "tolerance", "difference", "graph_difference", "charged", "loaded")
RAN, NOT_COMPILED, OTHER = "ran", "not compiled", "other experts"
EAGER = "cuda, eager"  # the fact numerics.device for a GPU with a kernel that does not support CUDA graphs
PLUGIN, VLLM = "plugin", "vllm"  # the origin of the experts' kernel: our plugin, or vLLM's selection


def _numerics(target: Target) -> Program | None:
    if not_run(target):
        return None
    way = way_of(target)
    imports = IMPORTS if way == VLLM else ("torch",)
    request = {"way": way, "gpu_fields": gpus.STATE_FIELDS}
    return Program(NUMERICS_CHILD, "the layer", target.options.numerics_seconds, imports, request)


def _numerics_facts(target: Target, outcome: Outcome) -> dict[str, Fact]:
    if why := not_run(target):
        return {f"numerics.{name}": Fact(why if name == "state" else None, NUMERICS_SOURCE) for name in NUMERICS_NAMES}
    missing = {f"numerics.{name}": Fact(None, NUMERICS_SOURCE, outcome.why) for name in NUMERICS_NAMES}
    computed = {name: Fact(entry["value"], NUMERICS_SOURCE) for name, entry in outcome.entries.items()}
    return {**missing, "numerics.state": Fact(RAN, NUMERICS_SOURCE), **computed}


NUMERICS = Asks(_numerics, _numerics_facts)


def way_of(target: Target) -> str:
    """Return the origin of the experts' kernel, PLUGIN or VLLM, from the stack, the arguments and the variables."""
    if target.stack == "embedded":
        return PLUGIN
    named = target.argument("--quantization") == "spark-mxfp4"
    return PLUGIN if named and target.options.environ.get("SPARK_MXFP4_KERNEL") != VLLM else VLLM


def not_run(target: Target) -> str:
    """Return the reason why the layer is not run; empty if it is run, or if the child must report an error.

    The layer has experts of the default family. Without FlashInfer's compiled module its first call takes minutes.
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


LAYERS_CHILD = FORKS.with_name("layers_child.py")
LAYERS_SOURCE = "two gpt-oss layers of random numbers, served by validate/facts/layers_child.py"
LAYERS_NAMES = ("state", "differences", "linear", "head", "cache")
ENGINE_IMPORTS = (
    *IMPORTS, "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.layers.fused_moe.layer", "vllm.model_executor.model_loader",
)  # fmt: skip


def _layers(target: Target) -> Program | None:
    seconds = target.options.numerics_seconds
    return None if not_run(target) else Program(LAYERS_CHILD, "the engine", seconds, ENGINE_IMPORTS)


def _layers_facts(target: Target, outcome: Outcome) -> dict[str, Fact]:
    if reason := not_run(target):
        state = {"state": Fact(reason, LAYERS_SOURCE)}
        return {f"layers.{name}": state.get(name, Fact(None, LAYERS_SOURCE)) for name in LAYERS_NAMES}
    dense, arguments = dense_format(target.options.serve_args, target.options.environ), target.options.serve_args
    known = {"state": RAN, "linear": dense.attention, "head": dense.head, "cache": kv_type(arguments)}
    return {
        "layers.differences": Fact(None, LAYERS_SOURCE, outcome.why),
        **{f"layers.{name}": Fact(value, "the server's arguments and variables") for name, value in known.items()},
        **{name: Fact(entry["value"], LAYERS_SOURCE) for name, entry in outcome.entries.items()},
    }


LAYERS = Asks(_layers, _layers_facts)
