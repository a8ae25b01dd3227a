"""The command for Modular's MAX engine, which is optional."""

from __future__ import annotations

from invoke.context import Context

from sparkforge.cli.command import caller_path, task, whole_number
from sparkforge.cli.serve import PORT


@task(
    example="./inv max.up --device cpu",
    model="gpt-oss checkpoint with MXFP4 experts: a folder, or OWNER/NAME that is here; default: a tiny one",
    device="cpu (float32, for small models) or gpu (not verified, see spark_mxfp4/docs/max.md)",
    port="port to listen on at 127.0.0.1",
    context="longest sequence in tokens, at least 1",
)
def up(_ctx: Context, model: str = "", device: str = "cpu", port: str = PORT, context: str = "512") -> None:
    """Serve gpt-oss by Modular's MAX, with packed experts.

    The first start brings MAX, about 400 MB, writes the tiny model if no other is named, and compiles it for minutes.
    ./inv status, chat, logs and down work as after ./inv up. Its tokens were compared on a CPU and on an H100.
    """
    from sparkforge.core import paths
    from sparkforge.serve import failure, screen, settings
    from sparkforge.serve.devices.device import start
    from sparkforge.serve.devices.max_server import MaxServer
    from sparkforge.serve.plan import StartPlan

    with failure.remembered():
        folder = str(paths.typed(settings.checkpoint(model, caller_path(model))).absolute()) if model else ""
        length = {settings.CONTEXT_VARIABLE: str(whole_number("--context", context))}
        plan = StartPlan("max", folder, profile=device, port=whole_number("--port", port), variables=length)
        server = start(MaxServer(plan))
    screen.show_ready(server)
