"""Modular's MAX engine with packed MXFP4 experts: its environment, its server in the foreground, its compiler.

MAX is optional and has an environment of its own (locks/max.in). Its licence is not an open-source one.
"""

from __future__ import annotations

from pathlib import Path

from sparkforge import environments, pins
from sparkforge.core import paths
from sparkforge.core.errors import InputError, ProcessError, UsageError
from sparkforge.core.process import call
from sparkforge.environments import TEST, Environment
from sparkforge.serve.launch import LOOPBACK, check_port

MAX = Environment("max")
ARCHITECTURE = f"{paths.ROOT}:spark_mxfp4.max.architecture"
# On a CPU MAX has no gpt-oss; our architecture runs it in float32, for tests and small models.
DEVICES = {"cpu": ("--devices", "cpu", "--quantization-encoding", "float32"), "gpu": ("--devices", "gpu")}
TARGETS = ("sm_90a", "sm_121a")


def variables() -> dict[str, str]:
    """Return the environment of MAX's programs: no telemetry, no hub, compiled models kept in our state."""
    return {
        "MODULAR_TELEMETRY_ENABLED": "0",  # what the engine's documentation names; the server does not read it
        "MAX_SERVE_DISABLE_TELEMETRY": "1",
        "MODULAR_CACHE_DIR": str(paths.state() / "cache" / "max"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }


def serve_command(model: Path, device: str, port: int, context: int) -> list[str | Path]:
    """Return the command line of MAX's server on the loopback address.

    Raises UsageError, InputError, and ServerError for a port that is taken.
    """
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}", f"MAX has {', '.join(DEVICES)}", "./inv max.serve --device cpu")
    if context < 1:
        why = "it is the longest sequence in tokens"
        raise UsageError(f"--context {context} has no meaning", why, "./inv max.serve --context 512")
    check_port(port, LOOPBACK, "./inv max.serve")
    return [
        *_max("serve", model), *DEVICES[device], "--host", LOOPBACK, "--port", str(port),
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
        fix = "read its output above; docs/guide/max.md has what is known"
        raise ProcessError("MAX ended", f"exit code {code}", fix, code="process.failed")


def test() -> None:
    """Run tests/max: pytest in the test environment, the compiler in MAX's. Raises ProcessError."""
    environments.ensure(MAX, pins.load())
    environments.ensure(TEST, pins.load())
    if code := call([TEST.python, "-m", "pytest", "tests/max"], cwd=paths.ROOT, env={"PYTHONPATH": ""}):
        raise ProcessError(
            "the tests failed", f"pytest ended with code {code}", "read pytest's report above", code="process.tests"
        )
