"""Measures vLLM serving a gpt-oss of real size with made-up weights, one backend after another, on this machine's GPU.

`python -m bench.kernels.serve_gpu --out FILE.json` starts a server for each backend, asks it for a fixed number of
tokens at each concurrency, and ends it. Every figure is written as soon as it is known, for a run that is cut short.
The model is `serve.dummy`'s: right shapes, random experts, so speed means something and answers do not.
`--sweep 4 8 16` then sends 1k/1k through the whole harness (`bench.runs`: gate, load, report) while the server is up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import runs
from bench.kernels import random_weights, tiny_tokens
from sparkforge import sse
from sparkforge.console import say, show_error
from sparkforge.errors import SparkforgeError, StartFailedError, UsageError
from sparkforge.files import write_json
from sparkforge.paths import ROOT
from sparkforge.process import run, spawn, started_at, terminate_session

VOCABULARY = 199998  # ordinary tokens of gpt-oss; the special ones lie above
SERVED_NAME, COMPLETIONS = "random-gpt-oss", "/v1/completions"


@dataclass(frozen=True)
class Backend:
    """What chooses a backend on vLLM's command line, and the word in the log that shows it was taken."""

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


BACKENDS: Mapping[str, Backend] = {
    "spark": Backend(("--quantization", "spark-mxfp4"), "Using 'SPARK_"),
    "triton": Backend(("--moe-backend", "triton"), "Using 'TRITON"),
    "marlin": Backend(("--moe-backend", "marlin"), "Using 'MARLIN"),
    "flashinfer_cutlass": Backend(("--moe-backend", "flashinfer_cutlass"), "Using 'FLASHINFER_CUTLASS"),
}


@dataclass(frozen=True)
class Plan:
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


def measure(backend: str, model: Path, plan: Plan, log: Path) -> Iterator[dict[str, Any]]:
    """Serve `model` with one backend; yield how long the start took, then one row a concurrency.

    Raises StartFailedError if the server ends, is not ready in time, or chose another backend. Ends it in any case.
    """
    begun = time.monotonic()
    with _server(backend, model, plan, log, ("--load-format", plan.weights)) as url:
        yield {"ready_s": round(time.monotonic() - begun, 1), "backend_line": _chosen(backend, log)}
        for concurrency in plan.concurrencies:
            asyncio.run(_load(url + COMPLETIONS, concurrency, concurrency, plan, min(16, plan.output_tokens)))  # warm
            yield asyncio.run(
                _load(url + COMPLETIONS, concurrency, concurrency * plan.rounds, plan, plan.output_tokens)
            )
        for concurrency in plan.long_concurrencies:
            yield asyncio.run(_load(url + COMPLETIONS, concurrency, concurrency, plan, plan.input_tokens))
        if plan.sweep:
            yield {"harness": _sweep(url, model, plan, log.parent / f"harness-{backend.replace(':', '-')}")}


def _sweep(url: str, model: Path, plan: Plan, place: Path) -> str:
    """Send 1k/1k at the plan's concurrencies through the harness; return the report's path or why there is none."""
    numbers = ",".join(map(str, plan.sweep))
    shape = {"isl": "1024", "osl": "1024", "conc": numbers, "client": plan.client, "tokenizer": str(model)}
    try:
        return str(runs.measure({"url": url, "output": str(place), **shape}, Path(sys.executable)).page)
    except SparkforgeError as error:
        show_error(error)
        return f"failed: {error}"


@contextmanager
def _server(backend: str, model: Path, plan: Plan, log: Path, weights: tuple[str, ...] = ()) -> Iterator[str]:
    chosen = backend_of(backend)
    top = max(plan.concurrencies)
    sizes = sorted({1, 2, 4, 8, 16, 32, 64, *plan.concurrencies})
    longest = max(2048, plan.input_tokens + max(plan.input_tokens, plan.output_tokens) + 16)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *weights,
        "--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(plan.port),
        "--max-model-len", str(longest), "--max-num-seqs", str(top),
        "--no-enable-prefix-caching", "--cudagraph-capture-sizes", *(str(s) for s in sizes if s <= max(64, top)),
        *chosen.arguments,
    ]  # fmt: skip
    folders = (random_weights.write_entry_point(log.parent / "plugin"), ROOT, os.environ.get("PYTHONPATH", ""))
    python_path = os.pathsep.join(str(folder) for folder in folders if str(folder))
    fixed = {"PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, **fixed, **chosen.environment}
    pid = spawn(command, log=log, env=environment, cwd=log.parent)
    try:
        _wait(pid, f"http://127.0.0.1:{plan.port}", plan.ready_seconds, log)
        yield f"http://127.0.0.1:{plan.port}"
    finally:
        terminate_session(pid)


def _wait(pid: int, url: str, seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while time.monotonic() < deadline:
            if started_at(pid) is None:
                raise StartFailedError("the server ended before it was ready", _last_words(log), f"less {log}")
            try:
                if client.get("/health").status_code == 200:
                    body = {"model": SERVED_NAME, "prompt": [5], "max_tokens": 1}
                    client.post("/v1/completions", json=body).raise_for_status()
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
    raise StartFailedError(f"the server was not ready in {seconds:.0f} s", _last_words(log), f"less {log}")


def _chosen(backend: str, log: Path) -> str:
    """Return the log's line on the backend; raises StartFailedError if it names another than was asked for."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Mxfp4 MoE backend" in line]
    used = next((line[line.index("Using '") :] for line in lines if "Using '" in line), "")
    if not used.startswith(backend_of(backend).log):
        raise StartFailedError(f"the server did not take {backend}", used or "its log names no backend", f"less {log}")
    return used


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else "its log has no error"


async def _load(url: str, concurrency: int, requests: int, plan: Plan, output_tokens: int) -> dict[str, Any]:
    """Keep `concurrency` requests in flight until `requests` are done; return rates and median times in ms."""
    limit, chance = asyncio.Semaphore(concurrency), random.Random(concurrency)  # noqa: S311 (prompts, not secrets)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(plan.input_tokens)] for _ in range(requests)]
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as client:

        async def one(prompt: list[int]) -> tuple[float, float, int]:
            """Wait for a free place, then ask: what `_complete` returns, whose clock starts behind the wait."""
            async with limit:
                return await _complete(client, url, prompt, output_tokens)

        begun = time.monotonic()
        done = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.monotonic() - begun
    tokens = sum(count for _, _, count in done)
    return {
        "concurrency": concurrency, "requests": requests, "input_tokens": plan.input_tokens,
        "output_tokens": output_tokens, "seconds": round(seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "ttft_ms": round(1000 * statistics.median(first for first, _, _ in done), 2),
        "tpot_ms": round(1000 * statistics.median((last - first) / (n - 1) for first, last, n in done if n > 1), 3),
        "complete": all(count == output_tokens for _, _, count in done),
    }  # fmt: skip


async def _complete(client: httpx.AsyncClient, url: str, prompt: list[int], tokens: int) -> tuple[float, float, int]:
    """Return seconds to the first and to the last token of one request, and how many tokens the server counted."""
    body = {
        "model": SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    begun = time.monotonic()
    first = last = 0.0
    counted = 0
    async with client.stream("POST", url, json=body) as reply:
        reply.raise_for_status()
        async for line in sse.alines(reply):
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            last = time.monotonic() - begun if event["choices"] else last
            first = first or last
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
    return first, last, counted


def main(arguments: Sequence[str]) -> int:
    """Measure the backends that the command line names; returns the exit code."""
    words = _parser().parse_args(arguments)
    plan = Plan(
        words.input,
        words.output,
        tuple(words.concurrency),
        words.rounds,
        words.ready_seconds,
        words.port,
        words.weights,
        tuple(words.long),
        tuple(words.sweep),
        words.client,
    )
    try:
        for backend in words.backends:
            backend_of(backend)
        return _measure_all(words, plan)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code


def _measure_all(words: argparse.Namespace, plan: Plan) -> int:
    if words.tiny:
        return _check_tiny(words, plan)
    model = words.work / f"gpt-oss-{words.size}"
    make = [sys.executable, "-m", "serve.dummy", str(model), "--size", words.size]
    run(make, cwd=ROOT)
    result: dict[str, Any] = {"size": words.size, "weights": plan.weights, "machine": _machine(), "backends": {}}
    failed = 0
    for backend in words.backends:
        rows = result["backends"].setdefault(backend, {"rows": []})
        try:
            for found in measure(backend, model, plan, words.work / f"{backend}.log"):
                rows["rows"].append(found) if "concurrency" in found else rows.update(found)
                say(f"{backend}: {json.dumps(found)}")
                write_json(words.out, result)
        except (StartFailedError, httpx.HTTPError) as error:
            failed = StartFailedError.exit_code
            rows["error"] = str(error)
            say(f"{backend}: {error}")
            write_json(words.out, result)
    return failed


def _check_tiny(words: argparse.Namespace, plan: Plan) -> int:
    """Serve the random tiny checkpoint with each backend and compare its tokens with those that a CPU recorded."""
    model = words.work / "tiny"
    run([sys.executable, "-m", "serve.tiny", "--random", str(model)], cwd=ROOT)
    result: dict[str, Any] = {"machine": _machine(), "backends": {}}
    recorded = json.loads(words.tiny.read_text(encoding="utf-8"))
    for backend in words.backends:
        log = words.work / f"tiny-{backend}.log"
        with _server(backend, model, plan, log) as url, httpx.Client(base_url=url, timeout=300) as client:
            found = tiny_tokens.compare(client, SERVED_NAME, recorded)
            result["backends"][backend] = {"backend_line": _chosen(backend, log), **found}
        say(f"{backend}: {json.dumps(found)}")
        write_json(words.out, result)
    return 0 if all(found["passed"] for found in result["backends"].values()) else 1


def _machine() -> dict[str, str]:
    """Return GPU, driver and the versions that matter, asked of the programs themselves."""
    told = "import torch, triton, vllm; print(torch.__version__, triton.__version__, vllm.__version__)"
    versions = run([sys.executable, "-c", told], cwd=ROOT, fix="install vLLM").stdout.split()[-3:]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = run(query, check=False).stdout.strip() if shutil.which(query[0]) else "none"
    return {"gpu": gpu, **dict(zip(("torch", "triton", "vllm"), versions, strict=True))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.serve_gpu", description=__doc__)
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
