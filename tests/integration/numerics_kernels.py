"""A kernel as a user would write it, which requires sizes in multiples of 128, so 64 gets padded."""

from spark_mxfp4.experts import moe
from spark_mxfp4.kernel import MoeKernel


class Padded(MoeKernel):
    hidden_alignment = intermediate_alignment = 128

    def run(self, x, weights, topk_ids, topk_weights, expert_map=None):
        if x.shape[-1] != 128 or weights.down.weight.shape[1] != 128:
            raise ValueError(f"sizes were not padded to 128: {x.shape}, {weights.down.weight.shape}")
        return moe(x, weights, topk_ids, topk_weights, expert_map)
