"""Writes a tiny gpt-oss checkpoint with the on-disk format of openai/gpt-oss-20b: `python -m serve.tiny OUT`.

The weights are random, the vocabulary is the full one. Every byte follows from `RECIPE` and the tensors' names through
SHAKE-256, so two machines write the same files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serve.harmony import VOCAB_SIZE, tokenizer_files
from sparkforge.console import say, show_error
from sparkforge.errors import ModelError, SparkforgeError, UsageError
from sparkforge.files import fsync_directory, locked, require_space, sha256_file, write_atomic

RECIPE = 1  # raise it when the bytes change, so that older directories are written anew
MANIFEST = "manifest.json"
SIZE = 90_000_000  # bytes of the whole directory, rounded up
HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, TOP_K, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 4, 8, 4, 4, 2, 64
BLOCK = 32  # MXFP4 elements that share one scale (OCP Microscaling Formats v1.0, table 1)


class Tensor(NamedTuple):
    """One tensor on disk: its shape, its dtype as safetensors names it, and its little-endian bytes."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes


def config() -> dict[str, Any]:
    """Return config.json: openai/gpt-oss-20b's keys with smaller sizes."""
    layer_types = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": TOP_K, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "hidden_size": HIDDEN, "initial_context_length": 4096, "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "layer_types": layer_types, "max_position_embeddings": 131072, "model_type": "gpt_oss",
        "num_attention_heads": HEADS, "num_experts_per_tok": TOP_K, "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS, "num_local_experts": EXPERTS, "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        # Without a version below 5, transformers takes a local tokenizer for a faulty Mistral one and warns.
        "transformers_version": "4.55.0", "use_cache": True, "vocab_size": VOCAB_SIZE,
    }  # fmt: skip


def write_tiny(directory: Path) -> Path:
    """Make `directory` the tiny checkpoint and return it; does nothing if it is whole already.

    The files are written to a temporary directory beside it, synced, then renamed, so a killed run leaves the old
    state. Raises BusyError if another process writes the same directory, DiskFullError, or UsageError if
    `directory` holds something else.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory.parent / f".{directory.name}.lock", f"write {directory}"):
        if _is_whole(directory):
            return directory
        _refuse_foreign(directory)
        for stale in directory.parent.glob(f".{directory.name}.*.tmp"):
            shutil.rmtree(stale)
        require_space(directory.parent, SIZE, "the tiny model")
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".tmp", dir=directory.parent))
        try:
            _fill(temporary)
            temporary.chmod(0o755)
            if directory.exists():
                shutil.rmtree(directory)
            temporary.rename(directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_directory(directory.parent)
    return directory


def verify_tiny(directory: Path) -> None:
    """Check every file of `directory` against its manifest; raises ModelError that names the first that differs."""
    for name, wanted in _manifest(directory)["files"].items():
        path = directory / name
        if not path.is_file():
            raise _broken(directory, f"{name} is missing")
        if path.stat().st_size != wanted["size"]:
            raise _broken(directory, f"{name} has {path.stat().st_size} bytes, not {wanted['size']}")
        if sha256_file(path) != wanted["sha256"]:
            raise _broken(directory, f"{name} has another sha256 than when it was written")


def tensors() -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's tensors by name, in the order of the model."""
    yield "model.embed_tokens.weight", _uniform("embed", (VOCAB_SIZE, HIDDEN), 2.0)
    for layer in range(LAYERS):
        for name, tensor in _layer(f"model.layers.{layer}."):
            yield f"model.layers.{layer}.{name}", tensor
    yield "model.norm.weight", _norm("norm")
    yield "lm_head.weight", _uniform("lm_head", (VOCAB_SIZE, HIDDEN), 0.5)


def main(arguments: list[str]) -> int:
    """Write the checkpoint into the one directory named; returns the exit code."""
    try:
        if len(arguments) != 1:
            raise UsageError(
                "serve.tiny takes one directory", f"it got {len(arguments)} arguments", "python -m serve.tiny OUT"
            )
        say(f"tiny gpt-oss checkpoint: {write_tiny(Path(arguments[0]))}")
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return 0


def _layer(seed: str) -> Iterator[tuple[str, Tensor]]:
    """Yield one layer's tensors; amplitudes keep activations near 1 and drive SwiGLU into its limit of 7."""
    attention, key_values = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield "input_layernorm.weight", _norm(seed + "input")
    yield "post_attention_layernorm.weight", _norm(seed + "post")
    rows = {"q": (attention, HIDDEN), "k": (key_values, HIDDEN), "v": (key_values, HIDDEN), "o": (HIDDEN, attention)}
    for name, shape in rows.items():
        yield f"self_attn.{name}_proj.weight", _uniform(seed + name, shape, 0.125 if name == "o" else 0.25)
        yield f"self_attn.{name}_proj.bias", _uniform(seed + name + "bias", shape[:1], 0.25)
    yield "self_attn.sinks", _uniform(seed + "sinks", (HEADS,), 2.0)
    yield "mlp.router.weight", _uniform(seed + "router", (EXPERTS, HIDDEN), 0.25)
    yield "mlp.router.bias", _uniform(seed + "router bias", (EXPERTS,), 0.25)
    yield from _experts(seed, "gate_up_proj", 2 * INTERMEDIATE, HIDDEN, scale=124)
    yield from _experts(seed, "down_proj", HIDDEN, INTERMEDIATE, scale=118)


def _experts(seed: str, name: str, rows: int, columns: int, *, scale: int) -> Iterator[tuple[str, Tensor]]:
    """Yield one expert projection: packed E2M1 pairs, E8M0 scales `scale` or `scale` + 1, bias."""
    blocks, scales = (EXPERTS, rows, columns // BLOCK, 16), (EXPERTS, rows, columns // BLOCK)
    raw = _bytes(f"{seed}{name} scales", int(np.prod(scales)))
    yield f"mlp.experts.{name}_blocks", Tensor(blocks, "U8", _bytes(f"{seed}{name}", int(np.prod(blocks))).tobytes())
    yield f"mlp.experts.{name}_scales", Tensor(scales, "U8", ((raw & 1) + np.uint8(scale)).tobytes())
    yield f"mlp.experts.{name}_bias", _uniform(f"{seed}{name} bias", (EXPERTS, rows), 0.5)


def _bytes(name: str, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(hashlib.shake_256(f"{RECIPE} {name}".encode()).digest(count), dtype=np.uint8)


def _uniform(name: str, shape: tuple[int, ...], amplitude: float) -> Tensor:
    """Make a bfloat16 tensor of odd multiples of amplitude / 256 (a power of two), which bfloat16 holds exactly."""
    values = 2.0 * _bytes(name, int(np.prod(shape))).astype(np.float32) - 255.0
    return _bfloat16(values * np.float32(amplitude / 256), shape)


def _norm(name: str) -> Tensor:
    """Make a norm's weights: multiples of 1/128 between 0.75 and 1.24."""
    return _bfloat16((_bytes(name, HIDDEN) // 4 + np.float32(96)) / np.float32(128), (HIDDEN,))


def _bfloat16(values: np.ndarray[Any, np.dtype[np.float32]], shape: tuple[int, ...]) -> Tensor:
    """Cut float32 values, whose low half is zero, to bfloat16."""
    return Tensor(shape, "BF16", (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2").tobytes())


def _fill(directory: Path) -> None:
    """Write every file, the manifest last."""
    files = {"config.json": _json(config()), "generation_config.json": _json(_generation_config()), **tokenizer_files()}
    for name, data in {**files, **_weight_files()}.items():
        write_atomic(directory / name, data)
    entries = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(directory.iterdir())
    }
    write_atomic(directory / MANIFEST, _json({"recipe": RECIPE, "files": entries}))


def _weight_files() -> dict[str, bytes]:
    """Return two safetensors shards, cut where the first holds half of the bytes, and their index."""
    every = dict(tensors())
    total, seen, shard_of = sum(len(t.data) for t in every.values()), 0, dict[str, str]()
    for name, tensor in every.items():
        shard_of[name] = f"model-0000{1 if seen < total // 2 else 2}-of-00002.safetensors"
        seen += len(tensor.data)
    shards = {
        shard: _safetensors({name: tensor for name, tensor in every.items() if shard_of[name] == shard})
        for shard in sorted(set(shard_of.values()))
    }
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
    return {**shards, "model.safetensors.index.json": _json(index)}


def _safetensors(named: dict[str, Tensor]) -> bytes:
    """Lay tensors out as a safetensors file (its README): header length, JSON header padded to 8 bytes, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Two-byte types first, so that every tensor begins at a multiple of its element's size.
    ordered = sorted(named.items(), key=lambda item: (item[1].dtype != "BF16", item[0]))
    for name, tensor in ordered:
        begin, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(tensor.data for _, tensor in ordered)])


def _generation_config() -> dict[str, Any]:
    return {"bos_token_id": 199998, "do_sample": True, "eos_token_id": [200002, 199999, 200012], "pad_token_id": 199999}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(directory, f"its {MANIFEST} cannot be read ({error})") from error
    if manifest.get("recipe") != RECIPE or not isinstance(files, dict):
        raise _broken(directory, f"it was written by recipe {manifest.get('recipe')}, not {RECIPE}")
    return dict(manifest)


def _is_whole(directory: Path) -> bool:
    try:
        verify_tiny(directory)
    except ModelError:
        return False
    return True


def _refuse_foreign(directory: Path) -> None:
    """Raise UsageError if `directory` is neither absent, empty, nor one that this module wrote."""
    if directory.exists() and not (
        directory.is_dir() and (not any(directory.iterdir()) or (directory / MANIFEST).exists())
    ):
        raise UsageError(
            f"will not overwrite {directory}",
            f"it exists and has no {MANIFEST}, so it is no tiny model of ours",
            "name another directory",
        )


def _broken(directory: Path, why: str) -> ModelError:
    return ModelError(f"{directory} is not a whole tiny model", why, f"python -m serve.tiny {directory}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
