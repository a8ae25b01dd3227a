"""Commands for Modular's MAX engine, which is optional."""

from __future__ import annotations

from pathlib import Path

from invoke.context import Context

from sparkforge.cli.command import caller_path, task, whole_number


@task(
    example="./inv max.serve --model .sparkforge/models/tiny-gpt-oss --device cpu",
    model="folder of a gpt-oss checkpoint with MXFP4 experts",
    device="cpu (float32, for small models) or gpu; default cpu",
    port="port to listen on at 127.0.0.1; default 8000",
    context="longest sequence in tokens, at least 1; default 512",
)
def serve(_ctx: Context, model: str, device: str = "cpu", port: str = "8000", context: str = "512") -> None:
    """Serve gpt-oss by Modular's MAX, with packed experts.

    It stays in the foreground; Ctrl-C ends it. The first start brings MAX, about 400 MB, and compiles the model for
    minutes. Not verified on a GPU; with prompts of more than 128 tokens its answers differ from transformers'.
    """
    from sparkforge.serve import modular

    folder = Path(caller_path(model))
    modular.run(modular.serve_command(folder, device, whole_number("--port", port), whole_number("--context", context)))


@task(
    example="./inv max.compile --model .sparkforge/models/tiny-gpt-oss --target sm_121a",
    model="folder of a gpt-oss checkpoint with MXFP4 experts",
    target="sm_90a (H100, H200) or sm_121a (DGX Spark); default sm_90a",
)
def compile(_ctx: Context, model: str, target: str = "sm_90a") -> None:  # noqa: A001 - the command's name
    """Compile a model and the Mojo kernels for a GPU.

    Not verified: this command was never run.
    """
    from sparkforge.serve import modular

    modular.run(modular.compile_command(Path(caller_path(model)), target))


@task(example="./inv max.test")
def test(_ctx: Context) -> None:
    """Compare the Mojo kernels with the reference, on a CPU."""
    from sparkforge.serve import modular

    modular.test()
