"""Load CUDA kernels as a shared library, compiled beforehand by `precompile` or built at first use."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from typing import Any

import torch

from spark_mxfp4.kernels import precompile

NO_FIT = -1  # a kernel's result if the chosen variant does not support the size


def target(device: torch.device) -> str | None:
    """Return the target of `precompile` for `device`, such as "90a"; None if no kernels are compiled for it."""
    if device.type != "cuda" or torch.version.hip is not None:  # AMD's gfx90a reports 9.0 too
        return None
    name = "".join(map(str, torch.cuda.get_device_capability(device))) + "a"
    return name if name in precompile.LIBRARIES else None


def library(name: str, target: str | None, subject: str, alternative: str) -> str:
    """Return the path of `precompile`'s library `name` for `target`, such as "90a"; compile it if necessary.

    Raises NotImplementedError if `target` is None, or if there is neither a compiled library nor nvcc. Its message says
    that `subject` cannot run, and recommends `alternative`.
    """
    if target is None:
        raise NotImplementedError(
            f"{subject} cannot run on this device · they are compiled for NVIDIA's compute capabilities 9.0, 12.0 and "
            f"12.1 · {alternative}"
        )
    try:
        return str(precompile.library(name, target) or precompile.build(name, target, precompile.cache()))
    except FileNotFoundError as error:
        why = str(error).partition(" · ")[2]
        raise NotImplementedError(f"{subject} cannot be built · {why}, or {alternative}") from error


def available(name: str, target: str) -> bool:
    """Tell whether the library `name` is compiled for `target`, or a compiler is installed."""
    try:
        return bool(precompile.library(name, target) or precompile.nvcc())
    except FileNotFoundError:
        return False


def bind(path: str, functions: Mapping[str, tuple[type, ...]]) -> ctypes.CDLL:
    """Load the shared library at `path`, and declare the arguments of its `functions`."""
    loaded = ctypes.CDLL(path)
    loaded.spark_error.restype = ctypes.c_char_p
    for name, arguments in functions.items():
        if hasattr(loaded, name):
            getattr(loaded, name).argtypes = arguments
    return loaded


C_TYPES = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def structure(name: str, *members: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Return `struct name` of arguments.cuh for ctypes; `members` are the types of nested structs."""
    text = (precompile.FOLDER / "arguments.cuh").read_text(encoding="utf-8")
    [body] = re.findall(rf"^struct {name} {{.*?\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    types: dict[str, Any] = {**C_TYPES, **{member.__name__: member for member in members}}
    fields = [
        (field, ctypes.c_void_p if pointer else types[kind])
        for kind, pointer, names in re.findall(r"(?:const )?(\w+)(\*?) ([\w, ]+);", re.sub("//.*", "", body))
        for field in names.split(", ")
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def launch(loaded: ctypes.CDLL, name: str, *arguments: ctypes.Structure | int, device: torch.device) -> bool:
    """Call the function `name` with structures by reference, numbers, and the current stream of `device`.

    Return False if it returned NO_FIT. Raises RuntimeError with CUDA's message if it returned another error.
    """
    passed = (ctypes.byref(value) if isinstance(value, ctypes.Structure) else value for value in arguments)
    error: int = getattr(loaded, name)(*passed, torch.cuda.current_stream(device).cuda_stream)
    if error not in (0, NO_FIT):
        raise RuntimeError(
            f"a kernel could not be started · CUDA says: {loaded.spark_error(error).decode()} · "
            "run again with CUDA_LAUNCH_BLOCKING=1"
        )
    return error != NO_FIT


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return bf16 `x` [M, K], or a contiguous copy if kernels cannot load its rows by 16 bytes."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
