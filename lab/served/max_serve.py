"""Measures Modular's MAX serving gpt-oss with packed experts on this machine's GPU, from graphs compiled elsewhere.

`python -m lab.served.max_serve ACTION MODEL ...` with one of four actions:
- `compile MODEL --compiled DIR` compiles the model's graphs for a GPU that is not here, with the options of serving;
- `reference MODEL --out FILE.json` writes the greedy tokens that transformers gives in float32, on a CPU;
- `tokens MODEL --compiled DIR --against FILE.json --out OUT.json` serves the model and compares its tokens;
- `speed MODEL --compiled DIR --out OUT.json` serves it and asks for a fixed number of tokens at each concurrency.
Every figure is written at once, so that a run that is cut short keeps them. `random_checkpoint` writes a model of real
size. `--format dequant` takes MAX's own experts, which are expanded in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.served import random_load
from sparkforge.bench.context import facts
from sparkforge.core import gpus, interrupt, openai
from sparkforge.core.console import say, show_error
from sparkforge.core.documents import read_json
from sparkforge.core.errors import ProcessError, ServerError, SparkforgeError, UsageError
from sparkforge.core.files import write_json
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.core.process import ProbeError, call, spawn, started_at, terminate_session
from sparkforge.serve.devices import max_server

SERVED_NAME = "measured"
LOAD_SECONDS = 300.0  # for one load
WARM_UP_TOKENS = 16
CORPUS = ROOT / "sparkforge" / "bench" / "corpus" / "persuasion-24.txt"
# Of lab/tests/max/test_serve.py: tokens of the prompts, of the answers, and how far the reference's token may lead the
# second one where they part.
LENGTHS = (8, 63, 127, 128, 129, 139, 173, 300)
GENERATED = 32
LEAD = 0.1
PATH = {"packed": "ours: experts stay packed", "dequant": "MAX's own: experts are expanded in memory at every step"}
REFUSALS = ("exceeds", "don't leave room", "out of memory", "OutOfMemory", "Error")


def serving_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Return what `max warm-cache` and `max serve` must be given alike, for the graphs to be the same."""
    return (
        "--model-path", str(options.model.absolute()), "--custom-architectures", options.architecture,
        "--devices", options.device, *(("--quantization-encoding", "float32") if options.device == "cpu" else ()),
        "--max-length", str(options.max_length), "--max-batch-size", str(options.max_batch_size),
        "--device-memory-utilization", str(options.memory), *options.extra,
    )  # fmt: skip


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of MAX's programs."""
    return {**os.environ, **max_server.variables(), "SPARK_MXFP4_QUANTIZATION_FORMAT": options.format}


def compile_graphs(options: argparse.Namespace) -> None:
    """Write the model's compiled graphs into the folder `--compiled`. Raises ProcessError."""
    command = [*options.max, "warm-cache", *serving_options(options)]
    target = () if options.device == "cpu" else ("--target", options.target)
    command += [*target, "--export-mefs", str(options.compiled.absolute())]
    if code := call(command, cwd=ROOT, env=environment(options)):
        raise ProcessError("MAX ended", f"exit code {code}", "read its output above", code="process.failed")


def write_reference(options: argparse.Namespace) -> None:
    """Write, for each prompt, transformers' greedy tokens in float32 and by how much each leads the second one."""
    import torch  # noqa: PLC0415 - only here; where MAX serves there may be none
    from transformers import AutoTokenizer  # noqa: PLC0415

    from spark_mxfp4 import hf  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = tokenizer(CORPUS.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    model = hf.load_packed(str(options.model), dtype=torch.float32, attn_implementation="eager").eval()
    rows = []
    for length in LENGTHS:
        output = model.generate(
            torch.tensor([tokens[:length]]), max_new_tokens=GENERATED, do_sample=False, eos_token_id=None,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        ids = output.sequences[0, length:].tolist()
        best = [scores[0].topk(2).values.tolist() for scores in output.scores]
        rows.append(
            {
                "prompt": tokens[:length],
                "texts": [tokenizer.decode(ids[: count + 1]) for count in range(GENERATED)],  # of the first 1, 2, ...
                "leads": [round(first - second, 4) for first, second in best],
            }
        )
    write_json(options.out, {"reference": "transformers in float32 on a CPU, greedy", "rows": rows})


@contextmanager
def served(options: argparse.Namespace, result: dict[str, Any]) -> Iterator[str]:
    """Serve the model; yield its URL once it has answered, and end it. `result` gets what was seen of the start.

    Raises ServerError if it ends or is not ready in time.
    """
    result |= {"options": " ".join(serving_options(options)[4:]), "path": PATH[options.format]}
    command = [*options.max, "serve", *serving_options(options), "--precompiled-mefs", str(options.compiled.absolute())]
    where = ("--host", "127.0.0.1", "--port", str(options.port), "--served-model-name", SERVED_NAME)
    url = f"http://127.0.0.1:{options.port}"
    options.log.unlink(missing_ok=True)
    begun = time.monotonic()
    pid = spawn([*command, *where], log=options.log, env=environment(options), cwd=options.log.parent.absolute())

    def alive() -> bool:
        return started_at(pid) is not None

    try:
        if not openai.wait_until(Endpoint(url).healthy, begun + options.ready_seconds, alive):
            problem = f"was not ready in {options.ready_seconds:.0f} s" if alive() else "ended before it was ready"
            raise ServerError(f"MAX {problem}", _said(options.log), f"less {options.log}", code="server.start")
        result["ready_s"] = round(time.monotonic() - begun, 1)
        Endpoint(url, SERVED_NAME, key="").first_token(options.ready_seconds)
        result |= {"first_token_s": round(time.monotonic() - begun, 1), "gpu_memory": _memory()}
        yield url
    finally:
        terminate_session(pid)


def _said(log: Path) -> str:
    """Return the last lines of MAX's log that say why it ended."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join([line[-600:] for line in lines if any(word in line for word in REFUSALS)][-3:]) or "no error"


def _memory() -> dict[str, str]:
    """Return the GPU's memory as nvidia-smi has it; nothing where there is none."""
    try:
        return gpus.query("memory.used", "memory.free", "memory.total")[0]
    except ProbeError:
        return {}


def compare_tokens(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Add, for each prompt, how many of the reference's tokens the server gives, and the reference's lead there.

    Raises ServerError.
    """
    rows = result.setdefault("rows", [])
    with served(options, result) as url:
        endpoint = Endpoint(url, SERVED_NAME, key="")
        for row in read_json(options.against)["rows"]:
            answer = endpoint.complete(row["prompt"], max_tokens=GENERATED, temperature=0, ignore_eos=True)
            text = answer["choices"][0]["text"]
            equal = sum(text.startswith(beginning) for beginning in row["texts"])
            compared = {"prompt_tokens": len(row["prompt"]), "equal_tokens": equal, "of": GENERATED}
            compared |= {"lead_of_the_reference": row["leads"][equal]} if equal < GENERATED else {}
            rows.append({**compared, "text": text, "counted": answer["usage"]["completion_tokens"]})
            _tell(options, result, rows[-1])
    result["passed"] = all(row.get("lead_of_the_reference", 0.0) < LEAD for row in rows)
    _tell(options, result, {"passed": result["passed"]})


def measure_speed(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Add a row for each length of prompts and each concurrency. Raises ServerError."""
    rows = result.setdefault("rows", [])
    with served(options, result) as url:
        _tell(options, result, {key: result[key] for key in ("ready_s", "gpu_memory")})
        for length in options.input:
            for concurrency in options.concurrency:
                _load(url, concurrency, concurrency, length, WARM_UP_TOKENS, "warm-up")
                requests = concurrency * options.rounds
                rows.append(_load(url, concurrency, requests, length, options.output, "measured"))
                _tell(options, result, rows[-1])
        result["gpu_memory_at_the_end"] = _memory()
        _tell(options, result, result["gpu_memory_at_the_end"])


def _load(url: str, concurrency: int, requests: int, length: int, answer: int, seed: str) -> dict[str, Any]:
    endpoint = Endpoint(url, SERVED_NAME, key="")
    return random_load.measure(endpoint, concurrency, requests, length, answer, seconds=LOAD_SECONDS, seed=seed)


def _tell(options: argparse.Namespace, result: dict[str, Any], news: dict[str, Any]) -> None:
    """Write the result and say what is new in it."""
    write_json(options.out, result)
    say(json.dumps({key: value for key, value in news.items() if key != "text"}))


def main(arguments: Sequence[str]) -> int:
    """Do what the command line names; return the exit code."""
    options = _parser().parse_args(arguments)
    options.log = options.log or options.out.with_suffix(".log")
    actions = {"tokens": compare_tokens, "speed": measure_speed}
    try:
        _check(options)
        with interrupt.caught():  # the server has a session of its own: it ends with us only if we end it
            if options.action == "compile":
                compile_graphs(options)
            elif options.action == "reference":
                write_reference(options)
            else:
                result: dict[str, Any] = {"machine": facts()}
                try:
                    actions[options.action](options, result)
                except ServerError as error:
                    result["error"] = {"what": error.what, "why": error.why}
                    write_json(options.out, result)
                    raise
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError if what the action starts from is not there."""
    if not options.model.is_dir():
        fix = "name a checkpoint's folder; random_checkpoint writes one"
        raise UsageError(f"{options.model} cannot be measured", "it is no folder", fix)
    if options.action == "tokens" and not (options.against and options.against.is_file()):
        why = f"{options.against} is no file" if options.against else "no file of its tokens is named by --against"
        raise UsageError("there is nothing to compare with", why, "let `reference` write it: --out FILE.json")
    if options.action != "reference" and shutil.which(options.max[0]) is None:
        fix = "./inv max.up --device cpu brings MAX, or name the program: --max PROGRAM"
        raise UsageError("MAX cannot be started", f"there is no program {options.max[0]}", fix)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.served.max_serve", description=__doc__)
    parser.add_argument("action", choices=["compile", "reference", "tokens", "speed"])
    parser.add_argument("model", type=Path, help="folder of a gpt-oss checkpoint")
    parser.add_argument("--out", type=Path, default=Path("max-serve.json"), help="file of the result")
    parser.add_argument("--log", type=Path, help="file of MAX's output; default: beside the result")
    parser.add_argument("--compiled", type=Path, default=Path("compiled"), help="folder of compiled graphs")
    parser.add_argument("--against", type=Path, help="file that `reference` wrote")
    parser.add_argument("--max", nargs="+", default=[str(max_server.MAX.path / "bin" / "max")], help="MAX's program")
    parser.add_argument(
        "--architecture", default=max_server.ARCHITECTURE, help="FOLDER:MODULE of --custom-architectures"
    )
    parser.add_argument("--format", default="packed", choices=list(PATH), help="packed: ours; dequant: MAX's own")
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"], help="cpu: in float32, for a small model")
    parser.add_argument("--target", default="cuda:sm_90a", help="of compile")
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--memory", type=float, default=0.98, help="share of the memory that MAX's driver calls free")
    parser.add_argument("--extra", nargs="*", default=[], help="more options of MAX, for compile and serving alike")
    parser.add_argument("--input", nargs="+", type=int, default=[128, 1024], help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3, help="requests a concurrency: this many times the concurrency")
    parser.add_argument("--ready-seconds", type=float, default=180, help="how long MAX may take to start")
    parser.add_argument("--port", type=int, default=8124)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
