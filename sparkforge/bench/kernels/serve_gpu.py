"""Measures vLLM serving a gpt-oss of real size with made-up weights, one backend after another, on this machine's GPU.

`python -m sparkforge.bench.kernels.serve_gpu --out FILE.json` starts a server for each backend, asks it for a fixed
number of tokens at each concurrency, and ends it. Every figure is written at once, so that a run that is cut short
keeps them. The model is `sparkforge.models.dummy`'s: right shapes, random experts; its speed is realistic, its answers
mean nothing.
`--sweep 4 8 16` then sends 1k/1k through the whole harness (`bench.runs`: gate, load, report) while the server is up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sparkforge.bench import runs
from sparkforge.bench.endpoint import Endpoint
from sparkforge.bench.kernels import random_weights, tiny_tokens
from sparkforge.bench.load import Prompt, require_answers, send
from sparkforge.bench.machine import gpus
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import ServerError, SparkforgeError, UsageError
from sparkforge.core.files import write_json
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run, spawn, started_at, terminate_session
from sparkforge.serve import client, command_line
from sparkforge.serve.command_line import ServerCommand

VOCABULARY = 199998  # ordinary tokens of gpt-oss; the special ones lie above
SERVED_NAME = "random-gpt-oss"
LOAD_SECONDS = 3600.0  # for one load


@dataclass(frozen=True)
class Backend:
    """The arguments and environment that choose a backend, and the text in vLLM's log that shows its use."""

    arguments: tuple[str, ...]
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)


def backend_of(name: str) -> Backend:
    """Return the backend of that name; `spark:KERNEL` is ours with a kernel of your choice.

    Raises UsageError for a name that is neither.
    """
    known, _, kernel = name.partition(":")
    if known not in BACKENDS or (kernel and known != "spark"):
        raise UsageError(f"there is no backend {name!r}", f"known are {', '.join(BACKENDS)}, spark:KERNEL", "name one")
    if not kernel:
        return BACKENDS[known]
    log = f"Using 'SPARK_{kernel.upper()}'"
    return Backend(BACKENDS[known].arguments, log, {"SPARK_MXFP4_KERNEL": kernel})


def _dense(linear: str, head: str, router: str = "") -> Backend:
    """Return our experts with attention and LM head in two formats of the plugin, and with its router if named."""
    log = f"Dense layers (SPARK_MXFP4_LINEAR) are {linear.upper()}, by our kernels"
    formats = {"SPARK_MXFP4_LINEAR": linear, "SPARK_MXFP4_LM_HEAD": head, "SPARK_MXFP4_ROUTER": router}
    return Backend(("--quantization", "spark-mxfp4"), ROUTER_LOG if router else log, formats)


ROUTER_LOG = "Routers of up to 16 tokens run in one launch"
BACKENDS: Mapping[str, Backend] = {
    "spark": Backend(("--quantization", "spark-mxfp4"), "Using 'SPARK_"),
    "spark-dense-8": _dense("mxfp8", "mxfp8"),
    "spark-dense-4": _dense("mxfp4", "mxfp8"),
    "spark-all-4": _dense("mxfp4", "mxfp4"),
    "spark-all-4-router": _dense("mxfp4", "mxfp4", "fused"),
    "triton-fp8": Backend(
        ("--moe-backend", "triton", "--quantization-config.linear", "fp8_per_channel"),
        "for Fp8PtpcOnlineLinearMethod",
    ),
    "triton": Backend(("--moe-backend", "triton"), "Using 'TRITON"),
    "marlin": Backend(("--moe-backend", "marlin"), "Using 'MARLIN"),
    "flashinfer_cutlass": Backend(("--moe-backend", "flashinfer_cutlass"), "Using 'FLASHINFER_CUTLASS"),
}


@dataclass(frozen=True)
class ServingPlan:
    """What is measured: prompt and output tokens of each request, concurrencies, and how long each step may take."""

    input_tokens: int
    output_tokens: int
    concurrencies: tuple[int, ...]
    rounds: int
    ready_seconds: float
    port: int
    weights: str = random_weights.FORMAT
    long_concurrencies: tuple[int, ...] = ()  # once more, one round, with answers as long as the prompts
    sweep: tuple[int, ...] = ()  # concurrencies that go through the harness
    client: str = "auto"  # of the harness


def measure(backend: str, model: Path, plan: ServingPlan, log: Path) -> Iterator[dict[str, Any]]:
    """Serve `model` with one backend; yield how long the start took, then one row a concurrency.

    Raises ServerError if the server ends, is not ready in time, or chose another backend. Ends it in any case.
    """
    start = time.monotonic()
    with _server(backend, model, plan, log, ("--load-format", plan.weights)) as url:
        yield {"ready_s": round(time.monotonic() - start, 1), "backend_line": _chosen(backend, log)}
        for concurrency in plan.concurrencies:
            _load(url, concurrency, concurrency, plan.input_tokens, min(16, plan.output_tokens))  # warm-up
            yield _load(url, concurrency, concurrency * plan.rounds, plan.input_tokens, plan.output_tokens)
        for concurrency in plan.long_concurrencies:
            yield _load(url, concurrency, concurrency, plan.input_tokens, plan.input_tokens)
        if plan.sweep:
            yield {"harness": _sweep(url, model, plan, log.parent / f"harness-{backend.replace(':', '-')}")}


def _sweep(url: str, model: Path, plan: ServingPlan, output: Path) -> str:
    """Send 1k/1k at the plan's concurrencies through the harness; return the report's path or why there is none."""
    numbers = ",".join(map(str, plan.sweep))
    shape = {"isl": "1024", "osl": "1024", "conc": numbers, "client": plan.client, "tokenizer": str(model)}
    try:
        return str(runs.measure({"url": url, "output": str(output), **shape}, Path(sys.executable)).page)
    except SparkforgeError as error:
        show_error(error)
        return f"failed: {error}"


@contextmanager
def _server(backend: str, model: Path, plan: ServingPlan, log: Path, weights: tuple[str, ...] = ()) -> Iterator[str]:
    chosen = backend_of(backend)
    top = max(plan.concurrencies)
    sizes = sorted({1, 2, 4, 8, 16, 32, 64, *plan.concurrencies})
    longest = max(2048, plan.input_tokens + max(plan.input_tokens, plan.output_tokens) + 16)
    # The plugin's metadata and our packages, without the checkout's root: this interpreter may have none installed.
    folder = random_weights.write_entry_point(log.parent / "plugin")
    for package in ("sparkforge", "spark_mxfp4", "validate"):
        if not (folder / package).is_symlink():
            (folder / package).symlink_to(ROOT / package)
    python_path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    server = ServerCommand(
        model=str(model),
        model_id=SERVED_NAME,
        host="127.0.0.1",
        port=plan.port,
        extra_arguments=(
            *weights,
            *("--max-model-len", str(longest), "--max-num-seqs", str(top), "--no-enable-prefix-caching"),
            *("--cudagraph-capture-sizes", *(str(size) for size in sizes if size <= max(64, top))),
            *chosen.arguments,
        ),
        extra_environment={
            "PYTHONPATH": python_path,
            "VLLM_PLUGINS": f"{command_line.ENVIRONMENT['VLLM_PLUGINS']},{random_weights.PLUGIN}",
            **chosen.environment,
        },
        guarded=False,
    )
    url, deadline = f"http://127.0.0.1:{plan.port}", time.monotonic() + plan.ready_seconds
    pid = spawn(server.command(sys.executable), log=log, env={**os.environ, **server.environment}, cwd=log.parent)
    try:
        if not client.wait_until_healthy(lambda: client.healthy(url), deadline, lambda: started_at(pid) is not None):
            late = f"was not ready in {plan.ready_seconds:.0f} s"
            problem = late if started_at(pid) else "ended before it was ready"
            raise ServerError(f"the server {problem}", _last_words(log), f"less {log}", code="server.start")
        client.first_token(url, SERVED_NAME, plan.ready_seconds)
        yield url
    finally:
        terminate_session(pid)


def _chosen(backend: str, log: Path) -> str:
    """Return the log's line on the backend. Raises ServerError if it names another than `backend`."""
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if "Mxfp4 MoE backend" in line]
    used = next((line[line.index("Using '") :] for line in lines if "Using '" in line), "")
    if backend_of(backend).log not in text:
        raise ServerError(
            f"the server did not take {backend}", used or "its log names no backend", f"less {log}", code="server.start"
        )
    return used


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else "its log has no error"


def _load(url: str, concurrency: int, requests: int, input_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Keep `concurrency` requests in flight until `requests` are done; return rates and median times in ms.

    Raises ServerError if a request fails.
    """
    rng = random.Random(concurrency)  # noqa: S311 (prompts, not secrets)
    prompts = [Prompt([rng.randrange(VOCABULARY) for _ in range(input_tokens)], output_tokens) for _ in range(requests)]
    load = require_answers(send(Endpoint(url, SERVED_NAME, key=""), prompts, concurrency, LOAD_SECONDS))
    return {
        "concurrency": concurrency,
        "requests": requests,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "seconds": round(load.duration, 3),
        "output_tokens_per_s": round(sum(sample.output_tokens for sample in load.samples) / load.duration, 1),
        "ttft_ms": round(1000 * statistics.median(sample.ttft for sample in load.samples), 2),
        "tpot_ms": round(1000 * statistics.median(s.tpot for s in load.samples if s.tpot is not None), 3),
        "complete": all(sample.output_tokens == output_tokens for sample in load.samples),
    }


def main(arguments: Sequence[str]) -> int:
    """Measure the backends that the command line names; returns the exit code."""
    options = _parser().parse_args(arguments)
    plan = ServingPlan(
        input_tokens=options.input,
        output_tokens=options.output,
        concurrencies=tuple(options.concurrency),
        rounds=options.rounds,
        ready_seconds=options.ready_seconds,
        port=options.port,
        weights=options.weights,
        long_concurrencies=tuple(options.long),
        sweep=tuple(options.sweep),
        client=options.client,
    )
    try:
        for backend in options.backends:
            backend_of(backend)
        return _check_tiny(options, plan) if options.tiny else _measure_all(options, plan)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code


def _measure_all(options: argparse.Namespace, plan: ServingPlan) -> int:
    model = options.work / f"gpt-oss-{options.size}"
    run([sys.executable, "-m", "sparkforge.models.dummy", str(model), "--size", options.size], cwd=ROOT)
    result: dict[str, Any] = {"size": options.size, "weights": plan.weights, "machine": _machine(), "backends": {}}
    exit_code = 0
    for backend in options.backends:
        figures = result["backends"].setdefault(backend, {"rows": []})
        try:
            for row in measure(backend, model, plan, options.work / f"{backend}.log"):
                figures["rows"].append(row) if "concurrency" in row else figures.update(row)
                say(f"{backend}: {json.dumps(row)}")
                write_json(options.out, result)
        except ServerError as error:
            exit_code = error.exit_code
            figures["error"] = str(error)
            say(f"{backend}: {error}")
            write_json(options.out, result)
    return exit_code


def _check_tiny(options: argparse.Namespace, plan: ServingPlan) -> int:
    """Serve the random tiny checkpoint with each backend and compare its tokens with those that a CPU recorded."""
    model = options.work / "tiny"
    run([sys.executable, "-m", "sparkforge.models.tiny", "--random", str(model)], cwd=ROOT)
    result: dict[str, Any] = {"machine": _machine(), "backends": {}}
    recorded = json.loads(options.tiny.read_text(encoding="utf-8"))
    for backend in options.backends:
        log = options.work / f"tiny-{backend}.log"
        with _server(backend, model, plan, log) as url, httpx.Client(base_url=url, timeout=300) as client:
            comparison = tiny_tokens.compare(client, SERVED_NAME, recorded)
            result["backends"][backend] = {"backend_line": _chosen(backend, log), **comparison}
        say(f"{backend}: {json.dumps(comparison)}")
        write_json(options.out, result)
    return 0 if all(comparison["passed"] for comparison in result["backends"].values()) else 1


def _machine() -> dict[str, str]:
    """Return GPU, driver and the versions of the libraries, asked of the programs themselves."""
    script = "import torch, triton, vllm; print(torch.__version__, triton.__version__, vllm.__version__)"
    versions = run([sys.executable, "-c", script], cwd=ROOT, fix="install vLLM").stdout.split()[-3:]
    gpu = "\n".join(gpus()) or "none"
    return {"gpu": gpu, **dict(zip(("torch", "triton", "vllm"), versions, strict=True))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparkforge.bench.kernels.serve_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that gets the figures")
    parser.add_argument("--work", type=Path, default=Path("/tmp/serve-gpu"), help="model folder and logs")  # noqa: S108
    parser.add_argument("--size", default="120b", help="120b or 20b")
    parser.add_argument("--tiny", type=Path, help="compare the tiny model's tokens with this record instead")
    parser.add_argument(
        "--backends", nargs="+", default=["spark", "triton", "marlin"], help=", ".join(BACKENDS) + ", spark:KERNEL"
    )
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument(
        "--long", nargs="*", type=int, default=[4, 16], help="concurrencies to repeat with answers as long as prompts"
    )
    parser.add_argument("--sweep", nargs="*", type=int, default=[], help="concurrencies of 1k/1k through the harness")
    parser.add_argument("--client", default="auto", help="the harness's client: auto, vllm or own")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer; 1024 for the full 1k/1k")
    parser.add_argument("--rounds", type=int, default=3, help="requests a concurrency: this many times the concurrency")
    parser.add_argument("--ready-seconds", type=float, default=420, help="how long a server may take to start")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument(
        "--weights", default=random_weights.FORMAT, choices=[random_weights.FORMAT, "dummy"], help="dummy: vLLM's zeros"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
