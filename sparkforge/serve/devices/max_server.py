"""Modular's MAX engine with packed MXFP4 experts: its environment, its server, its compiler.

MAX is optional and has an environment of its own (spark_mxfp4/locks/max.in). Its licence is not an open-source one.
"""

import os
from dataclasses import replace
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.errors import UsageError
from sparkforge.environments import Environment
from sparkforge.serve import launch, proof
from sparkforge.serve.command_line import served_name
from sparkforge.serve.devices.device import Device
from sparkforge.serve.devices.in_environment import prepare_environment, write_tiny
from sparkforge.serve.launch import Launch
from sparkforge.serve.record import LOOPBACK, Server, StartPlan
from sparkforge.serve.settings import CONTEXT_VARIABLE

MAX = Environment("max")
ARCHITECTURE = "spark_mxfp4.max.architecture"  # from the library's wheel
# On a CPU MAX has no gpt-oss; our architecture runs it in float32, for tests and small models.
# MAX uses a share of the memory that the driver reports as free; its default, 0.9, may be too little for gpt-oss-120b
# on a GPU of 80 GB (spark_mxfp4/docs/max.md).
DEVICES = {
    "cpu": ("--devices", "cpu", "--quantization-encoding", "float32"),
    "gpu": ("--devices", "gpu", "--device-memory-utilization", "0.98"),
}
START_SECONDS = 3600.0  # a first start compiles the model and MAX's kernels on the CPU's cores
OTHER_GPUS = (
    "warning: MAX's own products gave wrong tokens on a GPU; with our workaround an H100 gave the right ones, and no "
    "other GPU was tested: compare your results first (spark_mxfp4/docs/max.md)"
)
CALLS = ("a completion", "a streamed completion", "a chat", "a streamed chat")  # of proof.CALLS


def variables() -> dict[str, str]:
    """Return the environment of MAX's programs: no telemetry, no hub, compiled models kept in our state."""
    return {
        "MODULAR_TELEMETRY_ENABLED": "0",  # the documented variable, which the server does not read
        "MAX_SERVE_DISABLE_TELEMETRY": "1",
        "MODULAR_CACHE_DIR": os.environ.get("MODULAR_CACHE_DIR") or str(paths.state() / "cache" / "max"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }


class MaxServer(Device):
    """MAX's server, detached; `plan.profile` is cpu or gpu, MAX_MODEL_LEN the longest sequence in tokens.

    Without a model it serves the tiny one. It is recorded as the checkout's server. MAX has no API key, so it binds the
    loopback address. The constructor raises UsageError or InputError.
    """

    command, step_count = "./inv max.up", 3

    def __init__(self, plan: StartPlan) -> None:
        device, context = plan.profile, plan.variables[CONTEXT_VARIABLE]
        if device not in DEVICES:
            fix = f"{self.command} --device cpu"
            raise UsageError(f"unknown device {device!r}", f"MAX has {', '.join(DEVICES)}", fix)
        if int(context) < 1:
            why, fix = "it is the longest sequence in tokens", f"{self.command} --context 512"
            raise UsageError(f"--context {context} has no meaning", why, fix)
        if plan.model:
            served_name(Path(plan.model))  # refuses other models before MAX is installed
        super().__init__(replace(plan, device=MAX.name))

    def prepare(self) -> None:
        """Make MAX's environment, and the tiny model if no other is named."""
        if self.plan.profile == "gpu":
            say(OTHER_GPUS)
        prepare_environment(self.steps, MAX)
        with self.steps.step("model") as tell:
            model = Path(self.plan.model or write_tiny(MAX.python))
            self.plan = replace(self.plan, model=str(model), model_id=served_name(model))
            tell(f"{self.plan.model_id} in {model}")

    def validate(self) -> str:
        """Validate nothing: the validator checks vLLM only."""
        return "nothing to validate"

    def start(self) -> Server:
        """Start MAX; return it once it has answered a completion and a chat, streamed and not."""
        start = Launch(server_command(self.plan), variables(), self.plan, Path(self.plan.model), START_SECONDS, CALLS)
        with self.steps.step("server", "MAX starts; the first time it compiles the model for minutes") as tell:
            server = launch.start(start, tell)
            tell(f"first answers received, {proof.describe(server.proof)}, in {server.proof_seconds:.1f} s")
        return server


def server_command(plan: StartPlan) -> tuple[str, ...]:
    """Return the command line of MAX's server on the loopback address."""
    return (
        str(MAX.path / "bin" / "max"), "serve", "--model-path", plan.model, "--custom-architectures", ARCHITECTURE,
        *DEVICES[plan.profile], "--host", LOOPBACK, "--port", str(plan.port),
        "--max-length", plan.variables[CONTEXT_VARIABLE],
        *(("--max-batch-size", "1") if plan.profile == "cpu" else ()), "--served-model-name", plan.model_id,
    )  # fmt: skip
