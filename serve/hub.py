"""Bring a gpt-oss checkpoint: only the files that vLLM reads, resumed where a run was killed, every hash checked.

`python -m serve.hub REPOSITORY --to FOLDER [--revision REV] [--mirror FOLDER]`. Files are collected in a folder beside
the target and the target appears when it is whole; a file gets its name only once its hash is right.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn, Protocol

from sparkforge import paths
from sparkforge.console import download_bar, say, show_error
from sparkforge.errors import HashMismatchError, ModelError, SparkforgeError, StorageError, UsageError
from sparkforge.files import CHUNK, fsync_directory, locked, require_space, sha256_file, write_json
from validate import checkpoint
from validate.scene import Options, Scene

KNOWN = Path(__file__).with_name("models.toml")
NOTE = "sparkforge-model.json"  # written last: which revision this is, and every file's hash
# What vLLM 0.32.0 reads of a checkpoint; the hub's gpt-oss repositories also hold the weights twice more, in original/
# and metal/.
WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
    "*.safetensors",
)
WORKERS = 4  # files at a time: one connection seldom fills a line


@dataclass(frozen=True)
class Wanted:
    """One file: its name, its size in bytes, and its digest as `sha256:hex`, `git:hex` (a blob's id), or empty."""

    name: str
    size: int
    digest: str


class Source(Protocol):
    """Where a checkpoint comes from. Every method raises a SparkforgeError for what goes wrong."""

    name: str
    revision: str

    def files(self) -> list[Wanted]:
        """Return every file that is there."""

    def bring(self, wanted: Wanted, part: Path, advance: Callable[[int], None]) -> None:
        """Write the file's bytes to `part`, or only those that it lacks; `advance` takes the count of each piece."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and exiting."""
        raise UsageError("serve.hub cannot read its arguments", message, "python -m serve.hub --help")


def fetch(source: Source, target: Path) -> Path:
    """Make `target` the checkpoint of `source` and return it; does little if it is whole already.

    Raises FetchError, HashMismatchError, DiskFullError, ModelError, or BusyError if another process brings the same.
    """
    target = paths.typed(target).absolute()
    with locked(target.parent / f".{target.name}.lock", f"fetch {target.name}"):
        work = target if target.exists() else target.with_name(f"{target.name}.partial")
        if not work.exists():
            work.mkdir(parents=True)
        if not work.is_dir():
            raise UsageError(
                f"{work} is no folder", "a checkpoint is a folder of files", "name another one: --to FOLDER"
            )
        files = choose(source)
        missing = _missing(work, files)
        require_space(work, sum(file.size - _size(_part(work, file)) for file in missing), f"{source.name}")
        _bring_all(source, work, missing)
        _check(work)
        write_json(work / NOTE, _note(source, work, files))
        if work != target:
            work.rename(target)
            fsync_directory(target.parent)
    return target


def choose(source: Source) -> list[Wanted]:
    """Return the files of `source` that vLLM reads. Raises ModelError if there is no such checkpoint."""
    top = [file for file in source.files() if "/" not in file.name]
    files = [file for file in top if any(fnmatchcase(file.name, pattern) for pattern in WANTED)]
    names = {file.name for file in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        why = f"it has {', '.join(sorted(names)) or 'none of the files that vLLM reads'}"
        raise ModelError(f"{source.name} is no safetensors checkpoint", why, "./inv model.fetch openai/gpt-oss-120b")
    return files


def known_revision(repository: str) -> str:
    """Return the revision pinned in models.toml, else `main`."""
    models = tomllib.loads(KNOWN.read_text(encoding="utf-8"))["models"]
    return str(models[repository]["revision"]) if repository in models else "main"


def digest_of(path: Path, like: str) -> str:
    """Return the file's digest of the same kind as `like`: a git blob's id is SHA-1 over its length and bytes."""
    if not like.startswith("git:"):
        return f"sha256:{sha256_file(path)}"
    blob = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            blob.update(data)
    return f"git:{blob.hexdigest()}"


def show(repository: str, revision: str, to: str, mirror: str) -> None:
    """Fetch for a person: say what, from where, and what to do next."""
    source = _source(repository, revision, mirror)
    target = Path(to) if to else paths.ROOT / "models" / repository.rpartition("/")[2]  # where Compose looks
    say(f"{source.name} at {source.revision} → {target}")
    done = fetch(source, target)
    say("every file is whole and has its hash" if not mirror else "every file is whole")
    print(done)
    say(f"serve it: ./inv up --model {done}")


def main(words: list[str]) -> int:
    """Fetch from the command line; returns the exit code."""
    parser = Parser(prog="python -m serve.hub", description=__doc__, allow_abbrev=False)
    parser.add_argument("repository", help="such as openai/gpt-oss-120b")
    for flag in ("--revision", "--to", "--mirror"):
        parser.add_argument(flag, default="")
    try:
        told = parser.parse_args(words)
        show(told.repository, told.revision, told.to, told.mirror)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    except OSError as error:  # the console's way would name it too; the image has no console
        show_error(
            StorageError(f"cannot use {error.filename}", str(error.strerror), "name another folder: --to FOLDER")
        )
        return StorageError.exit_code
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where it stopped")
        return 130
    return 0


def _source(repository: str, revision: str, mirror: str) -> Source:
    if mirror:
        from serve.hub_mirror import Mirror  # noqa: PLC0415 - a mirror needs no hub library

        return Mirror(Path(mirror), repository, revision)
    from serve.hub_online import Hub  # noqa: PLC0415 - and the hub's library is needed for nothing else

    return Hub(repository, revision or known_revision(repository))


def _missing(work: Path, files: Iterable[Wanted]) -> list[Wanted]:
    """Return the files that `work` lacks or holds with other bytes; those are removed."""
    missing = []
    for file in files:
        path = work / file.name
        if path.is_file() and path.stat().st_size == file.size and (not file.digest or _fits(path, file)):
            continue
        if path.exists():
            say(f"{file.name} has other bytes than {file.digest[:19]}…: it is brought again")
            path.unlink()
        missing.append(file)
    return missing


def _fits(path: Path, file: Wanted) -> bool:
    return digest_of(path, file.digest) == file.digest


def _bring_all(source: Source, work: Path, files: list[Wanted]) -> None:
    """Bring files side by side, the largest first. The first failure, or Ctrl-C, ends them all; what came stays."""
    stopping = threading.Event()
    ordered = sorted(files, key=lambda file: -file.size)
    with _bar(source, work, files) as advance, ThreadPoolExecutor(WORKERS) as pool:

        def count(size: int) -> None:
            """Called by every thread for each piece, so it is also where a thread learns that it is to end."""
            if stopping.is_set():
                raise InterruptedError("another file failed")
            advance(size)

        running = [pool.submit(_bring, source, work, file, count) for file in ordered]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            stopping.set()
            for future in running:
                future.cancel()


@contextmanager
def _bar(source: Source, work: Path, files: list[Wanted]) -> Iterator[Callable[[int], None]]:
    lock = threading.Lock()
    with download_bar(source.name, sum(file.size for file in files)) as advance:
        advance(sum(_size(_part(work, file)) for file in files))

        def counted(size: int) -> None:
            """Take bytes from several threads."""
            with lock:
                advance(size)

        yield counted


def _bring(source: Source, work: Path, file: Wanted, count: Callable[[int], None]) -> None:
    part = _part(work, file)
    source.bring(file, part, count)
    found = digest_of(part, file.digest)
    if part.stat().st_size != file.size or (file.digest and found != file.digest):
        part.unlink()
        raise HashMismatchError(
            f"{file.name} is not the file that {source.name} names",
            f"it has {found}, not {file.digest or f'{file.size} bytes'}",
            "run the same command again: it brings this file anew",
        )
    with part.open("rb+") as written:
        os.fsync(written.fileno())
    part.rename(work / file.name)
    fsync_directory(work)


def _part(work: Path, file: Wanted) -> Path:
    """The half-brought file; its digest is in the name, so that another revision's half is never continued."""
    mark = file.digest.partition(":")[2][:12] or "unknown"
    return work / f".{file.name}.{mark}.part"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check(work: Path) -> None:
    """Raise ModelError unless index, shards and companions fit together and the model is gpt-oss in MXFP4."""
    for stale in work.glob(".*.part"):
        stale.unlink()
    scene = Scene(Options(model=work), "spark")
    try:
        missing, damaged, _ = checkpoint.survey(scene)
        absent = checkpoint.files_missing(scene)
        config = checkpoint.config(scene)
    except Exception as error:
        raise _broken(work, str(error)) from error
    if wrong := [*(f"{name} is missing" for name in (*missing, *absent)), *damaged]:
        raise _broken(work, "; ".join(wrong[:3]))
    method = (config.get("quantization_config") or {}).get("quant_method")
    if (config.get("model_type"), method) != ("gpt_oss", "mxfp4"):
        raise _broken(
            work, f"model_type {config.get('model_type')!r} with quantization {method!r}, not gpt_oss in mxfp4"
        )


def _broken(work: Path, why: str) -> ModelError:
    return ModelError(
        f"{work.name} is no whole gpt-oss checkpoint", why, f"rm -r {work}, then run the same command again"
    )


def _note(source: Source, work: Path, files: list[Wanted]) -> dict[str, object]:
    named = {}
    for file in files:
        digest = file.digest if file.digest.startswith("sha256:") else digest_of(work / file.name, "sha256:")
        named[file.name] = {"size": file.size, "sha256": digest.removeprefix("sha256:")}
    return {"schema": 1, "source": source.name, "revision": source.revision, "files": named}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
