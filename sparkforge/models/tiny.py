"""Write a tiny gpt-oss checkpoint with the on-disk format of openai/gpt-oss-20b.

`python -m sparkforge.models.tiny OUT` writes the trained weights of `tiny.safetensors` with the full vocabulary. Every
machine writes the same files.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from sparkforge.core import manifest, paths
from sparkforge.core.console import say
from sparkforge.core.errors import UsageError
from sparkforge.core.files import require_space, sha256_file
from sparkforge.core.manifest import Made
from sparkforge.core.program import ArgumentParser, exit_code
from sparkforge.models import tiny_trained
from sparkforge.models.harmony import to_json, tokenizer_files
from sparkforge.models.tiny_format import Sizes, Tensor, config, to_safetensors

STAGE = "tiny"
SIZE = 150_000_000  # bytes of the whole directory, rounded up


class Weights(NamedTuple):
    """A set of weights: its name in the manifest, its sizes, its tensors by name, and its default sampling."""

    recipe: Callable[[], str]
    sizes: Callable[[], Sizes]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    sampling: Mapping[str, float] = MappingProxyType({})


# At a higher temperature such a small model writes mostly nonsense.
COOL = MappingProxyType({"temperature": 0.3})
TRAINED = Weights(tiny_trained.recipe, tiny_trained.sizes, tiny_trained.tensors, COOL)


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
    """Return two safetensors shards of about equal size, and their index."""
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
