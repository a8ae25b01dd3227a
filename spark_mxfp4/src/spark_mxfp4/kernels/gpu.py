"""The kernel of `SPARK_MXFP4_KERNEL=triton`: the fastest one that the GPU and the weights allow.

On compute capability 9.0 and 12.1, compiled or with nvcc, this is the CUDA kernel of `hopper`, which has its own layout
of weights. Otherwise, and for layers with scales above 2^1, it is the Triton kernel, which takes checkpoint bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from spark_mxfp4.experts import ExpertWeights
from spark_mxfp4.kernel import FunctionKernel, MoeKernel
from spark_mxfp4.kernels import fused, layout
from spark_mxfp4.kernels.hopper import HopperKernel


class GpuKernel(MoeKernel):
    """HopperKernel or `fused.moe`, chosen for each layer by `prepare`."""

    activations = True

    def __init__(self, name: str = "triton") -> None:
        super().__init__(name)
        self._hopper, self._triton = HopperKernel("hopper"), FunctionKernel("triton", fused.moe)

    def run(self, x: torch.Tensor, weights: ExpertWeights, *routing: Any, **keywords: Any) -> torch.Tensor:
        """See MoeKernel."""
        return self._chosen(weights).run(x, weights, *routing, **keywords)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Return `weights` (packed MXFP4, as in the checkpoint) in the chosen kernel's layout.

        If biases are not bfloat16, activations will not be either, so those layers use Triton.
        Raises NotImplementedError for weights on other devices than CUDA, and on AMD GPUs, which torch calls cuda too.
        """
        device = weights.down.weight.device
        if device.type != "cuda":
            raise NotImplementedError(
                f"kernel 'triton' cannot run on {device} · it needs an NVIDIA GPU · set SPARK_MXFP4_KERNEL=torch"
            )
        if torch.version.hip is not None:
            raise NotImplementedError(
                "kernel 'triton' cannot run on an AMD GPU · none of its kernels was compiled for one or checked on "
                "one · set SPARK_MXFP4_KERNEL=torch"
            )
        in_bfloat16 = all(p.bias is None or p.bias.dtype == torch.bfloat16 for p in weights)
        if self._hopper.available(device) and in_bfloat16 and layout.fits(weights):
            return self._hopper.prepare(weights)
        return weights

    def tune(self, prepared: ExpertWeights) -> None:
        """See MoeKernel. Triton's tiles always come from tuned.json."""
        self._chosen(prepared).tune(prepared)

    def restore(self, prepared: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
        """Return the checkpoint's bytes, with biases in bfloat16."""
        return self._chosen(prepared).restore(prepared, hidden, intermediate)

    def variant(self, prepared: ExpertWeights) -> str:
        """Return the kernel that will run these weights: "hopper", on 12.1 "layer" (both CUDA C++), or "triton"."""
        return self._chosen(prepared).variant(prepared)

    def _chosen(self, weights: ExpertWeights) -> MoeKernel:
        return self._hopper if weights.down.weight.dim() == 4 else self._triton
