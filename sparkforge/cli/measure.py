"""Commands that measure accuracy and speed."""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

from invoke.context import Context

from sparkforge.bench.options import COMMANDS, HUB, OPTIONS, Option
from sparkforge.cli.build import build_image
from sparkforge.cli.command import CommandTask, caller_path, caller_paths, in_laboratory, listed, name_or_path, task
from sparkforge.cli.serve import ServeOptions, planned
from sparkforge.core.errors import UsageError

Options = Mapping[str, Any]

# Options that are paths: a relative path starts in the caller's folder.
PATHS: dict[str, Callable[[str], str]] = {
    "output": caller_path,
    "result": caller_path,
    "trace": caller_path,
    "text": name_or_path,
    "fetch_text": lambda source: source if source == HUB else caller_path(source),
}


def with_options(
    names: tuple[str, ...], *positional: str, example: str, **texts: str
) -> Callable[[Callable[[Options], None]], CommandTask]:
    """Return a decorator that makes a command with the table's options `names`; the function gets a mapping of values.

    `texts` are help texts that replace the table's, and those of options that the table lacks.
    """

    def decorate(function: Callable[[Options], None]) -> CommandTask:
        def body(_ctx: Context, **values: Any) -> None:
            function({name: PATHS[name](value) if name in PATHS else value for name, value in values.items()})

        kind, table = Parameter.POSITIONAL_OR_KEYWORD, {name: OPTIONS.get(name, Option("")) for name in names}
        options = [Parameter(name, kind, default=False if row.flag else "") for name, row in table.items()]
        signature = Signature([Parameter("ctx", kind), *(Parameter(name, kind) for name in positional), *options])
        body.__signature__ = signature  # type: ignore[attr-defined]
        body.__name__, body.__doc__ = function.__name__, function.__doc__
        return task(example, options=None, **{name: row.help_text for name, row in table.items()} | texts)(body)

    return decorate


@with_options(COMMANDS["accuracy"], example="./inv bench.acc --fetch-text hub   # the first time")
def acc(options: Options) -> None:
    """Run the accuracy gate on a served model.

    It accepts the shape of a load, as the gpt-oss competition's command does; the gate is the same for every shape. The
    text that gpt-oss is scored on is wikitext-2 (raw, test), 4.7 MB, checked against its pin.
    """
    from sparkforge.bench import runs

    runs.run_gate(options)


@with_options(COMMANDS["load"], example="./inv bench.perf --isl 1024 --osl 1024 --conc 4,8")
def perf(options: Options) -> None:
    """Run the accuracy gate, then the load.

    With --isl and --osl it runs every concurrency of that shape.
    """
    from sparkforge.bench import runs

    runs.run_benchmark(options)


@with_options(COMMANDS["submit"], "team", example="./inv bench.submit my-team", team="the team's name on the board")
def submit(options: Options) -> None:
    """Run the gate and the load, and post a result that passed.

    Posts to --to; without --to nothing leaves this machine.
    """
    from sparkforge.bench.submit import main

    main(options)


@task(
    example="./inv bench.compare before.json after.json",
    before="a result, or several, comma-separated",
    after="a result, or several, comma-separated",
)
def compare(_ctx: Context, before: str, after: str) -> None:
    """Print which of two results is faster, beyond noise.

    Each side is one result file, or several of the same load, separated by commas.
    """
    from sparkforge.bench import compare as comparison

    comparison.print_comparison(*(",".join(map(str, caller_paths(side))) for side in (before, after)))


@with_options((*COMMANDS["load"], *COMMANDS["start"]), example="./inv bench.bakeoff --profiles safe,fast")
def bakeoff(options: Options) -> None:
    """Measure and rank serve profiles.

    They run one after another; those that fail the gate are not ranked.
    """
    from sparkforge.bench.bakeoff import run
    from sparkforge.serve.devices.choose import device_for
    from sparkforge.serve.devices.device import start

    if options["url"]:
        raise UsageError("--url is for one server", "--profiles starts its own", "without --url")
    names = {name: options[name] for name in ("model", "port", "stack")}
    device, context = options["device"] or OPTIONS["device"].default, options["max_model_len"]
    plan = planned(ServeOptions(device, context=context, **names))
    run(listed(options["profiles"]), options, plan, lambda wanted: start(device_for(wanted, build_image)))


@with_options(
    ("isl", "osl", "conc", "port", "limit", "output", "trace"),
    example="./inv bench.profile   # after ./inv up --profiler",
    isl="prompt tokens; default 512 [ISL]",
    osl="answer tokens; default 32 [OSL]",
    conc="requests at once; default 4 [CONC]",
    port="port on this machine; default: where ./inv up serves [PORT]",
    trace="show this trace of torch's profiler, and run nothing",
)
def profile(options: Options) -> None:
    """Profile a small load: the time of each part of the model.

    The server needs ./inv up --profiler.
    """
    in_laboratory("profile", *(f"--{name}={value}" for name, value in options.items() if value))
