"""Expand `tiny.safetensors`, the tiny model trained on Jane Austen, to the tensors of a whole gpt-oss checkpoint.

The file holds the checkpoint's tensors as they are, but for embeddings and output head: those have a row for each
token of `rows` alone, as int8 with a float32 scale a row. Their row 0 is that of all other tokens.
`lab.training` writes the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from sparkforge.core.errors import InputError
from sparkforge.models.harmony import VOCAB_SIZE
from sparkforge.models.tiny_format import Floats, Sizes, Tensor, bfloat16, from_safetensors, to_safetensors

FILE = Path(__file__).with_name("tiny.safetensors")
EXPANSION = 1  # raise it when the same file expands to other bytes
ROWS = "rows"  # i32: the tokens that have a row of their own, that of rows[i] is row i + 1
SHORT = ("model.embed_tokens.weight", "lm_head.weight")
LARGEST = 127  # of int8, on both sides of 0


def recipe() -> str:
    """Return what the checkpoint is made of, so that one of another file or expansion is written anew."""
    return f"trained {EXPANSION} {hashlib.sha256(_data()).hexdigest()[:16]}"


def sizes() -> Sizes:
    """Return the stored model's sizes."""
    return Sizes(**json.loads(_stored()[1]["sizes"]))


def tensors() -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's tensors by name."""
    stored, _ = _stored()
    row = np.zeros(VOCAB_SIZE, np.int64)
    row[stored[ROWS].array()] = np.arange(1, len(stored[ROWS].array()) + 1)
    for name, tensor in stored.items():
        if name in SHORT:
            expanded = bfloat16(wide(tensor, stored[scale_of(name)])).array()[row]
            yield name, Tensor(expanded.shape, "BF16", expanded.tobytes())
        elif name != ROWS and not name.endswith(scale_of("")):
            yield name, tensor


def pack(named: dict[str, Tensor], short: dict[str, Floats], rows: list[int], facts: dict[str, str]) -> bytes:
    """Return the file's bytes for a trained model: `short` holds SHORT's rows, row 0 first; `facts` its metadata."""
    narrowed = {}
    for name in SHORT:
        values, scale = narrow(short[name])
        narrowed[name], narrowed[scale_of(name)] = values, scale
    tokens = np.array(rows, "<i4")
    return to_safetensors({**named, **narrowed, ROWS: Tensor(tokens.shape, "I32", tokens.tobytes())}, facts)


def narrow(values: Floats) -> tuple[Tensor, Tensor]:
    """Return rows [N, H] as int8, and the scale of each, which makes its largest value LARGEST."""
    scale = np.maximum(np.abs(values).max(1), np.float32(1e-30)).astype(np.float32) / np.float32(LARGEST)
    rounded = np.rint(values / scale[:, None]).astype(np.int8)
    return Tensor(rounded.shape, "I8", rounded.tobytes()), Tensor(scale.shape, "F32", scale.astype("<f4").tobytes())


def wide(values: Tensor, scale: Tensor) -> Floats:
    """Undo `narrow`, but for its rounding."""
    return values.array().astype(np.float32) * scale.array().astype(np.float32)[:, None]


def scale_of(name: str) -> str:
    """Return the name of the tensor that holds the scales of the rows of `name`."""
    return f"{name}.scale"


def _data() -> bytes:
    try:
        return FILE.read_bytes()
    except OSError as error:
        raise _unreadable(error) from error


@cache
def _stored() -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        return from_safetensors(_data())
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> InputError:
    return InputError(
        f"cannot read the trained tiny model {FILE}",
        str(error),
        f"git checkout sparkforge/models/{FILE.name}",
        code="input.model",
    )
