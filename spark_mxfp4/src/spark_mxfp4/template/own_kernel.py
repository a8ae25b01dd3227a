"""`own_kernel`: a slow mixture of experts for MXFP4 weights, as a base for a fast kernel.

A server uses the kernel in this order:

1. **create_weights.** For each layer the integration (vLLM's plugin, or `spark_mxfp4.hf`) makes zero tensors of the
   sizes rounded up to `hidden_alignment` and `intermediate_alignment`. Padding stays zero.
2. **load.** The checkpoint's bytes are copied to the beginning of each dimension: gate and up rows interleaved, two
   values a byte.
3. **prepare.** Called once a layer, on the device, with the padded weights. Return the weights in your kernel's layout;
   `restore` undoes `prepare`. Leave both out if you keep the checkpoint's layout.
4. **apply.** Every step calls `run` with the result of `prepare`, also while CUDA graphs are captured.

The kernel must handle any number of tokens, 0 and 1 included; experts without tokens; top-k from 1 to the number of
experts; hidden and intermediate sizes of any multiple of the alignments; missing biases; experts that `expert_map`
places on another device. `spark_mxfp4.conformance` has a case for each.
"""

import torch

from spark_mxfp4.experts import ExpertWeights, Projection, moe_sorting, swiglu
from spark_mxfp4.kernel import MoeKernel
from spark_mxfp4.mxfp4 import BLOCK, BLOCK_BYTES, dequantize


class OwnKernel(MoeKernel):
    """Computes one expert after another in torch: correct, but slow."""

    hidden_alignment = BLOCK  # multiples of 32; sizes are padded with zeros up to them
    intermediate_alignment = BLOCK
    cuda_graphs = False  # this kernel waits for the device to learn the selected experts; True if yours does not

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Return `weights` in this kernel's layout: here a row's bytes are split into blocks, [E, N, K/32, 16]."""
        return ExpertWeights(*(p._replace(weight=p.weight.unflatten(-1, (-1, BLOCK_BYTES))) for p in weights))

    def restore(self, prepared: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:  # noqa: ARG002
        """Undo `prepare` for weights of the sizes H and I; return the checkpoint's bytes."""
        return ExpertWeights(*(p._replace(weight=p.weight.flatten(-2)) for p in prepared))

    def run(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum [T, H] of the experts' outputs for `x` [T, H], in x's dtype.

        `topk_ids` (int [T, k]) and `topk_weights` (float [T, k]) are the routing. `expert_map` (int [global experts])
        gives each expert's number on this device, or -1 if it is on another device; None if all are on this device.
        """
        experts, top_k = weights.down.weight.shape[0], topk_ids.shape[-1]
        pairs, offsets = moe_sorting(topk_ids, experts, expert_map)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(experts):
            rows = pairs[int(offsets[expert]) : int(offsets[expert + 1])]
            if len(rows):
                hidden = swiglu(self._product(x[rows // top_k].float(), weights.gate_up, expert))
                output = self._product(hidden, weights.down, expert)
                total.index_add_(0, rows // top_k, output * topk_weights.flatten()[rows].float().unsqueeze(-1))
        return total.to(x.dtype)

    @staticmethod
    def _product(x: torch.Tensor, projection: Projection, expert: int) -> torch.Tensor:
        weight, scales, bias = projection
        if scales is None:
            raise ValueError("own_kernel takes packed weights · these are dense · set SPARK_MXFP4_MODE=packed")
        product = x @ dequantize(weight[expert], scales[expert]).T
        return product if bias is None else product + bias[expert].float()
