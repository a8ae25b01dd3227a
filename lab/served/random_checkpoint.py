"""Write a gpt-oss checkpoint of real size with random packed weights: read as 65 GB for 120b, 2.4 GB on the disk.

`python -m lab.served.random_checkpoint --output OUT --size 120b`. It is for Modular's MAX, which has no
load format that makes weights up. Tensors of a kind take their bytes from one pool in the file, each from a place of
its own, so that no two are equal. MAX reads such a file; the library safetensors refuses one whose tensors overlap. The
file is as long as all tensors together, with a hole at its end, because MAX plans its memory by that length.
`--hole` leaves out the bytes of the pools too: that is enough to compile.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from lab.served import dummy
from sparkforge.core.console import say, show_error
from sparkforge.core.documents import read_bytes
from sparkforge.core.errors import SparkforgeError, UsageError
from sparkforge.core.files import atomic_file, require_writable, write_atomic, write_json
from sparkforge.models.harmony import tokenizer_files
from sparkforge.models.tiny_format import BLOCK, DTYPES, bfloat16

TOKENIZER = ("chat_template.jinja", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
SEED = 1234
STEP = 4096  # bytes between the places where two tensors of a pool begin
SCALES = (116, 122)  # E8M0 bytes, powers of two from 2^-11 to below 2^-5, as of `random_weights`
NORMALS = 8_388_593  # values that a pool of normal ones repeats: a prime, so that no row of a matrix equals another
PIECE = 1 << 26  # bytes that are made at once
POOLS = {"blocks": "U8", "scales": "U8", "dense": "BF16", "router": "BF16", "ones": "BF16", "zeros": "BF16"}
DEVIATIONS = {"dense": 0.02, "router": 0.03}  # a router's logits then favour no expert for all tokens


class Stored(NamedTuple):
    """A tensor: its shape, and the pool that has its bytes."""

    shape: tuple[int, ...]
    pool: str

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * np.dtype(DTYPES[POOLS[self.pool]]).itemsize


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Stored]]:
    """Yield name and tensor of a gpt-oss with this config.json."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    rows = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    projections = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    yield "model.embed_tokens.weight", Stored((config["vocab_size"], hidden), "dense")
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", Stored((hidden,), "ones")
        yield f"{layer}.post_attention_layernorm.weight", Stored((hidden,), "ones")
        for name, shape in rows.items():
            yield f"{layer}.self_attn.{name}_proj.weight", Stored(shape, "dense")
            yield f"{layer}.self_attn.{name}_proj.bias", Stored(shape[:1], "zeros")
        yield f"{layer}.self_attn.sinks", Stored((config["num_attention_heads"],), "zeros")
        yield f"{layer}.mlp.router.weight", Stored((experts, hidden), "router")
        yield f"{layer}.mlp.router.bias", Stored((experts,), "zeros")
        for name, (height, width) in projections.items():
            blocks = (experts, height, width // BLOCK)
            yield f"{layer}.mlp.experts.{name}_blocks", Stored((*blocks, BLOCK // 2), "blocks")
            yield f"{layer}.mlp.experts.{name}_scales", Stored(blocks, "scales")
            yield f"{layer}.mlp.experts.{name}_bias", Stored((experts, height), "zeros")
    yield "model.norm.weight", Stored((hidden,), "ones")
    yield "lm_head.weight", Stored((config["vocab_size"], hidden), "dense")


def write_checkpoint(
    directory: Path, size: str, layers: int = 0, *, tokenizer: Path | None = None, hole: bool = False
) -> Path:
    """Write the checkpoint of a model of `size` with its first `layers` layers (0: all), and return its folder.

    `tokenizer` is a gpt-oss checkpoint whose tokenizer is copied; it is made if there is none. `hole` leaves out the
    weights' bytes. Raises UsageError for a size that there is not, or an odd number of layers, and InputError.
    """
    config = dummy.config(size)
    count = layers or config["num_hidden_layers"]
    if count % 2 or not 0 < count <= config["num_hidden_layers"]:
        known = f"gpt-oss-{size} has {config['num_hidden_layers']}, of two kinds in turn"
        raise UsageError(f"there is no model of {count} layers", known, "--layers 4")
    config |= {"num_hidden_layers": count, "layer_types": config["layer_types"][:count]}
    if tokenizer and (missing := [tokenizer / name for name in TOKENIZER if not (tokenizer / name).is_file()]):
        raise UsageError(
            "there is no tokenizer to copy", f"{missing[0]} is no file", "leave --tokenizer out: it is made"
        )
    require_writable(directory / "model.safetensors")
    files = {name: read_bytes(tokenizer / name) for name in TOKENIZER} if tokenizer else tokenizer_files()
    for name, data in files.items():
        write_atomic(directory / name, data)
    write_json(directory / "config.json", config)
    with atomic_file(directory / "model.safetensors") as file:
        _write_weights(file, dict(tensors(config)), hole=hole)
    return directory


def _write_weights(file: IO[bytes], stored: Mapping[str, Stored], *, hole: bool) -> None:
    """Write the file: length of the header, header, the pools in the order of POOLS, and a hole."""
    members = {pool: [name for name, tensor in stored.items() if tensor.pool == pool] for pool in POOLS}
    header, end = dict[str, Any](), 0
    lengths = {}
    for pool, names in members.items():
        for number, name in enumerate(names):
            begin = end + number * STEP
            tensor = stored[name]
            offsets = [begin, begin + tensor.size]
            header[name] = {"dtype": POOLS[pool], "shape": tensor.shape, "data_offsets": offsets}
        lengths[pool] = max(stored[name].size for name in names) + len(names) * STEP
        end += lengths[pool]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % STEP)
    file.write(len(text).to_bytes(8, "little") + text)
    if not hole:
        generator = np.random.default_rng(SEED)
        for pool, length in lengths.items():
            file.writelines(_bytes(pool, length, generator))
    file.truncate(8 + len(text) + max(end, sum(tensor.size for tensor in stored.values())))


def _bytes(pool: str, length: int, generator: np.random.Generator) -> Iterator[bytes]:
    """Yield a pool's bytes, `length` of them, in pieces."""
    if pool in DEVIATIONS:
        values = DEVIATIONS[pool] * generator.standard_normal(NORMALS, dtype=np.float32)
        repeated = bfloat16(values).data
    elif pool == "ones":
        repeated = bfloat16(np.ones(STEP, np.float32)).data
    else:
        repeated = bytes(STEP)
    for begin in range(0, length, PIECE):
        count = min(PIECE, length - begin)
        if pool == "blocks":
            yield generator.bytes(count)
        elif pool == "scales":
            yield generator.integers(*SCALES, size=count, dtype=np.uint8).tobytes()
        else:
            place = begin % len(repeated)
            yield (repeated[place:] + repeated * (count // len(repeated) + 1))[:count]


def main(arguments: Sequence[str]) -> int:
    """Write the folder that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.served.random_checkpoint", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the model's folder")
    parser.add_argument("--size", default="120b", help=", ".join(dummy.SIZES))
    parser.add_argument("--layers", type=int, default=0, help="only the first ones, an even number; default: all")
    parser.add_argument("--tokenizer", type=Path, help="gpt-oss checkpoint with one; default: it is made")
    parser.add_argument("--hole", action="store_true", help="no bytes, which is enough to compile")
    options = parser.parse_args(arguments)
    try:
        written = write_checkpoint(
            options.output, options.size, options.layers, tokenizer=options.tokenizer, hole=options.hole
        )
        say(f"random weights: {written}")
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
