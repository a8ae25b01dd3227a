"""The benchmark's commands, as thin as tasks.py, which names them: flags and docstrings here, the work in the rooms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module as room  # a room is loaded only by the verb that needs it
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from sparkforge.command import verb

Flags = Mapping[str, Any]

# Flag → its default and help. The upper-case name in brackets is the environment variable that stands in for it.
FLAGS: dict[str, tuple[str | bool, str]] = {
    "model": ("", "as the server names it; default: the only one it serves [MODEL]"),
    "port": ("", "port on this machine; default: where ./inv up serves, or 8000 [PORT]"),
    "url": ("", "the server, if it is not on this machine"),
    "tp": ("", "GPUs that share the model; default 1 [TP]"),
    "isl": ("", "tokens in; with --osl: every concurrency of this shape [ISL]"),
    "osl": ("", "tokens out [OSL]"),
    "conc": ("", "requests at once; with --isl --osl also a list, 4,8,16 [CONC]"),
    "max_model_len": ("", "longest sequence; default: what the server says [MAX_MODEL_LEN]"),
    "random_range_ratio": ("", "spread of lengths, 0.0 is fixed [RANDOM_RANGE_RATIO]"),
    "num_prompts": ("", "default: ten times the concurrency [NUM_PROMPTS]"),
    "result_filename": ("", "of a single configuration [RESULT_FILENAME]"),
    "warmups": ("", "requests before the clock starts; default: twice the concurrency"),
    "seed": ("", "of the prompts; default 0"),
    "client": ("", "auto, vllm (vllm bench serve) or own"),
    "tokenizer": ("", "folder of the tokenizer, for --client vllm"),
    "text": ("", "text that the gate scores: a name of bench/baselines.toml or a file"),
    "lm_eval": ("", "lm-eval tasks as further checks, with commas: gsm8k"),
    "silence": ("", "seconds without a token until a request counts as failed; default 600"),
    "limit": ("", "seconds until a load counts as failed; default 7200"),
    "output": ("", "folder for results; default .sparkforge/bench"),
    "cited": (False, "print published figures too; the report always has them"),
    "fresh": (False, "begin a new batch even where one was killed"),
    "record": (False, "measure, and print the row that makes it this model's threshold"),
    "to": ("", "where to post; without it nothing leaves this machine"),
    "form": ("", "json, or the competition's gradio or gradio-gsm8k"),
    "result": ("", "post this result, run nothing"),
    "title": ("", "of the page"),
}
SERVER = ("model", "port", "url", "silence", "text", "output", "lm_eval")
SHAPE = ("tp", "isl", "osl", "conc", "max_model_len", "random_range_ratio", "num_prompts", "result_filename")
LOAD = (*SERVER, *SHAPE, "warmups", "seed", "client", "tokenizer", "limit", "fresh", "cited")


def bench_verb(words: tuple[str, ...], flags: tuple[str, ...]) -> Callable[[Callable[[Flags], None]], Any]:
    """Make an Invoke task that takes `words` by place and `flags` of the table, and gets them as one mapping."""

    def decorate(function: Callable[[Flags], None]) -> Any:
        """Give Invoke a signature to read flags from; `function` itself takes one mapping."""

        def body(_ctx: Any, **told: Any) -> None:
            """Its name, help and signature are set below, from `function` and the table."""
            function(told)

        kind = Parameter.POSITIONAL_OR_KEYWORD
        named = [Parameter(name, kind, default=FLAGS[name][0]) for name in flags]
        signature = Signature([Parameter("ctx", kind), *(Parameter(word, kind) for word in words), *named])
        body.__signature__ = signature  # type: ignore[attr-defined]
        body.__name__, body.__doc__ = function.__name__, function.__doc__
        return verb(**{name: FLAGS[name][1] for name in flags})(body)

    return decorate


def _python() -> Path:
    """Return the interpreter of the environment that has vLLM; it need not exist."""
    path: Path = room("forge.envs").EMBEDDED.python
    return path


@bench_verb((), (*SERVER, "record"))
def acc(flags: Flags) -> None:
    """Run the accuracy gate on a served model."""
    room("bench.runs").accuracy(flags)


@bench_verb((), LOAD)
def perf(flags: Flags) -> None:
    """Run the gate, then the load; with --isl and --osl every concurrency of the shape."""
    room("bench.runs").performance(flags, _python())


@bench_verb(("team",), (*LOAD, "to", "form", "result"))
def submit(flags: Flags) -> None:
    """Gate, load, and post what passed to --to; without --to nothing is posted."""
    room("bench.submit").main(flags, _python())


@bench_verb(("before", "after"), ())
def compare(flags: Flags) -> None:
    """Say which of two results is faster, or that noise hides it; several files a side with commas."""
    room("bench.compare").show(flags["before"], flags["after"])


@bench_verb(("result",), ())
def accept(flags: Flags) -> None:
    """Make a result the one that later ones of its model and shape are held against."""
    room("bench.compare").accept(flags["result"])


@bench_verb(("file",), LOAD)
def bakeoff(flags: Flags) -> None:
    """Gate and load every server of a TOML file, one after another; rank those that pass."""
    room("bench.bakeoff").main(flags, _python())


@bench_verb(("folder",), ("output", "title"))
def leaderboard(flags: Flags) -> None:
    """Make one static page of a folder of results."""
    room("bench.leaderboard").main(flags["folder"], flags["output"], flags["title"])


@verb(
    output="JSON file for the figures",
    python="interpreter with torch and triton; default: ours",
    peer="folder with OpenAI's triton_kernels, to time it too",
    tokens="with commas; default 1 to 8192",
)
def kernels(
    _ctx: Any, output: str = "bench/results/kernels.json", python: str = "", peer: str = "", tokens: str = ""
) -> None:
    """Time one layer's experts on this GPU, for three models."""
    room("bench.kernels.layer").main(output, python, peer, tokens)


TASKS = {each.name: each for each in (acc, perf, submit, compare, accept, bakeoff, leaderboard, kernels)}
