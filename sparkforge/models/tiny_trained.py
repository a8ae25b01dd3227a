"""Expand `tiny.safetensors`, the tiny model trained on Jane Austen, to the tensors of a whole gpt-oss checkpoint.

The file holds the checkpoint's tensors unchanged, except embeddings and output head: these have rows only for the
tokens in `rows`, as int8 with one float32 scale per row. Row 0 stands for all other tokens.
`lab.training` writes the file.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from sparkforge.core.errors import InputError
from sparkforge.core.files import parse_json
from sparkforge.models.harmony import VOCAB_SIZE
from sparkforge.models.tiny_format import Floats, Sizes, Tensor, bfloat16, from_safetensors

FILE = Path(__file__).with_name("tiny.safetensors")
EXPANSION = 1  # increase it when the same file expands to other bytes
ROWS = "rows"  # i32: the tokens with their own rows; rows[i] has row i + 1
SHORT = ("model.embed_tokens.weight", "lm_head.weight")


def recipe() -> str:
    """Return the checkpoint's inputs; if they change, it is written again."""
    return f"trained {EXPANSION} {hashlib.sha256(_data()).hexdigest()[:16]}"


def sizes() -> Sizes:
    """Return the stored model's sizes."""
    return _stored()[1]


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


def wide(values: Tensor, scale: Tensor) -> Floats:
    """Return rows in float32 that are stored as int8 with one scale per row."""
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
def _stored() -> tuple[dict[str, Tensor], Sizes]:
    try:
        tensors, metadata = from_safetensors(_data())
        return tensors, Sizes(**parse_json(metadata["sizes"], FILE.name))
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> InputError:
    fix = f"git checkout sparkforge/models/{FILE.name}"
    return InputError(f"cannot read the trained tiny model {FILE}", str(error), fix, code="input.model")
