"""Ask FlashInfer's own generators for build files. A program for the interpreter that has FlashInfer; never imported.

`probe` prints what that interpreter has; `write` reads [{name, generator, arguments}, …] from stdin, has FlashInfer
write each module's sources and build.ninja into its cache, and prints where. Standard library and FlashInfer only.

The packages flashinfer and flashinfer.jit are entered without their __init__: importing flashinfer asks for a GPU
(gdn_kernels/gdn_decode_bf16_state.py:2705), and generators do not.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

DISTRIBUTIONS = ("flashinfer-python", "torch", "apache-tvm-ffi")


def probe() -> dict[str, str]:
    """Return the versions of `DISTRIBUTIONS` (empty: not there), FlashInfer's folder, and Python's headers."""
    found = importlib.util.find_spec("flashinfer")
    versions = {name: _version(name) for name in DISTRIBUTIONS}
    places = list(found.submodule_search_locations or ()) if found else []
    return {**versions, "package": places[0] if places else "", "include": sysconfig.get_path("include")}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def write(requests: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Have FlashInfer write the build files of each request; return name and folder of each module."""
    enter(Path(probe()["package"]))
    made = []
    for request in requests:
        arguments = {key: resolve(value) for key, value in request["arguments"].items()}
        spec = resolve("@" + request["generator"])(**arguments)
        if spec.name != request["name"]:
            raise ValueError(f"{request['generator']} made {spec.name} and not {request['name']}")
        spec.write_ninja()
        made.append({"name": spec.name, "folder": str(spec.build_dir.resolve())})
    return made


def enter(package: Path) -> None:
    """Make flashinfer and flashinfer.jit importable without running their __init__."""
    for name in ("flashinfer", "flashinfer.jit"):
        module = ModuleType(name)
        module.__path__ = [str(package.parent / name.replace(".", "/"))]
        sys.modules[name] = module


def resolve(value: Any) -> Any:
    """Return the object that "@module:name" stands for; anything else as it is."""
    if not (isinstance(value, str) and value.startswith("@")):
        return value
    module, _, name = value[1:].partition(":")
    return getattr(importlib.import_module(module), name)


def main(verb: str) -> None:
    """Print the answer as the last line of stdout, {"error": …} where FlashInfer refuses."""
    try:
        answer: Any = probe() if verb == "probe" else write(json.load(sys.stdin))
    except Exception as error:  # noqa: BLE001 - whatever FlashInfer raises is told to the one who asked
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
