"""Kernels as users write them; tests name them `own_kernels:NAME`."""

from spark_mxfp4.experts import ExpertWeights, Projection, moe
from spark_mxfp4.kernel import MoeKernel

number = 3


def plain(x, weights, topk_ids, topk_weights, expert_map=None):
    return x


def marked(x, weights, topk_ids, topk_weights, expert_map=None):
    return x


marked.hidden_alignment = 128


class Other:
    pass


class Padded(MoeKernel):
    """Requires sizes in multiples of 256 and checks them."""

    hidden_alignment = intermediate_alignment = 256

    def run(self, x, weights, topk_ids, topk_weights, expert_map=None):
        sizes = {x.shape[-1], weights.down.weight.shape[1], 2 * weights.down.weight.shape[2]}
        if any(size % 256 for size in sizes):
            raise ValueError(f"not padded: {sizes}")
        return moe(x, weights, topk_ids, topk_weights, expert_map)


class Odd(Padded):
    hidden_alignment = 48


def turned(p):
    return p._replace(weight=p.weight.transpose(1, 2).contiguous(), scales=p.scales.transpose(1, 2).contiguous())


def swapped(p):
    return p._replace(weight=p.weight >> 4 | p.weight << 4)


def flipped(p):
    return Projection(swapped(p).weight.flip(0), p.scales.flip(0), p.bias)


class Turned(MoeKernel):
    """Has its own layout, so that loading temporarily needs a layer's bytes in both layouts."""

    def run(self, x, weights, topk_ids, topk_weights, expert_map=None):
        return moe(x, self.restore(weights), topk_ids, topk_weights, expert_map)

    def prepare(self, weights):
        return ExpertWeights(*map(turned, weights))

    def restore(self, prepared, *_sizes):
        return ExpertWeights(*map(turned, prepared))


class LaidOut(Turned):
    """Experts backwards, nibbles swapped, another shape, padding."""

    intermediate_alignment = 128

    def prepare(self, weights):
        return ExpertWeights(*(turned(flipped(p)) for p in weights))

    def restore(self, prepared, *_sizes):
        return ExpertWeights(*(flipped(turned(p)) for p in prepared))
