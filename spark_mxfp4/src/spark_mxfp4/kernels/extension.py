"""A set of CUDA kernels as a shared library: compiled beforehand by `precompile`, else built when first needed."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spark_mxfp4.kernels import precompile


def library(name: str, target: str, subject: str, alternative: str) -> str:
    """Return the path of the library `name` (of precompile) for `target`, such as "90a".

    Where `precompile` left none, torch's extension loader builds it with nvcc and caches it. Raises NotImplementedError
    where there is no nvcc: `subject` says what cannot be built, `alternative` what to do without it.
    """
    if compiled := precompile.library(name, target):
        return str(compiled)
    from torch.utils import cpp_extension  # noqa: PLC0415 (heavy, and needed once)

    if compiler() is None:
        raise NotImplementedError(
            f"{subject} cannot be built · there is no nvcc · install CUDA 13's compiler and set CUDA_HOME, or "
            f"{alternative}"
        )
    return str(
        cpp_extension.load(
            name=f"spark_mxfp4_{name}_{target}",
            sources=list(map(str, precompile.sources(name))),
            extra_cuda_cflags=list(precompile.flags(target)),
            extra_include_paths=[str(precompile.FOLDER)],
            is_python_module=False,
        )
    )


C_TYPES = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def structure(file: str, name: str, *members: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Return the arguments `struct name` of a kernel's source `file` for ctypes; `members` are the structs in it."""
    text = (precompile.FOLDER / file).read_text(encoding="utf-8")
    [body] = re.findall(rf"^struct {name} {{.*?\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    types: dict[str, Any] = {**C_TYPES, **{member.__name__: member for member in members}}
    fields = [
        (field, ctypes.c_void_p if pointer else types[kind])
        for kind, pointer, names in re.findall(r"(?:const )?(\w+)(\*?) ([\w, ]+);", re.sub("//.*", "", body))
        for field in names.split(", ")
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def compiler() -> Path | None:
    """Return nvcc, by CUDA_HOME or from PATH, as torch's extension loader will find it."""
    from torch.utils import cpp_extension  # noqa: PLC0415

    if cpp_extension.CUDA_HOME and (nvcc := Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        return nvcc
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else None


def check(error: int, message: Callable[[int], bytes]) -> None:
    """Raise RuntimeError if a launch returned a CUDA `error` other than 0; `message` gives CUDA's text for it."""
    if error:
        raise RuntimeError(
            f"a kernel could not be started · CUDA says: {message(error).decode()} · "
            "run again with CUDA_LAUNCH_BLOCKING=1"
        )


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return bf16 `x` [M, K] so that kernels can load its rows by 16 bytes: itself, or a contiguous copy."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
