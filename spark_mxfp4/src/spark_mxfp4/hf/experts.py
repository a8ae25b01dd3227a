"""The module that replaces transformers' `GptOssExperts`: packed MXFP4 weights, run by one of our kernels."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from spark_mxfp4 import operator
from spark_mxfp4.experts import SWIGLU_ALPHA, SWIGLU_LIMIT, ExpertWeights, Projection, TopK
from spark_mxfp4.kernel import MoeKernel
from spark_mxfp4.mxfp4 import BLOCK, BLOCK_BYTES

PROJECTIONS = ("gate_up_proj", "down_proj")
SUFFIXES = ("_blocks", "_scales", "_bias")


class ExpertSizes(NamedTuple):
    """A layer's sizes: E experts, hidden size H and intermediate size I, both multiples of 32."""

    experts: int
    hidden: int
    intermediate: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its name in the checkpoint."""
        shapes = dict[str, tuple[int, ...]]()
        matrices = ((2 * self.intermediate, self.hidden), (self.hidden, self.intermediate))
        for name, (rows, columns) in zip(PROJECTIONS, matrices, strict=True):
            blocks = columns // BLOCK
            shapes[f"{name}_blocks"] = (self.experts, rows, blocks, BLOCK_BYTES)
            shapes[f"{name}_scales"] = (self.experts, rows, blocks)
            shapes[f"{name}_bias"] = (self.experts, rows)
        return shapes


class PackedExperts(nn.Module):
    """E experts in MXFP4; parameters have the names, shapes and bytes of a gpt-oss checkpoint.

    `gate_up_proj_blocks` u8 [E, 2I, H/32, 16], `gate_up_proj_scales` u8 [E, 2I, H/32], `gate_up_proj_bias` [E, 2I],
    and `down_proj_*` likewise with N = H and K = I. Gate and up rows are interleaved. For a kernel with another layout
    `prepare` replaces these bytes, so memory holds one copy; `state_dict()` and `.to()` restore them first.
    """

    def __init__(
        self, sizes: ExpertSizes, kernel: MoeKernel, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.sizes, self.kernel = sizes, kernel
        self._ready: ExpertWeights | None = None
        for name, shape in sizes.shapes().items():
            kind = dtype if name.endswith("_bias") else torch.uint8
            empty = torch.empty(shape, dtype=kind, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' weighted sum [T, H] for `hidden_states` [T, H] and a routing [T, k], as GptOssExperts."""
        if self._ready is None:
            self.prepare()
        hidden, (padded, _) = self.sizes.hidden, self.kernel.padded(self.sizes.hidden, self.sizes.intermediate)
        x = nn.functional.pad(hidden_states, (0, padded - hidden)) if padded != hidden else hidden_states
        output = operator.run(self.kernel, x, self.ready(), TopK(router_indices, routing_weights))
        return output[..., :hidden] if padded != hidden else output

    def ready(self) -> ExpertWeights:
        """Return the weights in the kernel's layout. Raises RuntimeError before `prepare`."""
        if self._ready is None:
            raise RuntimeError("the experts are not prepared, or their weights have changed since · call prepare()")
        return self._ready

    @torch.compiler.disable
    def prepare(self) -> None:
        """Convert the weights to the kernel's layout; free the checkpoint's bytes if the layouts differ."""
        if self._ready is not None:
            return
        projections = (Projection(*(getattr(self, name + suffix).data for suffix in SUFFIXES)) for name in PROJECTIONS)
        checkpoint = ExpertWeights(*(p._replace(weight=p.weight.flatten(-2)) for p in projections))
        self._ready = prepare_padded(self.kernel, checkpoint, self.sizes.hidden, self.sizes.intermediate)
        if self._ready.gate_up.weight.data_ptr() != checkpoint.gate_up.weight.data_ptr():
            for name, suffix in product(PROJECTIONS, SUFFIXES[:2]):
                parameter = getattr(self, name + suffix)
                parameter.data = parameter.data.new_empty(0)
        del checkpoint
        self.kernel.tune(self._ready)

    def unprepare(self) -> None:
        """Restore the checkpoint's bytes in the parameters."""
        if self._ready is None:
            return
        if self.get_parameter("gate_up_proj_blocks").numel() == 0:
            checkpoint = restore_padded(self.kernel, self._ready, self.sizes.hidden, self.sizes.intermediate)
            for name, (weight, scales, _) in zip(PROJECTIONS, checkpoint, strict=True):
                getattr(self, f"{name}_blocks").data = weight.view(*weight.shape[:2], -1, BLOCK_BYTES)
                getattr(self, f"{name}_scales").data = scales
        self._ready = None

    def use(self, kernel: MoeKernel) -> None:
        """Change the kernel."""
        self.unprepare()
        self.kernel = kernel

    def misfit(self) -> str | None:
        """Describe the first loaded parameter with a wrong shape or dtype; return None if there is none."""
        for name, shape in self.sizes.shapes().items():
            parameter, kind = getattr(self, name), "float" if name.endswith("_bias") else torch.uint8
            if tuple(parameter.shape) != shape or parameter.is_floating_point() != name.endswith("_bias"):
                return f"{name} is {parameter.dtype} {tuple(parameter.shape)} instead of {kind} {shape}"
        return None

    def extra_repr(self) -> str:
        """Return sizes and kernel for `print(model)`."""
        experts, hidden, intermediate = self.sizes
        return f"experts={experts}, hidden={hidden}, intermediate={intermediate}, kernel={self.kernel.name!r}"

    def _apply(self, fn: Any, recurse: bool = True) -> PackedExperts:
        self.unprepare()
        moved: PackedExperts = super()._apply(fn, recurse)
        return moved

    def _save_to_state_dict(self, *args: Any) -> None:
        self.unprepare()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.unprepare()
        super()._load_from_state_dict(*args)


def check_activation(alpha: float, limit: float) -> None:
    """Raise ValueError unless SwiGLU has gpt-oss' slope and clamp, which are constants in the kernels."""
    if (alpha, limit) != (SWIGLU_ALPHA, SWIGLU_LIMIT):
        raise ValueError(
            f"cannot run these experts · swiglu_alpha is {alpha} and swiglu_limit {limit}, the kernels know "
            f"{SWIGLU_ALPHA} and {SWIGLU_LIMIT} · leave the model as it is"
        )


def prepare_padded(kernel: MoeKernel, weights: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
    """Return `weights` (packed, sizes H and I) padded to the kernel's sizes and in its layout.

    Padded elements, scales and biases are 0, so the values beyond H and I are 0 and change no sum.
    """
    padded_hidden, padded_intermediate = kernel.padded(hidden, intermediate)
    if (padded_hidden, padded_intermediate) != (hidden, intermediate):
        weights = ExpertWeights(
            _pad(weights.gate_up, 2 * padded_intermediate, padded_hidden),
            _pad(weights.down, padded_hidden, padded_intermediate),
        )
    return kernel.prepare(weights)


def restore_padded(kernel: MoeKernel, weights: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
    """Undo `prepare_padded`: return the checkpoint's bytes as contiguous tensors."""
    padded = kernel.restore(weights, *kernel.padded(hidden, intermediate))
    return ExpertWeights(_cut(padded.gate_up, 2 * intermediate, hidden), _cut(padded.down, hidden, intermediate))


def _pad(projection: Projection, rows: int, columns: int) -> Projection:
    weight, scales, bias = projection
    if scales is None:
        raise ValueError("only packed experts are padded · these are dense · quantize them first")
    padding = rows - weight.shape[1]
    return Projection(
        nn.functional.pad(weight, (0, columns // 2 - weight.shape[2], 0, padding)),
        nn.functional.pad(scales, (0, columns // BLOCK - scales.shape[2], 0, padding)),
        None if bias is None else nn.functional.pad(bias, (0, padding)),
    )


def _cut(projection: Projection, rows: int, columns: int) -> Projection:
    weight, scales, bias = projection
    if scales is None:
        raise ValueError("only packed experts are cut · these are dense · quantize them first")
    return Projection(
        weight[:, :rows, : columns // 2].contiguous(),
        scales[:, :rows, : columns // BLOCK].contiguous(),
        None if bias is None else bias[:, :rows].contiguous(),
    )
