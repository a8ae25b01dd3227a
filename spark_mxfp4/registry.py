"""Mixture-of-experts kernels by name; `SPARK_MXFP4_KERNEL` chooses one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from spark_mxfp4.experts import ExpertWeights, moe
from spark_mxfp4.mxfp4 import BLOCK

KERNEL_VARIABLE = "SPARK_MXFP4_KERNEL"
DEFAULT_KERNEL = "torch"


class MoeKernel(Protocol):
    """A mixture of experts whose routing is given: [T, H] → [T, H] in x's dtype; see `experts.moe`.

    It may carry `hidden_alignment` and `intermediate_alignment` (int): the sizes that its weights are padded to with
    zeros. Without them, both are 32.
    """

    def __call__(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that was found: its name, the function, and the multiples that hidden and intermediate sizes must be."""

    name: str
    function: MoeKernel
    hidden_alignment: int = BLOCK
    intermediate_alignment: int = BLOCK

    def padded(self, hidden: int, intermediate: int) -> tuple[int, int]:
        """Return both sizes rounded up to this kernel's alignments."""
        return _round_up(hidden, self.hidden_alignment), _round_up(intermediate, self.intermediate_alignment)


def _torch() -> MoeKernel:
    return moe


def _triton() -> MoeKernel:
    raise NotImplementedError(
        "kernel 'triton' cannot be used · it comes with the GPU kernels and is not built yet · "
        f"unset {KERNEL_VARIABLE} or set it to 'torch'"
    )


KERNELS: dict[str, Callable[[], MoeKernel]] = {"torch": _torch, "triton": _triton}


def chosen_name() -> str:
    """Return the kernel's name from SPARK_MXFP4_KERNEL, else `torch`."""
    return os.environ.get(KERNEL_VARIABLE) or DEFAULT_KERNEL


def load(name: str | None = None) -> Kernel:
    """Find a kernel by `name` (default: `chosen_name()`): one of KERNELS, or `module:function` for anybody's own.

    Raises ValueError for an unknown name, a module that cannot be imported, or something that is no function, and
    NotImplementedError for a kernel that is named but not built.
    """
    name = name or chosen_name()
    function = _own(name) if ":" in name else _known(name)()
    alignments = {key: _alignment(name, function, key) for key in ("hidden_alignment", "intermediate_alignment")}
    return Kernel(name, function, **alignments)


def _known(name: str) -> Callable[[], MoeKernel]:
    try:
        return KERNELS[name]
    except KeyError:
        known = ", ".join(repr(key) for key in KERNELS)
        raise ValueError(
            f"there is no kernel {name!r} · known are {known} and 'module:function' · set {KERNEL_VARIABLE} to one"
        ) from None


def _own(name: str) -> MoeKernel:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(
            f"kernel {name!r} cannot be loaded · {error} · check that PYTHONPATH reaches the module and its spelling"
        ) from error
    if not callable(found):
        raise ValueError(f"kernel {name!r} cannot be used · it is a {type(found).__name__} · name a function")  # noqa: TRY004 (a bad name, whatever it names)
    kernel: MoeKernel = found
    return kernel


def _alignment(name: str, function: MoeKernel, key: str) -> int:
    value = getattr(function, key, BLOCK)
    if not isinstance(value, int) or value <= 0 or value % BLOCK:
        raise ValueError(f"kernel {name!r} cannot be used · its {key} is {value!r} · make it a multiple of {BLOCK}")
    return value


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
