"""Write a tiny gpt-oss checkpoint with the on-disk format of openai/gpt-oss-20b.

`python -m sparkforge.models.tiny OUT`. Its weights are the trained ones of `tiny.safetensors`, or with `--random`
random ones. The vocabulary is the full one. Two machines write the same files.
"""

from __future__ import annotations

import glob
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sparkforge.core.console import say
from sparkforge.core.documents import read_json
from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.files import fsync_directory, locked, require_space, sha256_file, write_atomic
from sparkforge.core.program import ArgumentParser, exit_code
from sparkforge.models import tiny_random, tiny_trained
from sparkforge.models.harmony import tokenizer_files
from sparkforge.models.tiny_format import Sizes, Tensor, config, to_safetensors

MANIFEST = "manifest.json"
TEMPORARY = ".tiny.tmp"  # the end of the names of directories that a killed run may leave, and that the next removes
SIZE = 150_000_000  # bytes of the whole directory, rounded up


class Weights(NamedTuple):
    """A set of weights: its name in the manifest, its sizes, its tensors by name, and the sampling that suits it."""

    recipe: Callable[[], str]
    sizes: Callable[[], Sizes]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    sampling: Mapping[str, float] = MappingProxyType({})


# At a higher temperature, so small a model writes mostly nonsense.
COOL = MappingProxyType({"temperature": 0.3})
TRAINED = Weights(tiny_trained.recipe, tiny_trained.sizes, tiny_trained.tensors, COOL)
RANDOM = Weights(lambda: f"random {tiny_random.RECIPE}", lambda: tiny_random.SIZES, tiny_random.tensors)


def write_tiny(directory: Path, weights: Weights = TRAINED) -> Path:
    """Make `directory` the tiny checkpoint of `weights` and return it; do nothing if it is whole already.

    The files are written to a temporary directory beside it and synced. Then the old directory is renamed, never
    emptied in its place, and the new one takes its name. A run that is killed at any step leaves the old state, or
    none, and temporary directories that the next run removes.

    Raises StorageError, also while another process writes the same directory, or UsageError if `directory` holds
    something else.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory.parent / f".{directory.name}.lock", f"write {directory}"):
        for stale in directory.parent.glob(f".{glob.escape(directory.name)}.*{TEMPORARY}"):
            shutil.rmtree(stale, ignore_errors=True)
        if _is_whole(directory, weights):
            return directory
        _refuse_foreign(directory)
        require_space(directory.parent, SIZE, "the tiny model")
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=TEMPORARY, dir=directory.parent))
        try:
            _fill(work / "new", weights)
            if directory.exists():
                directory.rename(work / "old")
            (work / "new").rename(directory)
            fsync_directory(directory.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return directory


def verify_tiny(directory: Path, weights: Weights = TRAINED) -> None:
    """Check every file of `directory` against its manifest; raises InputError that names the first that differs."""
    for name, wanted in _manifest(directory, weights.recipe())["files"].items():
        path = directory / name
        try:
            if not path.is_file():
                raise _broken(directory, f"{name} is missing")
            if path.stat().st_size != wanted["size"]:
                raise _broken(directory, f"{name} has {path.stat().st_size} bytes, not {wanted['size']}")
            if sha256_file(path) != wanted["sha256"]:
                raise _broken(directory, f"{name} has another sha256 than when it was written")
        except OSError as error:
            raise _broken(directory, f"{name} cannot be read ({error.strerror})") from error
        except (TypeError, KeyError) as error:
            raise _broken(directory, f"its {MANIFEST} has no size and hash of {name}") from error


def main(arguments: Sequence[str]) -> int:
    """Write the checkpoint into the directory that the command line names; return the exit code."""
    parser = ArgumentParser(prog="python -m sparkforge.models.tiny", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--random", action="store_true", help="random weights instead of the trained ones")

    def write() -> None:
        options = parser.parse_args(arguments)
        say(f"tiny gpt-oss checkpoint: {write_tiny(options.out, RANDOM if options.random else TRAINED)}")

    return exit_code(write)


def _fill(directory: Path, weights: Weights) -> None:
    """Make `directory` and write every file, the manifest last."""
    directory.mkdir()
    ends = [200002, 199999, 200012]  # as gpt-oss' own file, with the sampling for requests that name none
    sampled = {
        "bos_token_id": 199998,
        "do_sample": True,
        "eos_token_id": ends,
        "pad_token_id": 199999,
        **weights.sampling,
    }
    configs = {"config.json": config(weights.sizes()), "generation_config.json": sampled}
    files = {**{name: _json(value) for name, value in configs.items()}, **tokenizer_files()}
    for name, data in {**files, **_weight_files(weights)}.items():
        write_atomic(directory / name, data)
    entries = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(directory.iterdir())
    }
    write_atomic(directory / MANIFEST, _json({"recipe": weights.recipe(), "files": entries}))


def _weight_files(weights: Weights) -> dict[str, bytes]:
    """Return two safetensors shards, cut where the first holds half of the bytes, and their index."""
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
    return {**shards, "model.safetensors.index.json": _json(index)}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _manifest(directory: Path, recipe: str) -> dict[str, Any]:
    try:
        manifest = read_json(directory / MANIFEST)
        files, written = manifest["files"], manifest.get("recipe")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(directory, f"its {MANIFEST} cannot be read ({error})") from error
    if written != recipe or not isinstance(files, dict):
        raise _broken(directory, f"it was written by recipe {written}, not {recipe}")
    return dict(manifest)


def _is_whole(directory: Path, weights: Weights) -> bool:
    try:
        verify_tiny(directory, weights)
    except InputError as error:
        if error.code != "input.model":
            raise
        return False
    return True


def _refuse_foreign(directory: Path) -> None:
    """Raise UsageError if `directory` is neither absent, empty, nor one that this module wrote."""
    if directory.exists() and not (
        directory.is_dir() and (not any(directory.iterdir()) or (directory / MANIFEST).exists())
    ):
        names = shlex.join([str(directory), f"{directory}.aside"])
        raise UsageError(
            f"will not overwrite {directory}",
            f"it exists and has no {MANIFEST}, so it is no tiny model of ours",
            f"name another directory, or move this one away: mv {names}",
        )


def _broken(directory: Path, why: str) -> InputError:
    return InputError(
        f"{directory} is not a whole tiny model",
        why,
        f"python -m sparkforge.models.tiny {directory}",
        code="input.model",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
