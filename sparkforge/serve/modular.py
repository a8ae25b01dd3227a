"""Modular's MAX engine with packed MXFP4 experts: its environment, its server, its compiler.

MAX is optional and has an environment of its own (spark_mxfp4/locks/max.in). Its licence is not an open-source one.
"""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import Steps, say
from sparkforge.core.errors import UsageError
from sparkforge.environments import Environment
from sparkforge.serve import embedded, environment, launch, proof
from sparkforge.serve.command_line import served_name
from sparkforge.serve.launch import Launch, check_port
from sparkforge.serve.plan import LOOPBACK, StartPlan
from sparkforge.serve.record import Server

MAX = Environment("max")
ARCHITECTURE = "spark_mxfp4.max.architecture"  # from the library's wheel
# On a CPU MAX has no gpt-oss; our architecture runs it in float32, for tests and small models.
# MAX plans with a share of the memory that its driver calls free; 0.9, its default, may be too little for gpt-oss-120b
# on a GPU of 80 GB (spark_mxfp4/docs/max.md).
DEVICES = {
    "cpu": ("--devices", "cpu", "--quantization-encoding", "float32"),
    "gpu": ("--devices", "gpu", "--device-memory-utilization", "0.98"),
}
START_SECONDS = 3600.0  # a first start compiles the model and MAX's kernels on the CPU's cores
OTHER_GPUS = (
    "warning: MAX's own products gave wrong tokens on a GPU; with what avoids them an H100 gave the right ones, and no "
    "other GPU was tried: compare yours before you trust it (spark_mxfp4/docs/max.md)"
)
CALLS = ("a completion", "a streamed completion", "a chat", "a streamed chat")  # of proof.CALLS


def variables() -> dict[str, str]:
    """Return the environment of MAX's programs: no telemetry, no hub, compiled models kept in our state."""
    return {
        "MODULAR_TELEMETRY_ENABLED": "0",  # what the engine's documentation names; the server does not read it
        "MAX_SERVE_DISABLE_TELEMETRY": "1",
        "MODULAR_CACHE_DIR": os.environ.get("MODULAR_CACHE_DIR") or str(paths.state() / "cache" / "max"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }


def up(model: Path | None, device: str, port: int, context: int) -> Server:
    """Start MAX's server detached; return it once it has answered a completion and a chat, streamed and not.

    Without a `model` it is the tiny one, which is written first. The record is the checkout's one server, so that
    `status`, `chat`, `logs` and `down` are as for vLLM. MAX has no API key, so it binds the loopback address. Raises
    UsageError, InputError, ServerError for a port that is taken, and what `launch.start` raises.
    """
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}", f"MAX has {', '.join(DEVICES)}", "./inv max.up --device cpu")
    if context < 1:
        why = "it is the longest sequence in tokens"
        raise UsageError(f"--context {context} has no meaning", why, "./inv max.up --context 512")
    check_port(port, LOOPBACK, "./inv max.up")
    if model:
        served_name(model)  # refuses what is no gpt-oss before MAX is brought
    if device == "gpu":
        say(OTHER_GPUS)
    with launch.starting():
        steps = Steps(3)
        environment.prepare(steps, MAX)
        with steps.step("model") as tell:
            model = model or embedded.write_tiny(MAX.python)
            tell(f"{served_name(model)} in {model}")
        with steps.step("server", "MAX starts; the first time it compiles the model for minutes") as tell:
            server = launch.start(
                Launch(
                    command=server_command(model, device, port, context),
                    environment=variables(),
                    plan=StartPlan(MAX.name, str(model), served_name(model), device, port=port),
                    model=model,
                    timeout=START_SECONDS,
                    calls=CALLS,
                ),
                tell,
            )
            tell(f"first answers received, {proof.describe(server.proof)}, in {server.proof_seconds:.1f} s")
    return server


def server_command(model: Path, device: str, port: int, context: int) -> tuple[str, ...]:
    """Return the command line of MAX's server on the loopback address; `context` is the longest sequence in tokens."""
    return (
        str(MAX.path / "bin" / "max"), "serve", "--model-path", str(model), "--custom-architectures", ARCHITECTURE,
        *DEVICES[device], "--host", LOOPBACK, "--port", str(port), "--max-length", str(context),
        *(("--max-batch-size", "1") if device == "cpu" else ()), "--served-model-name", served_name(model),
    )  # fmt: skip
