"""Mixture-of-experts kernels by name; `SPARK_MXFP4_KERNEL` chooses one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from spark_mxfp4 import hub_kernels
from spark_mxfp4.experts import ExpertWeights, moe
from spark_mxfp4.mxfp4 import BLOCK

KERNEL_VARIABLE = "SPARK_MXFP4_KERNEL"
DEFAULT_KERNEL = "torch"
DEVICE_KERNELS = {"cuda": "triton"}  # torch's device type → kernel, where it is not DEFAULT_KERNEL


class MoeKernel(Protocol):
    """A mixture of experts whose routing is given: [T, H] → [T, H] in x's dtype; see `experts.moe`.

    It may carry `hidden_alignment` and `intermediate_alignment` (int): the sizes that its weights are padded to with
    zeros. Without them, both are 32. With a layout of its own it carries two functions more: `prepare(weights)` is
    called once after loading, with packed weights in the checkpoint's order, and returns the ExpertWeights that the
    kernel will be called with; `restore(prepared, hidden, intermediate)` returns the checkpoint's weights again.
    `variant(prepared)` names which of several implementations will run them, for the log.
    `cuda_graphs = False` says that it waits for the device, so that CUDA graphs cannot hold it.
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

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Return packed `weights` in the kernel's own layout; the same where it has none."""
        layout: Callable[[ExpertWeights], ExpertWeights] | None = getattr(self.function, "prepare", None)
        return layout(weights) if layout else weights

    def restore(self, prepared: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
        """Undo `prepare` for weights of the sizes H and I."""
        layout: Callable[..., ExpertWeights] | None = getattr(self.function, "restore", None)
        return layout(prepared, hidden, intermediate) if layout else prepared

    def variant(self, prepared: ExpertWeights) -> str:
        """Return the name of the implementation that `prepared` weights will run on; the kernel's own if it has one."""
        told: Callable[[ExpertWeights], str] | None = getattr(self.function, "variant", None)
        return told(prepared) if told else self.name

    def padded(self, hidden: int, intermediate: int) -> tuple[int, int]:
        """Return both sizes rounded up to this kernel's alignments."""
        return _round_up(hidden, self.hidden_alignment), _round_up(intermediate, self.intermediate_alignment)


def _torch() -> MoeKernel:
    return moe


def _triton() -> MoeKernel:
    try:
        from spark_mxfp4.kernels import gpu  # noqa: PLC0415 (Triton is not everywhere)
    except ImportError as error:
        raise NotImplementedError(
            f"kernel 'triton' cannot be used · {error} · install triton, or set {KERNEL_VARIABLE} to 'torch'"
        ) from error
    return gpu.moe


KERNELS: dict[str, Callable[[], MoeKernel]] = {"torch": _torch, "triton": _triton}


def chosen_name(device: str = "cpu") -> str:
    """Return the kernel's name from SPARK_MXFP4_KERNEL, else the default of torch's device type `device`."""
    return os.environ.get(KERNEL_VARIABLE) or DEVICE_KERNELS.get(device, DEFAULT_KERNEL)


def load(name: str | None = None) -> Kernel:
    """Find a kernel by `name` (default: `chosen_name()`): one of KERNELS, or anybody's own.

    That is `module:function`, or a folder or hub repository as `hub_kernels` writes them: a name with a slash.
    Raises ValueError for an unknown name, a module that cannot be imported, or something that is no function, and
    NotImplementedError for a kernel that is named but not built.
    """
    name = name or chosen_name()
    function = _own(name) if {":", "/"} & set(name) else _known(name)()
    alignments = {key: _alignment(name, function, key) for key in ("hidden_alignment", "intermediate_alignment")}
    return Kernel(name, function, **alignments)


def _known(name: str) -> Callable[[], MoeKernel]:
    try:
        return KERNELS[name]
    except KeyError:
        known = ", ".join(repr(key) for key in KERNELS)
        raise ValueError(
            f"there is no kernel {name!r} · known are {known}, 'module:function', './folder' and 'owner/name@version' "
            f"· set {KERNEL_VARIABLE} to one"
        ) from None


def _own(name: str) -> MoeKernel:
    found = hub_kernels.find(name) if "/" in name else _imported(name)
    if not callable(found):
        raise ValueError(f"kernel {name!r} cannot be used · it is a {type(found).__name__} · name a function")  # noqa: TRY004 (a bad name, whatever it names)
    kernel: MoeKernel = found
    return kernel


def _imported(name: str) -> object:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(
            f"kernel {name!r} cannot be loaded · {error} · check that PYTHONPATH reaches the module and its spelling"
        ) from error


def _alignment(name: str, function: MoeKernel, key: str) -> int:
    value = getattr(function, key, BLOCK)
    if not isinstance(value, int) or value <= 0 or value % BLOCK:
        raise ValueError(f"kernel {name!r} cannot be used · its {key} is {value!r} · make it a multiple of {BLOCK}")
    return value


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
