"""Random weights for the tiny checkpoint, to test numerics: every prompt uses every expert, with large values.

Every byte is derived from `RECIPE` and the tensors' names with SHAKE-256, so all machines write the same files. Logits
are well separated and SwiGLU reaches its limit of 7.
"""

import hashlib

import numpy as np

from sparkforge.models.harmony import VOCAB_SIZE
from sparkforge.models.tiny import BLOCK, HEAD_DIM, Sizes, Tensor, Weights, bfloat16

RECIPE = 1  # increase it when the bytes change, so that older directories are written again
SIZES = Sizes(hidden=64, intermediate=64, layers=4, experts=8, top_k=4, heads=4, kv_heads=2)


def tensors():
    """Yield the checkpoint's tensors by name, in the order of the model."""
    yield "model.embed_tokens.weight", _uniform("embed", (VOCAB_SIZE, SIZES.hidden), 2.0)
    for layer in range(SIZES.layers):
        for name, tensor in _layer(f"model.layers.{layer}."):
            yield f"model.layers.{layer}.{name}", tensor
    yield "model.norm.weight", _norm("norm")
    yield "lm_head.weight", _uniform("lm_head", (VOCAB_SIZE, SIZES.hidden), 0.5)


def _layer(seed):
    """Yield one layer's tensors; their amplitudes keep activations near 1 and make SwiGLU reach its limit of 7."""
    hidden, attention, key_values = SIZES.hidden, SIZES.heads * HEAD_DIM, SIZES.kv_heads * HEAD_DIM
    yield "input_layernorm.weight", _norm(seed + "input")
    yield "post_attention_layernorm.weight", _norm(seed + "post")
    rows = {"q": (attention, hidden), "k": (key_values, hidden), "v": (key_values, hidden), "o": (hidden, attention)}
    for name, shape in rows.items():
        yield f"self_attn.{name}_proj.weight", _uniform(seed + name, shape, 0.125 if name == "o" else 0.25)
        yield f"self_attn.{name}_proj.bias", _uniform(seed + name + "bias", shape[:1], 0.25)
    yield "self_attn.sinks", _uniform(seed + "sinks", (SIZES.heads,), 2.0)
    yield "mlp.router.weight", _uniform(seed + "router", (SIZES.experts, hidden), 0.25)
    yield "mlp.router.bias", _uniform(seed + "router bias", (SIZES.experts,), 0.25)
    yield from _experts(seed, "gate_up_proj", 2 * SIZES.intermediate, hidden, scale=124)
    yield from _experts(seed, "down_proj", hidden, SIZES.intermediate, scale=118)


def _experts(seed, name, rows, columns, *, scale):
    """Yield one expert projection: packed E2M1 pairs, E8M0 scales `scale` or `scale` + 1, bias."""
    blocks, scales = (SIZES.experts, rows, columns // BLOCK, 16), (SIZES.experts, rows, columns // BLOCK)
    raw = _bytes(f"{seed}{name} scales", int(np.prod(scales)))
    yield f"mlp.experts.{name}_blocks", Tensor(blocks, "U8", _bytes(f"{seed}{name}", int(np.prod(blocks))).tobytes())
    yield f"mlp.experts.{name}_scales", Tensor(scales, "U8", ((raw & 1) + np.uint8(scale)).tobytes())
    yield f"mlp.experts.{name}_bias", _uniform(f"{seed}{name} bias", (SIZES.experts, rows), 0.5)


def _bytes(name, count):
    return np.frombuffer(hashlib.shake_256(f"{RECIPE} {name}".encode()).digest(count), dtype=np.uint8)


def _uniform(name, shape, amplitude):
    """Make a bfloat16 tensor of odd multiples of amplitude / 256 (a power of two), which bfloat16 holds exactly."""
    values = 2.0 * _bytes(name, int(np.prod(shape))).astype(np.float32) - 255.0
    return bfloat16((values * np.float32(amplitude / 256)).reshape(shape))


def _norm(name):
    """Make a norm's weights: multiples of 1/128 between 0.75 and 1.24."""
    return bfloat16((_bytes(name, SIZES.hidden) // 4 + np.float32(96)) / np.float32(128))


RANDOM = Weights(lambda: f"random {RECIPE}", lambda: SIZES, tensors)
