"""Measures vLLM serving a gpt-oss of real size with random weights, one backend after another, on this machine's GPU.

`python -m lab.served.serve_gpu --out FILE.json` starts a server for each backend, requests a fixed number of tokens at
each concurrency, and ends the server. Every figure is saved immediately, so that an interrupted run keeps its figures.
The model is `lab.served.dummy`'s, with the right shapes and random experts: its speed is realistic, its answers mean
nothing. `--tensor-parallel 2` and `--expert-parallel` split the model over two GPUs; `--together` starts all servers at
once and measures one after another. `--load-seconds 70` limits the time of each backend; list the most important
concurrency first: `--concurrency 64 1 4 16`. `--profile` then traces decoding at each concurrency: the time of each
part of the model and of the heaviest kernels. `--sweep 4 8 16` then sends 1k/1k through the whole harness
(`bench.runs`: gate, load, report) while the server is up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lab import profile, trace
from lab.served import random_load, random_weights, ranks
from lab.served.ranks import Split
from sparkforge.bench import runs
from sparkforge.bench.context import gpus
from sparkforge.core import interrupt, openai
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import ServerError, SparkforgeError, UsageError
from sparkforge.core.files import write_json
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run, spawn, started_at, terminate_session
from sparkforge.serve import command_line
from sparkforge.serve.command_line import ServerCommand

SERVED_NAME = "random-gpt-oss"
LOAD_SECONDS = 3600.0  # for one load
ONE_GPU = Split()
PROFILED_SECONDS, PROFILED_TOKENS = 0.25, 900  # length of each trace, and of the answers decoded during it
OPERATORS = 30  # the heaviest operators of a trace, which are kept
LITTLE = "0.1"  # share of a GPU's memory that must be free at the start if the KV cache's size is given


@dataclass(frozen=True)
class Backend:
    """The arguments and environment that choose a backend, and the text in vLLM's log that shows its use."""

    arguments: tuple[str, ...]
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)


def backend_of(name: str) -> Backend:
    """Return the backend called `name`; `spark:KERNEL` is ours with a kernel of your choice.

    Raises UsageError for an unknown name.
    """
    known, _, kernel = name.partition("@")[0].partition(":")
    if known not in BACKENDS or (kernel and known != "spark"):
        raise UsageError(f"no backend {name!r}", f"choose from {', '.join(BACKENDS)}, spark:KERNEL", "name one")
    if not kernel:
        return BACKENDS[known]
    log = f"Using 'SPARK_{kernel.upper()}'"
    return Backend(BACKENDS[known].arguments, log, {"SPARK_MXFP4_KERNEL": kernel})


def _dense(linear: str, head: str, *fused: str) -> Backend:
    """Return our experts with projections and LM head in the plugin's formats; parts in `fused` take one launch."""
    log = LOGS[fused[-1]] if fused else f"Dense layers (SPARK_MXFP4_LINEAR) are {linear.upper()}, by our kernels"
    choices = {"LINEAR": linear, "LM_HEAD": head, **dict.fromkeys(fused, "fused")}
    environment = {f"SPARK_MXFP4_{name}": choice for name, choice in choices.items()}
    return Backend(("--quantization", "spark-mxfp4"), log, environment)


LOGS = {
    "ROUTER": "Routers of up to 16 tokens run in one launch",
    "ATTENTION": "sequences runs in one launch",
    "REDUCTION": "tokens add the ranks' parts",
}
BACKENDS: Mapping[str, Backend] = {
    "spark": Backend(("--quantization", "spark-mxfp4"), "Using 'SPARK_"),
    "spark-dense-8": _dense("mxfp8", "mxfp8"),
    "spark-dense-4": _dense("mxfp4", "mxfp8"),
    "spark-all-4": _dense("mxfp4", "mxfp4"),
    "spark-all-4-router": _dense("mxfp4", "mxfp4", "ROUTER"),
    "spark-all-4-step": _dense("mxfp4", "mxfp4", "ROUTER", "ATTENTION"),
    "spark-all-4-sums": _dense("mxfp4", "mxfp4", "ROUTER", "ATTENTION", "REDUCTION"),
    "triton-fp8": Backend(
        ("--moe-backend", "triton", "--quantization-config.linear", "fp8_per_channel"),
        "for Fp8PtpcOnlineLinearMethod",
    ),
    "triton": Backend(("--moe-backend", "triton"), "Using 'TRITON"),
    "marlin": Backend(("--moe-backend", "marlin"), "Using 'MARLIN"),
    "flashinfer_cutlass": Backend(("--moe-backend", "flashinfer_cutlass"), "Using 'FLASHINFER_CUTLASS"),
}


class ServingLoad(NamedTuple):
    """Requests, `concurrency` of them at once; with `warm_up`, short requests run first."""

    concurrency: int
    requests: int
    output_tokens: int
    warm_up: bool


@dataclass(frozen=True)
class ServingPlan:
    """The measurement: prompt and output tokens of each request, concurrencies, and how long each step may take."""

    input_tokens: int
    output_tokens: int
    concurrencies: tuple[int, ...]
    rounds: int
    ready_seconds: float
    port: int
    weights: str = random_weights.FORMAT
    long_concurrencies: tuple[int, ...] = ()  # measured again for one round, with answers as long as the prompts
    sweep: tuple[int, ...] = ()  # concurrencies that go through the harness
    split: Split = ONE_GPU  # for backends whose names have no split
    kv_cache_bytes: int = 0  # on each GPU; 0: vLLM decides
    profiled: bool = False  # trace decoding at each concurrency too
    load_seconds: float = math.inf  # after a server is ready; no further load begins after this time
    prompt_graphs: tuple[int, ...] = ()  # further CUDA graphs' sizes in tokens, for steps with prompts

    def loads(self) -> tuple[ServingLoad, ...]:
        """Return the loads in their order."""
        short = (ServingLoad(c, c * self.rounds, self.output_tokens, warm_up=True) for c in self.concurrencies)
        return (*short, *(ServingLoad(c, c, self.input_tokens, warm_up=False) for c in self.long_concurrencies))


@dataclass(frozen=True)
class Started:
    """A starting server; `pid` leads its session."""

    url: str
    pid: int
    begun: float
    split: Split


def measure(
    backend: str, model: Path, plan: ServingPlan, log: Path, started: Started | None = None
) -> Iterator[dict[str, Any]]:
    """Serve `model` with one backend; yield the duration of the start, then a row for each load, measured or left out.

    Raises ServerError if the server ends, is not ready in time, or chose another backend. Ends the server, unless it
    was `started` by the caller.
    """
    with ExitStack() as stack:
        if started is None:
            started = stack.enter_context(_started(backend, model, plan, log, ("--load-format", plan.weights)))
        url = _ready(started, plan, log)
        yield {"ready_s": round(time.monotonic() - started.begun, 1), **_seen(backend, started, log)}
        deadline = time.monotonic() + plan.load_seconds
        loads = plan.loads()
        for index, load in enumerate(loads):
            if time.monotonic() > deadline:
                yield {"left_out": [other._asdict() for other in loads[index:]]}
                break
            if load.warm_up:  # twice as many, so that prompts arrive while other requests generate
                _load(url, load.concurrency, 2 * load.concurrency, plan.input_tokens, min(16, load.output_tokens))
            yield _load(url, load.concurrency, load.requests, plan.input_tokens, load.output_tokens)
        if plan.profiled:
            profiles: dict[str, Any] = {}
            _profile(url, 1, plan, _traces(log))  # the profiler's first start takes seconds
            for concurrency in plan.concurrencies:
                profiles[str(concurrency)] = _profile(url, concurrency, plan, _traces(log))
                yield {"profiles": profiles}
        if plan.sweep:
            yield {"harness": _sweep(url, plan, log.parent / f"harness-{backend.replace(':', '-')}")}


def _traces(log: Path) -> Path:
    return log.with_suffix(".traces")


def _profile(url: str, concurrency: int, plan: ServingPlan, folder: Path) -> dict[str, Any]:
    """Return the time of each part, in milliseconds, while `concurrency` requests are decoded."""
    name = f"at-{concurrency}-{time.monotonic_ns()}"
    arguments = (url, concurrency, concurrency, plan.input_tokens, PROFILED_TOKENS)
    load = threading.Thread(target=_load, args=arguments)
    load.start()
    time.sleep(0.4 + concurrency / 25)  # by then prompts of 1,024 tokens are processed
    with profile.profiling(Endpoint(url, SERVED_NAME, key=""), name):
        time.sleep(PROFILED_SECONDS)
    load.join()
    shares = trace.read(profile.move_traces(folder, name, folder)[0]).model_dump(mode="json")
    return {**shares, "operators": shares["operators"][:OPERATORS]}


def _sweep(url: str, plan: ServingPlan, output: Path) -> str:
    """Send 1k/1k at the plan's concurrencies through the harness; return the results' folder or the error."""
    numbers = ",".join(map(str, plan.sweep))
    shape = {"isl": "1024", "osl": "1024", "conc": numbers}
    try:
        return str(runs.measure({"url": url, "output": str(output), **shape}).files[0].parent)
    except SparkforgeError as error:
        show_error(error)
        return f"failed: {error}"


@contextmanager
def _started(
    backend: str, model: Path, plan: ServingPlan, log: Path, weights: tuple[str, ...] = ()
) -> Iterator[Started]:
    """Start a server, and end it afterwards."""
    chosen, split = backend_of(backend), plan.split.named(backend.partition("@")[2])
    split.check()
    top = max(plan.concurrencies)
    sizes = sorted({1, 2, 4, 8, 16, 32, 64, *plan.concurrencies, *plan.prompt_graphs})
    longest = max(2048, plan.input_tokens + max(plan.input_tokens, plan.output_tokens) + 16)
    # The plugin's metadata and our packages, which may not be installed, but not the checkout's root.
    folder = random_weights.write_entry_point(log.parent / "plugin")
    for package in ("sparkforge", "validate", "lab", "spark_mxfp4/src/spark_mxfp4"):
        link = folder / Path(package).name
        if not link.is_symlink():
            link.symlink_to(ROOT / package)
    python_path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    custom = ranks.all_reduce_flags(sys.executable) if split.size > 1 else ()
    memory = ("--kv-cache-memory-bytes", str(plan.kv_cache_bytes), "--gpu-memory-utilization", LITTLE)
    server = ServerCommand(
        model=str(model),
        model_id=SERVED_NAME,
        host="127.0.0.1",
        port=plan.port,
        extra_arguments=(
            *weights,
            *(command_line.profiler_arguments(_traces(log)) if plan.profiled else ()),
            *("--max-model-len", str(longest), "--max-num-seqs", str(top), "--no-enable-prefix-caching"),
            *("--cudagraph-capture-sizes", *map(str, sizes)),
            *(memory if plan.kv_cache_bytes else ()),
            *chosen.arguments,
            *custom,
            *split.arguments(),
        ),
        extra_environment={
            "PYTHONPATH": python_path,
            "VLLM_PLUGINS": f"{command_line.ENVIRONMENT['VLLM_PLUGINS']},{random_weights.PLUGIN}",
            **chosen.environment,
            **split.environment(),
        },
        guarded=False,
    )
    log.unlink(missing_ok=True)
    environment = {**os.environ, **server.environment}
    pid = spawn(server.command(sys.executable), log=log, env=environment, cwd=log.parent)
    try:
        yield Started(f"http://127.0.0.1:{plan.port}", pid, time.monotonic(), split)
    finally:
        terminate_session(pid)


def _ready(server: Started, plan: ServingPlan, log: Path) -> str:
    """Wait until a server generates and return its address. Raises ServerError."""
    deadline = server.begun + plan.ready_seconds

    def alive() -> bool:
        return started_at(server.pid) is not None

    if not openai.wait_until(Endpoint(server.url).healthy, deadline, alive):
        problem = "ended before it was ready" if not alive() else f"was not ready in {plan.ready_seconds:.0f} s"
        raise ServerError(f"the server {problem}", _last_error(log), f"less {log}", code="server.start")
    Endpoint(server.url, SERVED_NAME, key="").first_token(plan.ready_seconds)
    return server.url


def _seen(backend: str, server: Started, log: Path) -> dict[str, Any]:
    """Return the log's facts about the backend, and with several GPUs about the ranks and their transports.

    Raises ServerError if the logs name another backend, or if our backend is not on every rank.
    """
    seen: dict[str, Any] = {"backend_line": _chosen(backend, log)}
    if server.split.size == 1:
        return seen
    text = log.read_text(errors="replace")
    named = ranks.ranks_with(text, "Mxfp4 MoE backend")
    if backend.startswith("spark") and len(named) != server.split.size:
        why = f"its line is in the log of {', '.join(named) or 'none'} of {server.split.size} ranks"
        raise ServerError(f"the server did not take {backend} on every rank", why, f"less {log}", code="server.start")
    reduce = next((line for line in text.splitlines() if "ustom all" in line or "ustom collectives" in line), "")
    disabled = "disable_custom_all_reduce=True" in text
    seen |= {"split": asdict(server.split), "ranks": named, "nccl_channels": ranks.transports(text)}
    seen["custom_all_reduce"] = "off by flag" if disabled else reduce[-200:] or "on: vLLM's log names no reason against"
    return seen


def _chosen(backend: str, log: Path) -> str:
    """Return the log's line on the backend. Raises ServerError if it names another backend than `backend`."""
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if "Mxfp4 MoE backend" in line]
    used = next((line[line.index("Using '") :] for line in lines if "Using '" in line), "")
    if backend_of(backend).log not in text:
        raise ServerError(
            f"the server did not take {backend}", used or "its log names no backend", f"less {log}", code="server.start"
        )
    return used


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else "its log has no error"


def _load(url: str, concurrency: int, requests: int, input_tokens: int, output_tokens: int) -> dict[str, Any]:
    endpoint = Endpoint(url, SERVED_NAME, key="")
    return random_load.measure(endpoint, concurrency, requests, input_tokens, output_tokens, LOAD_SECONDS)


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
        kv_cache_bytes=options.kv_cache_bytes,
        profiled=options.profile,
        load_seconds=options.load_seconds,
        prompt_graphs=tuple(options.prompt_graphs),
    )
    try:
        split = Split(options.tensor_parallel, expert=options.expert_parallel)
        split.check()
        plan = replace(plan, split=split)
        for backend in options.backends:
            backend_of(backend)
            split.named(backend.partition("@")[2]).check()
        with interrupt.caught():  # the servers have their own sessions, so we must end them
            return _measure_all(options, plan)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code


@contextmanager
def _all_started(
    options: argparse.Namespace, plan: ServingPlan, model: Path, weights: tuple[str, ...] = ()
) -> Iterator[dict[str, tuple[ServingPlan, Started | None]]]:
    """Start every backend's server at once if `--together` is given, each on its own port; end all afterwards."""
    with ExitStack() as stack:
        servers: dict[str, tuple[ServingPlan, Started | None]] = {}
        for index, backend in enumerate(options.backends):
            own = replace(plan, port=plan.port + index) if options.together else plan
            servers[backend] = own, None
            if options.together:
                with suppress(ServerError):  # its measurement starts the server again, alone, and reports the error
                    start = _started(backend, model, own, _log(options, backend), weights)
                    servers[backend] = own, stack.enter_context(start)
        stack.callback(_ask_to_end, [server.pid for _, server in servers.values() if server])
        yield servers


def _ask_to_end(pids: Sequence[int]) -> None:
    """Signal all servers to end; wait for each afterwards."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _log(options: argparse.Namespace, backend: str) -> Path:
    return Path(options.work, f"{backend}.log")


def _measure_all(options: argparse.Namespace, plan: ServingPlan) -> int:
    model = options.work / f"gpt-oss-{options.size}"
    run([sys.executable, "-m", "lab.served.dummy", str(model), "--size", options.size], cwd=ROOT)
    result: dict[str, Any] = {"size": options.size, "weights": plan.weights, "backends": {}}
    exit_code = 0
    with _all_started(options, plan, model, ("--load-format", plan.weights)) as servers:
        result["machine"] = _machine()
        if options.together:
            _wait_for_all(servers, options)
        for backend, (own, server) in servers.items():
            figures = result["backends"].setdefault(backend, {"rows": []})
            try:
                for row in measure(backend, model, own, _log(options, backend), server):
                    figures["rows"].append(row) if "concurrency" in row else figures.update(row)
                    say(f"{backend}: {json.dumps(row)}")
                    write_json(options.out, result)
            except ServerError as error:
                exit_code = error.exit_code
                figures["error"] = str(error)
                say(f"{backend}: {error}")
                write_json(options.out, result)
    return exit_code


def _wait_for_all(servers: Mapping[str, tuple[ServingPlan, Started | None]], options: argparse.Namespace) -> None:
    """Wait until every server generates or has failed, because a starting server would disturb a measurement."""
    for backend, (plan, server) in servers.items():
        try:
            if server:
                _ready(server, plan, _log(options, backend))
                say(f"{backend}: ready, {time.monotonic() - server.begun:.0f} s after its start")
        except ServerError as error:
            say(f"{backend}: {error}")  # its measurement reports the error again


def _machine() -> dict[str, str]:
    """Return the GPU, the driver and the versions of the libraries, as reported by them."""
    script = "import torch, triton, vllm; print(torch.__version__, triton.__version__, vllm.__version__)"
    versions = run([sys.executable, "-c", script], cwd=ROOT, fix="install vLLM").stdout.split()[-3:]
    gpu = "\n".join(gpus()) or "none"
    return {"gpu": gpu, **dict(zip(("torch", "triton", "vllm"), versions, strict=True))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.served.serve_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that gets the figures")
    parser.add_argument("--work", type=Path, default=Path("/tmp/serve-gpu"), help="model folder and logs")  # noqa: S108
    parser.add_argument("--size", default="120b", help="120b or 20b")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["spark", "triton", "marlin"],
        help=", ".join(BACKENDS) + ", spark:KERNEL; each may end in @1, @tpN or @epN",
    )
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument(
        "--long", nargs="*", type=int, default=[4, 16], help="concurrencies to repeat with answers as long as prompts"
    )
    parser.add_argument("--sweep", nargs="*", type=int, default=[], help="concurrencies of 1k/1k through the harness")
    parser.add_argument("--profile", action="store_true", help="trace decoding at each concurrency, after the loads")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer; 1024 for the full 1k/1k")
    parser.add_argument("--rounds", type=int, default=3, help="requests of a load: this many times its concurrency")
    parser.add_argument("--ready-seconds", type=float, default=420, help="how long a server may take to start")
    parser.add_argument(
        "--load-seconds",
        type=float,
        default=math.inf,
        help="most seconds for a backend: no load begins after this time",
    )
    parser.add_argument(
        "--prompt-graphs", nargs="*", type=int, default=[], help="further CUDA graphs, for steps of this many tokens"
    )
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of a layer; NAME@tp2 for one backend")
    parser.add_argument(
        "--expert-parallel", action="store_true", help="whole experts on each of these GPUs; NAME@ep2 for one backend"
    )
    parser.add_argument(
        "--together", action="store_true", help="start all servers at once, then measure each; needs --kv-cache-bytes"
    )
    parser.add_argument(
        "--kv-cache-bytes", type=int, default=0, help="bytes of KV cache on each GPU; default: as much as vLLM takes"
    )
    parser.add_argument(
        "--weights", default=random_weights.FORMAT, choices=[random_weights.FORMAT, "dummy"], help="dummy: vLLM's zeros"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
