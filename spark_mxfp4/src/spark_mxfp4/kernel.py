"""The base class of mixture-of-experts kernels, ours and users' own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from spark_mxfp4.experts import ExpertWeights
from spark_mxfp4.mxfp4 import BLOCK, quantize

# A mixture of experts as a function with the arguments of `MoeKernel.run`.
MoeFunction: TypeAlias = Callable[..., torch.Tensor]


class MoeKernel(ABC):
    """A mixture of experts for a given routing. Your own kernel is a subclass with at least `run`.

    `registry.load` makes one instance, whose `name` is the loaded name. Hidden and intermediate sizes are padded with
    zeros to multiples of the two alignments, which are multiples of 32. A kernel that waits for the device sets
    `cuda_graphs` to False, because CUDA graphs cannot capture it. A kernel that supports activations other than
    gpt-oss' sets `activations` to True. A kernel with its own layout of weights overrides `prepare` and `restore`; it
    is never called with dense weights. A kernel with its own rounding overrides `quantize`.
    """

    hidden_alignment: int = BLOCK
    intermediate_alignment: int = BLOCK
    cuda_graphs: bool = True
    activations: bool = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def run(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum [T, H] of the experts' outputs for `x` [T, H], in x's dtype; see `experts.moe`.

        `weights` are what `prepare` returned. A kernel that sets `activations` also takes `activation`, an `Activation`
        whose default is gpt-oss'.
        """

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Return `weights` (packed, as in the checkpoint) in the kernel's own order; called once after loading."""
        return weights

    def tune(self, prepared: ExpertWeights) -> None:  # noqa: B027 (most kernels have nothing to choose)
        """Choose settings that depend on the layer's sizes; called once, when only `prepared` weights are in memory."""

    def restore(self, prepared: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:  # noqa: ARG002
        """Undo `prepare` for weights of the sizes H and I."""
        return prepared

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return blocks u8 [..., K/32, 16] and scales u8 [..., K/32] of a dense model's weights `x` [..., K]."""
        return quantize(x)

    def variant(self, prepared: ExpertWeights) -> str:  # noqa: ARG002
        """Return the name of the implementation that will run `prepared` weights, for the log."""
        return self.name

    @property
    def has_own_layout(self) -> bool:
        """Whether `prepare` changes the order of weights."""
        return type(self).prepare is not MoeKernel.prepare

    def padded(self, hidden: int, intermediate: int) -> tuple[int, int]:
        """Return both sizes rounded up to this kernel's alignments."""
        return (
            -(-hidden // self.hidden_alignment) * self.hidden_alignment,
            -(-intermediate // self.intermediate_alignment) * self.intermediate_alignment,
        )


def is_kernel_class(value: object) -> bool:
    """Tell whether `value` is a subclass of MoeKernel, or of a copy of it, as in a hub repository."""
    bases = value.__mro__ if isinstance(value, type) else ()
    return any(base.__name__ == "MoeKernel" and base.__module__.endswith(".kernel") for base in bases)


class FunctionKernel(MoeKernel):
    """A plain function with the arguments of `run` as a kernel."""

    def __init__(
        self, name: str, function: MoeFunction, *, cuda_graphs: bool = True, activations: bool = False
    ) -> None:
        super().__init__(name)
        self._function, self.cuda_graphs, self.activations = function, cuda_graphs, activations

    def run(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Call the function."""
        return self._function(*arguments, **keywords)
