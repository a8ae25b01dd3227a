"""Writes a tiny gpt-oss checkpoint with the on-disk format of openai/gpt-oss-20b: `python -m serve.tiny OUT`.

Its weights are the trained ones of `tiny.safetensors`, or with `--random` random ones. The vocabulary is the full one.
Two machines write the same files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from serve import tiny_random, tiny_trained
from serve.harmony import tokenizer_files
from serve.tiny_format import Sizes, Tensor, config, to_safetensors
from sparkforge.console import say, show_error
from sparkforge.errors import ModelError, SparkforgeError, UsageError
from sparkforge.files import fsync_directory, locked, require_space, sha256_file, write_atomic

MANIFEST = "manifest.json"
SIZE = 150_000_000  # bytes of the whole directory, rounded up


class Weights(NamedTuple):
    """One of the two sets of weights: what its manifest calls it, its sizes, its tensors by name, how it speaks."""

    recipe: Callable[[], str]
    sizes: Callable[[], Sizes]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    sampling: Mapping[str, float] = MappingProxyType({})


# What so small a model thinks possible is mostly nonsense; what it thinks likely can be read.
COOL = MappingProxyType({"temperature": 0.3})
TRAINED = Weights(tiny_trained.recipe, tiny_trained.sizes, tiny_trained.tensors, COOL)
RANDOM = Weights(lambda: f"random {tiny_random.RECIPE}", lambda: tiny_random.SIZES, tiny_random.tensors)


def write_tiny(directory: Path, weights: Weights = TRAINED) -> Path:
    """Make `directory` the tiny checkpoint of `weights` and return it; does nothing if it is whole already.

    The files are written to a temporary directory beside it, synced, then renamed, so a killed run leaves the old
    state. Raises BusyError if another process writes the same directory, DiskFullError, or UsageError if
    `directory` holds something else.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory.parent / f".{directory.name}.lock", f"write {directory}"):
        if _is_whole(directory, weights):
            return directory
        _refuse_foreign(directory)
        for stale in directory.parent.glob(f".{directory.name}.*.tmp"):
            shutil.rmtree(stale)
        require_space(directory.parent, SIZE, "the tiny model")
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".tmp", dir=directory.parent))
        try:
            _fill(temporary, weights)
            temporary.chmod(0o755)
            if directory.exists():
                shutil.rmtree(directory)
            temporary.rename(directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_directory(directory.parent)
    return directory


def verify_tiny(directory: Path, weights: Weights = TRAINED) -> None:
    """Check every file of `directory` against its manifest; raises ModelError that names the first that differs."""
    for name, wanted in _manifest(directory, weights.recipe())["files"].items():
        path = directory / name
        if not path.is_file():
            raise _broken(directory, f"{name} is missing")
        if path.stat().st_size != wanted["size"]:
            raise _broken(directory, f"{name} has {path.stat().st_size} bytes, not {wanted['size']}")
        if sha256_file(path) != wanted["sha256"]:
            raise _broken(directory, f"{name} has another sha256 than when it was written")


def main(arguments: Sequence[str]) -> int:
    """Write the checkpoint into the one directory named; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m serve.tiny", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--random", action="store_true", help="random weights instead of the trained ones")
    words = parser.parse_args(arguments)
    try:
        written = write_tiny(words.out, RANDOM if words.random else TRAINED)
        say(f"tiny gpt-oss checkpoint: {written}")
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return 0


def _fill(directory: Path, weights: Weights) -> None:
    """Write every file, the manifest last."""
    configs = {"config.json": config(weights.sizes()), "generation_config.json": _generation_config(weights)}
    files = {**{name: _json(value) for name, value in configs.items()}, **tokenizer_files()}
    for name, data in {**files, **_weight_files(weights)}.items():
        write_atomic(directory / name, data)
    entries = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(directory.iterdir())
    }
    write_atomic(directory / MANIFEST, _json({"recipe": weights.recipe(), "files": entries}))


def _weight_files(weights: Weights) -> dict[str, bytes]:
    """Return two safetensors shards, cut where the first holds half of the bytes, and their index."""
    every = dict(weights.tensors())
    total, seen, shard_of = sum(len(t.data) for t in every.values()), 0, dict[str, str]()
    for name, tensor in every.items():
        shard_of[name] = f"model-0000{1 if seen < total // 2 else 2}-of-00002.safetensors"
        seen += len(tensor.data)
    shards = {
        shard: to_safetensors({n: tensor for n, tensor in every.items() if shard_of[n] == shard}, {"format": "pt"})
        for shard in sorted(set(shard_of.values()))
    }
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
    return {**shards, "model.safetensors.index.json": _json(index)}


def _generation_config(weights: Weights) -> dict[str, Any]:
    """Return generation_config.json of gpt-oss, and the sampling that a server takes where a request says nothing."""
    ends = [200002, 199999, 200012]
    return {"bos_token_id": 199998, "do_sample": True, "eos_token_id": ends, "pad_token_id": 199999, **weights.sampling}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _manifest(directory: Path, recipe: str) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(directory, f"its {MANIFEST} cannot be read ({error})") from error
    if manifest.get("recipe") != recipe or not isinstance(files, dict):
        raise _broken(directory, f"it was written by recipe {manifest.get('recipe')}, not {recipe}")
    return dict(manifest)


def _is_whole(directory: Path, weights: Weights) -> bool:
    try:
        verify_tiny(directory, weights)
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
