"""A first version of your own kernel: `python -m spark_mxfp4.template NAME` writes module, test and benchmark.

The templates are the other modules in this folder: a correct kernel, named `own_kernel`.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import tempfile
from pathlib import Path

STAND_IN, CLASS = "own_kernel", "OwnKernel"
TAKEN = {"spark_mxfp4", "torch", "triton", "transformers", "vllm"}  # refused even if not installed
FILES = (f"{STAND_IN}.py", f"test_{STAND_IN}.py", f"benchmark_{STAND_IN}.py")


def write(name: str, parent: Path) -> Path:
    """Write the folder `name` with a kernel of that name into `parent`, and return it.

    Raises ValueError if the name is no module name or is another module's, FileExistsError if the folder exists, and
    OSError if it cannot be written. After an error no files remain.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name) or keyword.iskeyword(name):
        raise ValueError(
            f"{name[:80]!r} is no name for a kernel · Python imports it, so it has letters a-z, digits and _ · "
            "name it like fast_moe"
        )
    if name in TAKEN or importlib.util.find_spec(name) is not None:
        raise ValueError(f"{name!r} is another module's name · Python would import that one · name it my_{name}")
    folder = parent / name
    if folder.exists():
        raise FileExistsError(f"{folder} is there · nothing is overwritten · name another kernel, or remove it")
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent) as temporary:
        written = Path(temporary) / name
        written.mkdir()
        for file in FILES:
            text = (Path(__file__).parent / file).read_text(encoding="utf-8")
            text = re.sub(r"  # noqa: [A-Z0-9]+$", "", text, flags=re.MULTILINE)  # this library's linter
            text = text.replace(STAND_IN, name).replace(CLASS, class_name(name))
            (written / file.replace(STAND_IN, name)).write_text(text, encoding="utf-8")
        written.rename(folder)
    return folder


def class_name(name: str) -> str:
    """Return the class name of the kernel in the module `name`: FastMoe for fast_moe."""
    return "".join(part.capitalize() for part in name.split("_"))


def kernel_name(name: str) -> str:
    """Return the value of SPARK_MXFP4_KERNEL for the kernel in the module `name`: fast_moe:FastMoe."""
    return f"{name}:{class_name(name)}"


def next_steps(folder: Path) -> str:
    """Return commands to run after `write`, one per line."""
    name, path = folder.name, shlex.quote(str(folder))
    return "\n".join(
        (
            f"cd {path}",
            f"python -m spark_mxfp4.conformance {kernel_name(name)}  # must pass before it may serve",
            f"python benchmark_{name}.py",
            f"PYTHONPATH={path} SPARK_MXFP4_KERNEL={kernel_name(name)} vllm serve MODEL --quantization spark-mxfp4",
        )
    )
