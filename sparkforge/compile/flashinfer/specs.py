"""Run FlashInfer's generators of build files: a program for the interpreter that has FlashInfer, never imported.

`probe` prints the installed versions. `write` reads [{name, generator, arguments}, …] from stdin, lets FlashInfer
write each module's sources and build.ninja into its cache, and prints the folders. It uses only the standard library
and FlashInfer.

The packages flashinfer and flashinfer.jit are imported without running their __init__, which needs a GPU
(gdn_kernels/gdn_decode_bf16_state.py:2705); the generators need none.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

DISTRIBUTIONS = ("flashinfer-python", "torch", "apache-tvm-ffi")


def probe() -> dict[str, str]:
    """Return the versions of `DISTRIBUTIONS` (empty: not installed), FlashInfer's folder, and Python's headers."""
    versions = dict.fromkeys(DISTRIBUTIONS, "")
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    spec = importlib.util.find_spec("flashinfer")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return {**versions, "package": folders[0] if folders else "", "include": sysconfig.get_path("include")}


def write(requests: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Let FlashInfer write the build files of each request; return name and folder of each module."""
    enter(Path(probe()["package"]))
    modules = []
    for request in requests:
        arguments = {key: resolve(value) for key, value in request["arguments"].items()}
        spec = resolve("@" + request["generator"])(**arguments)
        if spec.name != request["name"]:
            raise ValueError(f"{request['generator']} made {spec.name} instead of {request['name']}")
        spec.write_ninja()
        modules.append({"name": spec.name, "folder": str(spec.build_dir.resolve())})
    return modules


def enter(package: Path) -> None:
    """Make flashinfer and flashinfer.jit importable without running their __init__."""
    for name in ("flashinfer", "flashinfer.jit"):
        module = ModuleType(name)
        module.__path__ = [str(package.parent / name.replace(".", "/"))]
        sys.modules[name] = module


def resolve(value: Any) -> Any:
    """Return the object that "@module:name" names; other values unchanged."""
    if not (isinstance(value, str) and value.startswith("@")):
        return value
    module, _, name = value[1:].partition(":")
    return getattr(importlib.import_module(module), name)


def main(question: str) -> None:
    """Print the answer as the last line of stdout, {"error": …} if FlashInfer refuses."""
    try:
        answer: Any = probe() if question == "probe" else write(json.load(sys.stdin))
    except Exception as error:  # noqa: BLE001 - every error of FlashInfer is an answer
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
