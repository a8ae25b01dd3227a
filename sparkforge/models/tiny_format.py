"""The format that tiny checkpoints share with openai/gpt-oss-20b: config.json, and tensors in safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparkforge.core.files import parse_json, read_json

HEAD_DIM = 64
CONFIG = Path(__file__).with_name("tiny_config.json")
BLOCK = 32  # MXFP4 elements that share one scale (OCP Microscaling Formats v1.0, table 1)
# safetensors' names of types → numpy's; bfloat16, which numpy lacks, as 16-bit words.
DTYPES = {"BF16": "<u2", "U8": "u1", "I8": "i1", "I32": "<i4", "F32": "<f4"}
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Sizes(NamedTuple):
    """The sizes of a gpt-oss model; hidden and intermediate are multiples of 32."""

    hidden: int
    intermediate: int
    layers: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int


class Tensor(NamedTuple):
    """One tensor on disk: its shape, its dtype as safetensors names it, and its little-endian bytes."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes

    def array(self) -> np.ndarray[Any, Any]:
        """Return the tensor as a numpy array; bfloat16 as unsigned words."""
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)


def config(sizes: Sizes) -> dict[str, Any]:
    """Return config.json: openai/gpt-oss-20b's keys (`tiny_config.json`) with smaller sizes.

    Without a version below 5, transformers takes a local tokenizer for a faulty Mistral one and warns.
    """
    layer_types = ["sliding_attention", "full_attention"] * (sizes.layers // 2)
    values: dict[str, Any] = read_json(CONFIG)
    return values | {
        "experts_per_token": sizes.top_k, "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate,
        "layer_types": layer_types, "num_attention_heads": sizes.heads, "num_experts_per_tok": sizes.top_k,
        "num_hidden_layers": sizes.layers, "num_key_value_heads": sizes.kv_heads, "num_local_experts": sizes.experts,
    }  # fmt: skip


def bfloat16(values: Floats) -> Tensor:
    """Round finite float32 values to bfloat16, to nearest, even on ties."""
    bits = values.astype("<f4").view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return Tensor(values.shape, "BF16", rounded.astype("<u2").tobytes())


def to_safetensors(named: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return tensors as a safetensors file (see its README): header length, JSON header padded to 8 bytes, data."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    # Wide types first, so that every tensor begins at a multiple of its element's size.
    ordered = sorted(named.items(), key=lambda item: (-np.dtype(DTYPES[item[1].dtype]).itemsize, item[0]))
    for name, tensor in ordered:
        begin, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(tensor.data for _, tensor in ordered)])


def from_safetensors(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file. Raises ValueError if it is broken."""
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    try:
        header = parse_json(data[8 : 8 + size], "a safetensors file")
        metadata, body = header.pop("__metadata__"), memoryview(data)[8 + size :]
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = Tensor(tuple(entry["shape"]), entry["dtype"], bytes(body[begin:end]))
            tensors[name].array()  # its bytes have its type and shape
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is malformed ({error!r})") from error
    return tensors, metadata
