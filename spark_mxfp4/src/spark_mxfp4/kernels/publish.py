"""Write our kernels as a repository that Hugging Face's `kernels` loads: `python -m spark_mxfp4.kernels.publish DIR`.

The layout is that of `kernels` 0.17: `build/torch-cuda` and `build/torch-cpu`, each a complete package with a
`metadata.json`. A hub package may be loaded from any path and next to another version of itself. So a copy contains
every module that it needs, has relative imports, and its torch operators have their own namespace. It works without
spark-mxfp4 installed. CUDA kernels are included as sources, which nvcc builds at first use on compute capability 9.0
and 12.1; without nvcc Triton runs. This module imports only the standard library.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from importlib.metadata import distribution, version
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
NAME = "spark-mxfp4"
BACKENDS = ("cuda", "cpu")
# The modules that a copy exports. The modules that they import are added.
ROOTS = {
    "cuda": ("kernels/gpu.py", "kernels/fused.py", "kernels/linear.py", "registry.py"),
    "cpu": ("experts.py", "kernel.py"),
}
DATA = {"kernels/tuning.py": ("kernels/tuned.json",), "kernels/precompile.py": ("kernels/*.cu*",)}
OPERATORS = re.compile(r'(?<=")spark_mxfp4(?=::\w+")')
EXPORTS = '''"""MXFP4 mixture-of-experts kernels, {name} {release}, for {backend}.

`Kernel` is the fastest kernel for the device: `kernel = Kernel("mxfp4")`, `weights = kernel.prepare(ExpertWeights(…))`
once, then `kernel.run(x, weights, topk_ids, topk_weights)`. `moe` takes the checkpoint's bytes as they are.
"""

from .experts import ExpertWeights, Projection
from .kernel import MoeKernel
from .mxfp4 import dequantize, quantize
{own}'''
OWN = {
    "cuda": """from .kernels import linear
from .kernels.fused import moe
from .kernels.gpu import GpuKernel as Kernel
from .registry import load
""",
    "cpu": '''from .experts import moe


class Kernel(MoeKernel):
    """torch operations, which copy the selected experts to the host."""

    cuda_graphs = False

    def run(self, x, weights, topk_ids, topk_weights, expert_map=None):
        return moe(x, weights, topk_ids, topk_weights, expert_map)
''',
}
CARD = """---
library_name: kernels
license: {license}
tags: [kernel]
---

# {name}

{about} The folders under `build/` are for `kernels` 0.17 and later:

```python
from pathlib import Path
from kernels import get_local_kernel

kernel = get_local_kernel(Path("PATH/OF/THIS/FOLDER"))
```
"""


def write(folder: Path, number: int = 1, module: Path | None = None, name: str = NAME) -> Path:
    """Write version `number` of our kernels, or of a user's `module`, into the new folder `folder` and return it.

    A user's module is a Python file with a kernel for `registry.load`; it is used for both builds, and needs
    spark-mxfp4 installed where it is loaded. Raises ValueError for a name or number that the format does not allow,
    FileExistsError if the folder exists, OSError, and SyntaxError for a module that is not Python.
    """
    if number < 1:
        raise ValueError(f"version {number} is not possible · the hub counts from 1 · name 1")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        rule = "it has a-z, 0-9 and single dashes"
        raise ValueError(f"{name[:80]!r} is no kernel's name on the hub · {rule} · name it like fast-moe")
    if folder.exists():
        raise FileExistsError(f"{folder} is there · nothing is overwritten · name another folder, or remove it")
    about = "A kernel for MXFP4 experts." if module else f"MXFP4 mixture-of-experts kernels, {NAME} {release()}."
    terms = "other" if module else "Apache-2.0"  # the owner of the module chooses its licence
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        written = Path(temporary) / folder.name
        for backend in BACKENDS:
            contents = own_module(module) if module else copied(backend)
            _write_build(written / "build" / f"torch-{backend}", backend, name, number, terms, contents)
        card = CARD.format(name=name, about=about, license=terms.lower())
        (written / "README.md").write_text(card, encoding="utf-8")
        if module is None:
            (written / "LICENSE").write_text(licence(), encoding="utf-8")
        written.rename(folder)
    return folder


def release() -> str:
    """Return the distribution's version from this checkout, else from the installed wheel."""
    if (project := PACKAGE / "pyproject.toml").is_file():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    return version(NAME)


def licence() -> str:
    """Return the licence's text from this checkout, else from the installed wheel."""
    if (file := PACKAGE / "LICENSE").is_file():
        return file.read_text(encoding="utf-8")
    text = distribution(NAME).read_text("licenses/LICENSE")
    if text is None:
        raise FileNotFoundError(f"{NAME} has no licence's text · the wheel was changed · install it again")
    return text


def own_module(path: Path) -> dict[str, str]:
    """Return a package with a user's module as its only file. Raises SyntaxError, OSError."""
    text = path.read_text(encoding="utf-8")
    ast.parse(text, str(path))
    return {"__init__.py": text}


def copied(backend: str) -> dict[str, str]:
    """Return path → text of a backend's package: its modules, their imports, CUDA sources and tables."""
    contents: dict[str, str] = {}
    waiting = list(ROOTS[backend])
    while waiting:
        path = waiting.pop()
        if path in contents:
            continue
        text = (PACKAGE / path).read_text(encoding="utf-8")
        contents[path] = relative(text, path.count("/") + 1)
        waiting += imported(text)
        for pattern in DATA.get(path, ()):
            for file in sorted(PACKAGE.glob(pattern)):
                contents[str(file.relative_to(PACKAGE))] = file.read_text(encoding="utf-8")
    if backend == "cuda":
        contents["kernels/__init__.py"] = (PACKAGE / "kernels" / "__init__.py").read_text(encoding="utf-8")
    contents["__init__.py"] = EXPORTS.format(name=NAME, release=release(), backend=backend, own=OWN[backend])
    return contents


def imported(text: str) -> list[str]:
    """Return the files of this package that a module imports, at its top or later."""
    files = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("spark_mxfp4"):
            continue
        inner = (node.module or "").split(".")[1:]
        names = [inner, *([*inner, alias.name] for alias in node.names)]
        files += [file for parts in names if (PACKAGE / (file := "/".join(parts) + ".py")).is_file()]
    return files


def relative(text: str, depth: int) -> str:
    """Return a module's text with relative imports; the module is `depth` packages deep."""
    dots = "." * depth
    text = re.sub(r"^(\s*from )spark_mxfp4\.", rf"\g<1>{dots}", text, flags=re.MULTILINE)
    return re.sub(r"^(\s*from )spark_mxfp4 import", rf"\g<1>{dots} import", text, flags=re.MULTILINE)


def _write_build(folder: Path, backend: str, name: str, number: int, terms: str, contents: Mapping[str, str]) -> None:
    """Write one build: its files and metadata.json, whose id is also the namespace of its operators."""
    digest = hashlib.sha256("\0".join(f"{path}\0{text}" for path, text in sorted(contents.items())).encode())
    identifier = f"_{name.replace('-', '_')}_{backend}_{digest.hexdigest()[:7]}"
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(OPERATORS.sub(identifier, text), encoding="utf-8")
    metadata = {
        "name": name,
        "id": identifier,
        "version": number,
        "license": terms,
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write the folder that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spark_mxfp4.kernels.publish", description=__doc__)
    parser.add_argument("folder", type=Path, help="the repository's folder, which is created")
    parser.add_argument("--version", type=int, default=1, help="the repository's version number; default 1")
    parser.add_argument("--module", type=Path, help="a Python file with your own kernel, in place of ours")
    parser.add_argument("--name", default=NAME, help="the kernel's name; default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        print(write(options.folder.absolute(), options.version, options.module, options.name))
    except (ValueError, SyntaxError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
