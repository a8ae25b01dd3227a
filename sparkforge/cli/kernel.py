"""Commands for kernels of a user's own, and for our kernels as a repository of Hugging Face's hub."""

from __future__ import annotations

import shlex
from pathlib import Path

from invoke.context import Context

from sparkforge.cli.command import caller_path, task, whole_number
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.errors import UsageError


@task(
    example="./inv kernel.new fast_moe",
    name="the kernel's name, which its module will have",
    folder="where its folder is made; default: the current one",
)
def new(_ctx: Context, name: str, folder: str = "") -> None:
    """Write a kernel of your own to begin with, and its test.

    A folder with a module, a test and a benchmark: create_weights, load, prepare, apply, and the sizes that it must
    handle. It computes rightly as it is; the test, and the validator before each start, refuse it when it does not.
    """
    from spark_mxfp4 import template

    try:
        written = template.write(name, Path(caller_path(folder or ".")))
    except (ValueError, FileExistsError) as error:
        raise UsageError(*str(error).split(" · ", 2)) from error
    kernel, inv = template.kernel_name(name), shlex.quote(str(paths.ROOT / "inv"))
    python = shlex.quote(str(paths.environment("embedded") / "bin" / "python"))
    path, benchmark = shlex.quote(str(written)), shlex.quote(str(written / f"benchmark_{name}.py"))
    say(
        f"written {written}\n"
        f"next, with an interpreter that has torch; this one is made by the first {inv} up --device embedded:\n"
        f"  PYTHONPATH={path} {python} -m spark_mxfp4.conformance {kernel}   # must pass before it may serve\n"
        f"  {python} {benchmark}\n"
        f"  PYTHONPATH={path} SPARK_MXFP4_KERNEL={kernel} {inv} up --device embedded --quantization spark-mxfp4\n"
        "its test is for pytest, where that is installed; a container: docs/reference/profiles.md, our own experts"
    )


@task(
    example="./inv kernel.hub spark-mxfp4-hub",
    folder="the repository's folder, which is made",
    number="the repository's version number; default 1",
    module="a Python file with a kernel of yours, in place of ours",
    name="the kernel's name on the hub; default spark-mxfp4",
)
def hub(_ctx: Context, folder: str, number: str = "1", module: str = "", name: str = "spark-mxfp4") -> None:
    """Write kernels as Hugging Face's `kernels` loads them.

    build/torch-cuda and build/torch-cpu with their metadata.json, of our kernels or of a module of yours. Nothing is
    uploaded.
    """
    from spark_mxfp4.kernels import publish

    source = Path(caller_path(module)) if module else None
    try:
        written = publish.write(Path(caller_path(folder)), whole_number("--number", number), source, name)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{module} is no Python module", str(error), f"python3 -m py_compile {module}") from error
    except (ValueError, FileExistsError) as error:
        raise UsageError(*str(error).split(" · ", 2)) from error
    attribute = "CLASS" if module else "Kernel"
    kernel = shlex.quote(f"{written}#{attribute}")
    say(
        f"written {written}\nnext, where the package kernels 0.17 is installed: "
        f"SPARK_MXFP4_KERNEL={kernel} vllm serve MODEL --quantization spark-mxfp4"
    )
