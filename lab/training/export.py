"""Write the trained model to `sparkforge/models/tiny.safetensors`, and read it back for tests of the served model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from lab.training.model import GptOss, Layer, gains
from spark_mxfp4.mxfp4 import dequantize, quantize
from sparkforge.models import tiny
from sparkforge.models.tiny import Floats, Sizes, Tensor, bfloat16, from_safetensors, to_safetensors

NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "experts_norm"}
LARGEST = 127  # largest int8; -128 is not used
LINEARS = {**{f"self_attn.{name}_proj": name for name in "qkvo"}, "mlp.router": "router"}


def pack(model: GptOss, vocabulary: np.ndarray[tuple[int], np.dtype[np.int32]], facts: dict[str, str]) -> bytes:
    """Return the bytes of tiny.safetensors for `model`; `facts` describe its training."""
    stored = {"model.norm.weight": _stored(model.norm)}
    for number, layer in enumerate(model.each_layer()):
        tensors = {f"{name}.weight": _stored(getattr(layer, attribute)) for name, attribute in NORMS.items()}
        tensors["self_attn.sinks"] = _stored(layer.sinks)
        for name, attribute in LINEARS.items():
            linear = getattr(layer, attribute)
            tensors |= {f"{name}.weight": _stored(linear.weight), f"{name}.bias": _stored(linear.bias)}
        for name, (weight, bias) in layer.experts.served().items():
            prefix = f"mlp.experts.{name}_proj"
            blocks, scales = quantize(weight.detach().cpu())
            tensors |= {f"{prefix}_blocks": _raw(blocks), f"{prefix}_scales": _raw(scales)}
            tensors[f"{prefix}_bias"] = _stored(bias)
        stored |= {f"model.layers.{number}.{name}": tensor for name, tensor in tensors.items()}
    short = dict(zip(tiny.SHORT, (_floats(model.embed), _floats(model.head)), strict=True))
    metadata = {"sizes": json.dumps(model.sizes._asdict()), **facts}
    for name, values in short.items():
        stored[name], stored[tiny.scale_of(name)] = narrow(values)
    tokens = np.array(vocabulary[1:], "<i4")
    return to_safetensors({**stored, tiny.ROWS: Tensor(tokens.shape, "I32", tokens.tobytes())}, metadata)


def narrow(values: Floats) -> tuple[Tensor, Tensor]:
    """Return rows [N, H] as int8, and the scale of each, which makes its largest value LARGEST."""
    scale = np.maximum(np.abs(values).max(1), np.float32(1e-30)).astype(np.float32) / np.float32(LARGEST)
    rounded = np.rint(values / scale[:, None]).astype(np.int8)
    return Tensor(rounded.shape, "I8", rounded.tobytes()), Tensor(scale.shape, "F32", scale.astype("<f4").tobytes())


def unpack(path: Path = tiny.FILE) -> tuple[GptOss, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Return the model that `pack` wrote, in float32, and its vocabulary."""
    stored, facts = from_safetensors(path.read_bytes())
    rows = np.concatenate([np.array([-1], np.int32), stored[tiny.ROWS].array()])
    model = GptOss(Sizes(**json.loads(facts["sizes"])), len(rows))
    with torch.no_grad():
        for parameter, name in zip((model.embed, model.head), tiny.SHORT, strict=True):
            rounded = bfloat16(tiny.wide(stored[name], stored[tiny.scale_of(name)]))
            parameter.copy_(_values(rounded))
        model.norm.copy_(_values(stored["model.norm.weight"]))
        for number, layer in enumerate(model.each_layer()):
            prefix = f"model.layers.{number}."
            _fill(layer, {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)})
    return model, rows


def _fill(layer: Layer, stored: dict[str, Tensor]) -> None:
    for name, attribute in NORMS.items():
        getattr(layer, attribute).copy_(_values(stored[f"{name}.weight"]))
    layer.sinks.copy_(_values(stored["self_attn.sinks"]))
    for name, attribute in LINEARS.items():
        getattr(layer, attribute).weight.copy_(_values(stored[f"{name}.weight"]))
        getattr(layer, attribute).bias.copy_(_values(stored[f"{name}.bias"]))
    for name, (weight, bias) in gains().items():
        prefix = f"mlp.experts.{name}_proj"
        blocks, scales = (torch.from_numpy(stored[f"{prefix}_{part}"].array().copy()) for part in ("blocks", "scales"))
        getattr(layer.experts, name).copy_(dequantize(blocks, scales) / weight)
        getattr(layer.experts, f"{name}_bias").copy_(_values(stored[f"{prefix}_bias"]) / bias)


def _floats(parameter: torch.Tensor) -> Floats:
    values: Floats = parameter.detach().float().cpu().numpy()
    return values


def _stored(parameter: torch.Tensor) -> Tensor:
    return bfloat16(_floats(parameter))


def _raw(packed: torch.Tensor) -> Tensor:
    return Tensor(tuple(packed.shape), "U8", packed.numpy().tobytes())


def _values(tensor: Tensor) -> torch.Tensor:
    """Return a bfloat16 tensor's values in float32."""
    return torch.from_numpy((tensor.array().astype(np.uint32) << np.uint32(16)).view(np.float32))
