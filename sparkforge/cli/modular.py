"""Commands for Modular's MAX engine, which is optional."""

from __future__ import annotations

from pathlib import Path

from invoke.context import Context

from sparkforge.cli.command import caller_path, task, whole_number
from sparkforge.cli.serve import PORT

MODEL = "gpt-oss checkpoint with MXFP4 experts: a folder, or OWNER/NAME that is here; default: the tiny one of ./inv up"
DEVICE = "cpu (float32, for small models) or gpu (not verified, see spark_mxfp4/docs/max.md)"
LISTEN = "port to listen on at 127.0.0.1"
CONTEXT = "longest sequence in tokens, at least 1"


def checkpoint_of(model: str) -> Path:
    """Return the folder of a checkpoint: the one that is named, that of a repository on this machine, or the tiny one.

    Raises InputError for a repository that is not here.
    """
    from sparkforge.serve import modular, settings

    return modular.tiny_or(settings.checkpoint(model, caller_path(model)))


@task(example="./inv max.up --device cpu", model=MODEL, device=DEVICE, port=LISTEN, context=CONTEXT)
def up(_ctx: Context, model: str = "", device: str = "cpu", port: str = PORT, context: str = "512") -> None:
    """Serve gpt-oss by Modular's MAX, with packed experts.

    The first start brings MAX, about 400 MB, and compiles the model for minutes. ./inv status, chat, logs and down work
    as after ./inv up. Its tokens were compared on a CPU and on an H100: on another GPU run ./inv max.test --device gpu.
    """
    from sparkforge.serve import failure, modular, screen

    with failure.remembered():
        folder = checkpoint_of(model)
        server = modular.up(folder, device, whole_number("--port", port), whole_number("--context", context))
    screen.show_ready(server)


@task(
    example="./inv max.serve --model .sparkforge/models/tiny-gpt-oss --device cpu",
    model=MODEL,
    device=DEVICE,
    port=LISTEN,
    context=CONTEXT,
)
def serve(_ctx: Context, model: str = "", device: str = "cpu", port: str = PORT, context: str = "512") -> None:
    """Serve as max.up does, in the foreground.

    Ctrl-C ends it. It shows MAX's own output, and proves and records nothing. For a GPU see max.up.
    """
    from sparkforge.serve import modular

    folder = checkpoint_of(model)
    modular.run(modular.serve_command(folder, device, whole_number("--port", port), whole_number("--context", context)))


@task(
    example="./inv max.compile --model .sparkforge/models/tiny-gpt-oss --target sm_121a",
    model=MODEL,
    target="sm_90a (H100, H200) or sm_121a (DGX Spark)",
)
def compile(_ctx: Context, model: str = "", target: str = "sm_90a") -> None:  # noqa: A001 - the command's name
    """Compile a model and the Mojo kernels for a GPU.

    No GPU is needed. It takes minutes of CPU. Run for both targets with the tiny model.
    """
    from sparkforge.serve import modular

    modular.run(modular.compile_command(checkpoint_of(model), target))


@task(
    example="./inv max.test --device gpu",
    device="what serves the model: cpu or gpu",
)
def test(_ctx: Context, device: str = "cpu") -> None:
    """Compare the served tiny model's tokens with the reference's.

    The references are transformers and vLLM. With --device gpu tokens may differ only where the reference has two of
    nearly the same probability. The Mojo kernels have tests of their own: spark_mxfp4/test --max.
    """
    from sparkforge.serve import modular

    modular.test(device)
