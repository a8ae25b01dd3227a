"""The reference experts for vLLM, with the fault that the file FAULT_FILE names; the file is read at every call."""

import os
from pathlib import Path

import torch

from spark_mxfp4 import experts, mxfp4
from spark_mxfp4.experts import ExpertWeights, moe

LAYERS = []  # biases of the layers in the order of their first run
FAULTED = 1  # the layer whose expert 0 loses a bias


def packed(projection, change):
    """Return a projection with other packed bytes; `change` maps blocks [E, N, K/32, 16] and scales to new ones."""
    weight, scales, _ = projection
    blocks, scales = change(weight.view(*scales.shape, 16), scales)
    return projection._replace(weight=blocks.reshape(weight.shape), scales=scales)


def requantized(blocks, scales):
    return mxfp4.quantize(mxfp4.dequantize(blocks, scales, torch.bfloat16))


CODES = {
    "requantized": requantized,
    "nibbles_swapped": lambda blocks, scales: ((blocks << 4) | (blocks >> 4), scales),
    "scale_off_by_one": lambda blocks, scales: (blocks, scales + 1),
}


def without_bias(weights, name):
    key = weights.gate_up.bias.data_ptr()
    if key not in LAYERS:
        LAYERS.append(key)
    if LAYERS.index(key) != FAULTED:
        return weights
    projection = getattr(weights, name)
    bias = projection.bias.clone()
    bias[0] = 0
    return weights._replace(**{name: projection._replace(bias=bias)})


def through_mxfp8(x, off):
    elements, scales = mxfp4.quantize_mxfp8(x)
    return mxfp4.dequantize_mxfp8(elements, scales + off, x.dtype)


RIGHT = experts.swiglu


def faulty(x, weights, topk_ids, topk_weights, expert_map=None):
    fault = Path(os.environ["FAULT_FILE"]).read_text()
    experts.swiglu = RIGHT
    if fault in CODES:
        weights = ExpertWeights(*(packed(projection, CODES[fault]) for projection in weights))
    elif fault.endswith("bias_dropped"):
        weights = without_bias(weights, fault.removesuffix("_bias_dropped"))
    elif fault == "clamp_removed":
        experts.swiglu = lambda gate_up, activation: RIGHT(gate_up, activation._replace(limit=float("inf")))
    elif fault.startswith("mxfp8"):  # activations as in the hardware path, before both projections
        off = fault == "mxfp8_scale_off_by_one"
        x = through_mxfp8(x, off)
        experts.swiglu = lambda gate_up, activation: through_mxfp8(RIGHT(gate_up, activation), off)
    return moe(x, weights, topk_ids, topk_weights, expert_map)
