"""Modular's MAX engine with packed MXFP4 experts: its environment, its server, its compiler.

MAX is optional and has an environment of its own (locks/max.in). Its licence is not an open-source one.
"""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge import environments, pins
from sparkforge.core import paths
from sparkforge.core.console import Steps, say
from sparkforge.core.errors import InputError, ProcessError, UsageError
from sparkforge.core.process import call
from sparkforge.environments import TEST, Environment
from sparkforge.serve import environment, launch, proof
from sparkforge.serve.command_line import served_name
from sparkforge.serve.launch import Launch, check_port
from sparkforge.serve.plan import LOOPBACK, StartPlan
from sparkforge.serve.record import Server
from sparkforge.serve.settings import TINY_ID

MAX = Environment("max")
ARCHITECTURE = f"{paths.ROOT / 'spark_mxfp4' / 'src'}:spark_mxfp4.max.architecture"
# On a CPU MAX has no gpt-oss; our architecture runs it in float32, for tests and small models.
# MAX plans with a share of the memory that its driver calls free; 0.9, its default, may be too little for gpt-oss-120b
# on a GPU of 80 GB (spark_mxfp4/docs/max.md).
DEVICES = {
    "cpu": ("--devices", "cpu", "--quantization-encoding", "float32"),
    "gpu": ("--devices", "gpu", "--device-memory-utilization", "0.98"),
}
DEVICE_OF_TESTS = "SPARKFORGE_MAX_DEVICE"  # tests/max/conftest.py
TARGETS = ("sm_90a", "sm_121a")
START_SECONDS = 3600.0  # a first start compiles the model and MAX's kernels on the CPU's cores
OTHER_GPUS = (
    "warning: MAX's own products gave wrong tokens on a GPU; with what avoids them an H100 gave the right ones, and no "
    "other GPU was tried: ./inv max.test --device gpu tells of yours (spark_mxfp4/docs/max.md)"
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


def tiny_or(model: str) -> Path:
    """Return the folder of the checkpoint: the tiny one, which `./inv up` writes, where none is named."""
    return paths.typed(model).absolute() if model else paths.state() / "models" / TINY_ID


def up(model: Path, device: str, port: int, context: int) -> Server:
    """Start MAX's server detached; return it once it has answered a completion and a chat, streamed and not.

    Its record is the checkout's one server, so that `status`, `chat`, `logs` and `down` are as for vLLM. MAX has no API
    key, so it binds the loopback address. Raises what `serve_command` and `launch.start` raise.
    """
    with launch.starting():
        command = serve_command(model, device, port, context, "./inv max.up")
        model_id = served_name(model)
        steps = Steps(2)
        environment.prepare(steps, MAX)
        with steps.step("server", "MAX starts; the first time it compiles the model for minutes") as tell:
            server = launch.start(
                Launch(
                    command=(*map(str, command), "--served-model-name", model_id),
                    environment=variables(),
                    plan=StartPlan(MAX.name, str(model), model_id, device, port=port),
                    model=model,
                    timeout=START_SECONDS,
                    calls=CALLS,
                ),
                tell,
            )
            tell(f"first answers received, {proof.describe(server.proof)}, in {server.proof_seconds:.1f} s")
    return server


def serve_command(
    model: Path, device: str, port: int, context: int, command: str = "./inv max.serve"
) -> list[str | Path]:
    """Return the command line of MAX's server on the loopback address; `command` is the one that was typed.

    For a GPU it prints where MAX's answers were compared. Raises UsageError, InputError, and ServerError for a
    port that is taken.
    """
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}", f"MAX has {', '.join(DEVICES)}", f"{command} --device cpu")
    if context < 1:
        why = "it is the longest sequence in tokens"
        raise UsageError(f"--context {context} has no meaning", why, f"{command} --context 512")
    check_port(port, LOOPBACK, command)
    program = _max("serve", model)
    if device == "gpu":
        say(OTHER_GPUS)
    return [
        *program, *DEVICES[device], "--host", LOOPBACK, "--port", str(port),
        "--max-length", str(context), *(("--max-batch-size", "1") if device == "cpu" else ()),
    ]  # fmt: skip


def compile_command(model: Path, target: str) -> list[str | Path]:
    """Return the command line that compiles a model for a GPU that is not here. Raises UsageError, InputError."""
    if target not in TARGETS:
        raise UsageError(f"unknown target {target!r}", f"the targets are {', '.join(TARGETS)}", "--target sm_90a")
    return [*_max("warm-cache", model), *DEVICES["gpu"], "--target", f"cuda:{target}"]


def _max(command: str, model: Path) -> list[str | Path]:
    if not (model / "config.json").is_file():
        fix = "./inv model.fetch openai/gpt-oss-120b, or ./inv up, which writes the tiny model"
        raise InputError(f"{model} is no checkpoint", "it has no config.json", fix, code="input.model")
    return [MAX.path / "bin" / "max", command, "--model-path", model, "--custom-architectures", ARCHITECTURE]


def run(command: list[str | Path]) -> None:
    """Make the environment unless it is there, and run one of MAX's programs to its end. Raises ProcessError."""
    environments.ensure(MAX, pins.load())
    if code := call(command, cwd=paths.ROOT, env=variables()):
        fix = "read its output above; spark_mxfp4/docs/max.md has what is known"
        raise ProcessError("MAX ended", f"exit code {code}", fix, code="process.failed")


def test(device: str) -> None:
    """Run tests/max, where `device` serves the tiny model. Raises UsageError, ProcessError."""
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}", f"MAX has {', '.join(DEVICES)}", "./inv max.test --device cpu")
    environments.ensure(MAX, pins.load())
    environments.ensure(TEST, pins.load())
    variables = {"PYTHONPATH": "", DEVICE_OF_TESTS: device}
    if code := call([TEST.python, "-m", "pytest", "tests/max"], cwd=paths.ROOT, env=variables):
        raise ProcessError(
            "the tests failed", f"pytest ended with code {code}", "read pytest's report above", code="process.tests"
        )
