"""Write a tiny gpt-oss checkpoint with the on-disk format of openai/gpt-oss-20b.

`python -m sparkforge.models.tiny OUT` writes the trained weights of `tiny.safetensors` with the full vocabulary. Every
machine writes the same files. The model was trained on Jane Austen by `lab.training`, which writes that file. It holds
the checkpoint's tensors unchanged, except embeddings and output head: these have rows only for the tokens in `rows`, as
int8 with one float32 scale per row. Row 0 stands for all other tokens.
"""

import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from sparkforge.core import manifest, paths
from sparkforge.core.console import say
from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.files import parse_json, read_json, require_space, sha256_file
from sparkforge.core.manifest import Made
from sparkforge.core.program import ArgumentParser, exit_code
from sparkforge.models.harmony import VOCAB_SIZE, to_json, tokenizer_files

STAGE = "tiny"
SIZE = 150_000_000  # bytes of the whole directory, rounded up
HEAD_DIM = 64
CONFIG = Path(__file__).with_name("tiny_config.json")
BLOCK = 32  # MXFP4 elements that share one scale (OCP Microscaling Formats v1.0, table 1)
# safetensors' names of types → numpy's; bfloat16, which numpy lacks, as 16-bit words.
DTYPES = {"BF16": "<u2", "U8": "u1", "I8": "i1", "I32": "<i4", "F32": "<f4"}
Floats = np.ndarray[Any, np.dtype[np.float32]]
FILE = Path(__file__).with_name("tiny.safetensors")
EXPANSION = 1  # increase it when the same file expands to other bytes
ROWS = "rows"  # i32: the tokens with their own rows; rows[i] has row i + 1
SHORT = ("model.embed_tokens.weight", "lm_head.weight")


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

    Its `transformers_version` is below 5: from 5 on, transformers mistakes local tokenizers for Mistral's and warns.
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
            tensors[name].array()  # raises unless the bytes fit type and shape
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is malformed ({error!r})") from error
    return tensors, metadata


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


class Weights(NamedTuple):
    """A set of weights: its name in the manifest, its sizes, its tensors by name, and its default sampling."""

    recipe: Callable[[], str]
    sizes: Callable[[], Sizes]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    sampling: Mapping[str, float] = MappingProxyType({})


# At a higher temperature such a small model writes mostly nonsense.
COOL = MappingProxyType({"temperature": 0.3})
TRAINED = Weights(recipe, sizes, tensors, COOL)


def write_tiny(directory: Path, weights: Weights = TRAINED) -> Path:
    """Make `directory` the tiny checkpoint of `weights` and return it; do nothing if it is complete already.

    Raises StorageError, also while another process writes the same directory, and UsageError if `directory` holds
    other files.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    ours = manifest.load(directory) or directory.is_relative_to(paths.state())
    if not ours and directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        names = shlex.join([str(directory), f"{directory}.aside"])
        why, fix = "it is not our tiny model", f"mv {names}   # or name another directory"
        raise UsageError(f"will not overwrite {directory}", why, fix)
    if (record := manifest.load(directory)) and not manifest.is_intact(record, directory):
        manifest.beside(directory).unlink(missing_ok=True)
    manifest.once(directory, STAGE, {"recipe": weights.recipe()}, lambda temporary: _write(temporary, weights))
    return directory


def main(arguments: Sequence[str]) -> int:
    """Write the checkpoint into the directory that the command line names; return the exit code."""
    parser = ArgumentParser(prog="python -m sparkforge.models.tiny", description=__doc__)
    parser.add_argument("out", type=Path)
    return exit_code(lambda: say(f"tiny gpt-oss checkpoint: {write_tiny(parser.parse_args(arguments).out)}"))


def _write(directory: Path, weights: Weights) -> Made:
    require_space(directory.parent, SIZE, "the tiny model")
    directory.mkdir()
    ends = [200002, 199999, 200012]  # as in gpt-oss's generation_config.json
    tokens = {"bos_token_id": 199998, "do_sample": True, "eos_token_id": ends, "pad_token_id": 199999}
    configs = {"config.json": config(weights.sizes()), "generation_config.json": {**tokens, **weights.sampling}}
    files = {**{name: to_json(value) for name, value in configs.items()}, **tokenizer_files()}
    for name, data in {**files, **_weight_files(weights)}.items():
        (directory / name).write_bytes(data)
    return Made({path.name: sha256_file(path) for path in sorted(directory.iterdir())})


def _weight_files(weights: Weights) -> dict[str, bytes]:
    tensors = dict(weights.tensors())
    total, size, shard_of = sum(len(t.data) for t in tensors.values()), 0, dict[str, str]()
    for name, tensor in tensors.items():
        shard_of[name] = f"model-0000{1 if size < total // 2 else 2}-of-00002.safetensors"
        size += len(tensor.data)
    shards = {
        shard: to_safetensors({n: tensor for n, tensor in tensors.items() if shard_of[n] == shard}, {"format": "pt"})
        for shard in sorted(set(shard_of.values()))
    }
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
    return {**shards, "model.safetensors.index.json": to_json(index)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
