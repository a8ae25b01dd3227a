"""Commands that measure accuracy and speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from invoke.context import Context

from sparkforge.bench.options import LOAD, OPTIONS, SERVER, SHAPE, START
from sparkforge.cli.build import build_image
from sparkforge.cli.command import CommandTask, caller_path, listed, name_or_path, task
from sparkforge.cli.serve import ServeOptions, planned
from sparkforge.core.errors import UsageError

Options = Mapping[str, Any]

# How a path among them is read: relative ones start in the caller's folder.
PATHS: dict[str, Callable[[str], str]] = {
    "tokenizer": caller_path,
    "output": caller_path,
    "result": caller_path,
    "text": name_or_path,
}


def with_options(
    names: tuple[str, ...], *positional: str, example: str
) -> Callable[[Callable[[Options], None]], CommandTask]:
    """Make a command with the options `names` of the table, which its function gets as one mapping."""

    def decorate(function: Callable[[Options], None]) -> CommandTask:
        """Return the command that calls `function`."""

        def body(_ctx: Context, **values: Any) -> None:
            """Call the function with its options; those that are paths start at the caller's folder."""
            function({name: PATHS[name](value) if name in PATHS else value for name, value in values.items()})

        kind = Parameter.POSITIONAL_OR_KEYWORD
        options = [Parameter(name, kind, default=OPTIONS[name][0]) for name in names]
        signature = Signature([Parameter("ctx", kind), *(Parameter(name, kind) for name in positional), *options])
        body.__signature__ = signature  # type: ignore[attr-defined]
        body.__name__, body.__doc__ = function.__name__, function.__doc__
        return task(example, **{name: OPTIONS[name][1] for name in names})(body)

    return decorate


def _python() -> Path:
    """Return the interpreter of the environment that has vLLM; it may not exist yet."""
    from sparkforge.environments import Environment
    from sparkforge.image.devices import EMBEDDED, stack_of

    return Environment(stack_of(EMBEDDED)).python


@with_options((*SERVER, *SHAPE, "record"), example="./inv bench.acc")
def acc(options: Options) -> None:
    """Run the accuracy gate on a served model.

    It takes the shape of a load, as the competition's command does; the gate is the same for every shape.
    """
    from sparkforge.bench import runs

    runs.run_gate(options)


@task(example="./inv bench.text", from_="a file, a folder or a URL with the text or its archive; default: the hub")
def text(_ctx: Context, from_: str = "") -> None:
    """Fetch the text that gpt-oss is scored on.

    It is wikitext-2 (raw, test), 4.7 MB, checked against its pin.
    """
    from sparkforge.bench.text import fetch

    fetch(from_ if "://" in from_ else caller_path(from_))


@with_options(LOAD, example="./inv bench.perf --isl 1024 --osl 1024 --conc 4,8")
def perf(options: Options) -> None:
    """Run the accuracy gate, then the load.

    With --isl and --osl it runs every concurrency of that shape.
    """
    from sparkforge.bench import runs

    runs.run_benchmark(options, _python())


@with_options((*LOAD, "to", "form", "result"), "team", example="./inv bench.submit my-team")
def submit(options: Options) -> None:
    """Gate, load, and post what passed.

    Posts to --to; without --to nothing leaves this machine.
    """
    from sparkforge.bench.submit import main

    main(options, _python())


@task(
    example="./inv bench.compare before.json after.json",
    before="a result, or several with commas",
    after="a result, or several with commas",
)
def compare(_ctx: Context, before: str, after: str) -> None:
    """Print which of two results is faster, if not noise.

    Each side is one result, or several with commas.
    """
    from sparkforge.bench.compare import print_comparison

    print_comparison(*(",".join(caller_path(name) for name in listed(side)) for side in (before, after)))


@task(example="./inv bench.accept result.json", result="a result file")
def accept(_ctx: Context, result: str) -> None:
    """Accept a result as the baseline of its model and shape."""
    from sparkforge.bench.compare import accept as accept_result

    accept_result(caller_path(result))


@with_options((*LOAD, *START), example="./inv bench.bakeoff --profiles safe,fast")
def bakeoff(options: Options) -> None:
    """Gate, load and rank serve profiles.

    They run one after another; those that fail the gate are not ranked. ./inv up --profile auto takes the profile that
    won. An interrupted bake-off goes on with the same command.
    """
    from sparkforge.bench import trials
    from sparkforge.serve.start import start

    names = listed(options.get("profiles", ""))
    if not names:
        why = "a bake-off compares serve profiles"
        raise UsageError("no profiles are named", why, "./inv bench.bakeoff --profiles safe,fast")
    if options["url"]:
        raise UsageError("--url is for one server", "--profiles starts its own", "leave one of them out")
    plan = planned(
        ServeOptions(
            options["device"], model=options["model"], port=options["port"], context=options["max_model_len"],
            stack=options["stack"],
        )
    )  # fmt: skip
    trials.run(names, options, plan, lambda wanted: start(wanted, build_image), _python())


@task(
    example="./inv bench.profile   # after ./inv up --profiler",
    isl="tokens in; default 512 [ISL]",
    osl="tokens out; default 32 [OSL]",
    conc="requests at once; default 4 [CONC]",
    port="port on this machine; default: where ./inv up serves [PORT]",
    limit=OPTIONS["limit"][1],
    output=OPTIONS["output"][1],
    trace="show this trace of torch's profiler, run nothing",
)
def profile(
    _ctx: Context,
    isl: str = "",
    osl: str = "",
    conc: str = "",
    port: str = "",
    limit: str = "",
    output: str = "",
    trace: str = "",
) -> None:
    """Profile a small load: which part of the model takes the time.

    The server needs ./inv up --profiler.
    """
    from sparkforge.bench.profile import main

    options = {"isl": isl, "osl": osl, "conc": conc, "port": port, "limit": limit}
    main({**options, "output": caller_path(output), "trace": caller_path(trace)})
