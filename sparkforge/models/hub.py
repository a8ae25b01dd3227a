"""Fetch a checkpoint: only the files that vLLM reads, with resume and a check of every hash.

`python -m sparkforge.models.hub REPOSITORY --to FOLDER [--revision REV] [--mirror FOLDER] [--replace]`

Files are collected in a temporary folder. When all are present, have their hashes and fit together, the target appears,
or its files are replaced by renames. A target without our note, or with another model's, changes only with --replace.
"""

import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import download_bar, echo, say
from sparkforge.core.errors import InputError, IntegrityError, StorageError, UsageError, on
from sparkforge.core.files import (
    CHUNK,
    DocumentError,
    fsync_directory,
    locked,
    read_json,
    require_space,
    sha256_file,
    write_json,
)
from sparkforge.core.program import ArgumentParser, exit_code
from sparkforge.models import recipes as models
from sparkforge.models.hub_source import NOTE, CheckpointSource, Mirror, Note, RemoteFile
from sparkforge.plan import architecture
from validate.facts import checkpoint
from validate.facts.target import Options, Target

PARTIAL = ".sparkforge-partial"  # a fetch's temporary folder: `.NAME` and this beside a new target, or inside the old
# The files of a checkpoint that vLLM 0.32.0 reads; gpt-oss's repositories have the weights in original/ and metal/ too.
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "model.safetensors.index.json", "*.safetensors",
)  # fmt: skip
FIRST = ("config.json", checkpoint.INDEX)  # fetched first, to judge the model before its weights are fetched
WORKERS = 4  # files at a time: one connection seldom uses the whole bandwidth


def fetch_checkpoint(source: CheckpointSource, target: Path, *, replace: bool = False) -> Path:
    """Make `target` the checkpoint of `source` and return it; if it is complete already, only verify it.

    An existing `target` does not change before all files are fetched and verified. Without `replace` its files change
    only if our note says that they are an earlier fetch of the same repository. Raises NetworkError, IntegrityError,
    InputError, and StorageError for a folder that is not ours or that another process is fetching.
    """
    target = paths.typed(target).absolute().resolve()
    with locked(target.parent / f".{target.name}.lock", f"fetch {target.name}"):
        if target.exists() and not target.is_dir():
            failure = f"{target} is not a folder"
            raise UsageError(failure, "a checkpoint is a folder of files", "without --to   # or name another folder")
        files = choose(source)
        different = [file for file in files if not _has(target / file.name, file)]
        note = None
        with suppress(InputError):  # without a readable note the folder is not ours
            note = Note.read(target)
        if different and not replace:
            _require_ours(target, note, source)
        for file in different:
            if (target / file.name).exists():
                say(f"{file.name} differs from {file.digest[:19] or file.size}…: fetching it again")
        work = target / PARTIAL if target.exists() else target.with_name(f".{target.name}{PARTIAL}")
        if different or not target.exists():
            missing = _missing(work, different)
            require_space(work, sum(file.size - _size(_part(work, file)) for file in missing), source.name)
            _fetch_all(source, work, [file for file in missing if file.name in FIRST])
            _require_known(target, work, files, source.repository)
            _fetch_all(source, work, [file for file in missing if file.name not in FIRST])
        _check(target, work, files, different, source.repository)
        if not target.exists():
            for stale in work.glob(".*.part"):
                stale.unlink()
            write_json(work / NOTE, _note(source, work, files))
            work.rename(target)
            fsync_directory(target.parent)
        elif different or note is not None:
            _swap(source, target, work, files, different, note)
    return target


def _has(path: Path, file: RemoteFile) -> bool:
    has_size = path.is_file() and path.stat().st_size == file.size
    return has_size and (not file.digest or digest_of(path, file.digest) == file.digest)


def _require_ours(target: Path, note: Note | None, source: CheckpointSource) -> None:
    if not target.exists() or {path.name for path in target.iterdir()} <= {PARTIAL}:
        return
    if note is None:
        why = f"pull did not make it: {NOTE} is missing or cannot be read"
    elif note.repository != source.repository:
        why = f"it holds {note.repository}"
    else:
        return
    fix = f"--replace   # replaces files in {target}; or --to another folder"
    raise StorageError(f"{target} is left as it is", why, fix, code="storage.access")


def _swap(
    source: CheckpointSource,
    target: Path,
    work: Path,
    files: list[RemoteFile],
    different: list[RemoteFile],
    note: Note | None,
) -> None:
    """Rename verified files into `target`, and remove unchanged files that only the earlier revision had.

    A kill in between leaves our old note and the remaining files in `work`, from which the next run continues.
    """
    for file in different:
        (work / file.name).replace(target / file.name)
    fsync_directory(target)
    for name, noted in (note.files if note else {}).items():
        path = target / name
        gone = name not in {file.name for file in files} and name == Path(name).name
        if gone and path.is_file() and sha256_file(path) == noted.sha256:
            path.unlink()
    write_json(target / NOTE, _note(source, target, files))
    shutil.rmtree(work, ignore_errors=True)


def choose(source: CheckpointSource) -> list[RemoteFile]:
    """Return the files of `source` that vLLM reads. Raises InputError if there is no such checkpoint."""
    top = [file for file in source.files() if "/" not in file.name]
    files = [file for file in top if any(fnmatchcase(file.name, pattern) for pattern in MODEL_FILES)]
    names = {file.name for file in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        why = f"it has {', '.join(sorted(names)) or 'none of the files that vLLM reads'}"
        failure = f"{source.name} is not a safetensors checkpoint"
        raise InputError(failure, why, "./inv pull openai/gpt-oss-120b", code="input.model")
    return files


def digest_of(path: Path, like: str) -> str:
    """Return the file's digest of the same kind as `like`: a git blob's id is SHA-1 over its length and bytes."""
    if not like.startswith("git:"):
        return f"sha256:{sha256_file(path)}"
    blob = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            blob.update(data)
    return f"git:{blob.hexdigest()}"


def fetch_and_report(repository: str, revision: str, to: str, mirror: str, *, replace: bool = False) -> None:
    """Fetch a checkpoint and print its source and the next command. Raises as `fetch_checkpoint` does."""
    # The default is the folder `models`, which Compose mounts.
    target = Path(to) if to else paths.ROOT / "models" / repository.rpartition("/")[2]
    pinned = revision
    if not revision and not mirror:
        note = Note.read(paths.typed(target))
        recorded = note.revision if note and note.repository == repository else ""  # the revision of an earlier fetch
        pinned = models.pinned_revision(repository) or recorded
    source: CheckpointSource
    if mirror:
        source = Mirror(Path(mirror), repository, pinned)
    else:
        from sparkforge.models.hub_online import Hub  # noqa: PLC0415 - only this branch needs the hub's library

        source = Hub(repository, pinned or "main")
    say(f"{source.name} at {source.revision} → {target}")
    if not pinned and not mirror:
        say(f"no revision of {repository} is pinned: this is its main branch now, and the commit is recorded in {NOTE}")
    folder = fetch_checkpoint(source, target, replace=replace)
    say("every file is complete and has its hash" if not mirror else "every file is complete")
    echo(str(folder))
    if known := models.draft_of(repository):
        say(f"a draft, off by default: ./inv up {known[0]} -- {known[1].flag()}")
    else:
        say(f"serve it: ./inv up --model {folder}")
    recipe = models.of_repository(repository)
    for draft in {row.repository for row in recipe.drafts.values() if row.repository} if recipe else ():
        say(f"its draft, to try speculation: ./inv pull {draft}")


def main(command_line: list[str]) -> int:
    """Fetch from the command line; return the exit code."""
    parser = ArgumentParser(prog="python -m sparkforge.models.hub", description=__doc__, allow_abbrev=False)
    parser.add_argument("repository", help="such as openai/gpt-oss-120b")
    for flag in ("--revision", "--to", "--mirror"):
        parser.add_argument(flag, default="")
    parser.add_argument("--replace", action="store_true", help="replace files in a folder that pull did not make")
    return exit_code(lambda: fetch_and_report(**vars(parser.parse_args(command_line))))


def _missing(work: Path, files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Make `work`, remove files of other revisions from it, and return the files that it lacks."""
    work.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not _has(work / file.name, file)]
    for file in missing:
        (work / file.name).unlink(missing_ok=True)
    return missing


def _require_known(target: Path, work: Path, files: list[RemoteFile], repository: str) -> None:
    """Raise InputError for an unknown family or a config that contradicts the tensors; a recipe's draft passes."""
    if models.draft_of(repository):
        return
    config, index = (next((f / name for f in (work, target) if (f / name).is_file()), work / name) for name in FIRST)
    total = sum(file.size for file in files if file.name.endswith(".safetensors"))
    what, why = f"{repository} contradicts its config.json", ""
    try:
        model = architecture.read(config)
        metadata = read_json(index, largest=checkpoint.HEADER_LIMIT).get("metadata") if index.is_file() else None
        stored = metadata.get("total_size") if isinstance(metadata, dict) else None
        why = model.disagreement(stored) if type(stored) is int else ""
    except InputError as error:
        what, why = f"{repository} is not fetched: {error.what}", error.why
    except (DocumentError, AttributeError) as error:
        what, why = f"{repository} is not fetched", str(error)
    if why:
        raise InputError(what, why, models.advice(total), code="input.model")


def _fetch_all(source: CheckpointSource, work: Path, files: list[RemoteFile]) -> None:
    """Fetch files in parallel, largest first. The first failure, or Ctrl-C, ends all transfers; parts are kept."""
    stopping, counting = threading.Event(), threading.Lock()
    ordered = sorted(files, key=lambda file: -file.size)
    total = sum(file.size for file in files)
    with download_bar(source.name, total) as advance, ThreadPoolExecutor(WORKERS) as pool:
        advance(sum(_size(_part(work, file)) for file in files))

        def count(size: int) -> None:
            """Count a piece of any thread's file, and end the thread if another thread failed."""
            if stopping.is_set():
                raise InterruptedError("another file failed")
            with counting:
                advance(size)

        running = [pool.submit(_fetch_file, source, work, file, count) for file in ordered]
        try:
            finished, _ = wait(running, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
        finally:
            stopping.set()
            for future in running:
                future.cancel()


def _fetch_file(source: CheckpointSource, work: Path, file: RemoteFile, count: Callable[[int], None]) -> None:
    part = _part(work, file)
    source.fetch(file, part, count)
    digest = digest_of(part, file.digest)
    if part.stat().st_size != file.size or (file.digest and digest != file.digest):
        part.unlink()
        why, fix = f"it has {digest}, not {file.digest or f'{file.size} bytes'}", "again   # restarts this file"
        raise IntegrityError(f"{file.name} is not the file that {source.name} names", why, fix, code="integrity.hash")
    with part.open("rb+") as written:
        os.fsync(written.fileno())
    part.rename(work / file.name)
    fsync_directory(work)


def _part(work: Path, file: RemoteFile) -> Path:
    mark = file.digest.partition(":")[2][:12] or "unknown"
    return work / f".{file.name}.{mark}.part"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check(target: Path, work: Path, files: list[RemoteFile], different: list[RemoteFile], repository: str) -> None:
    folder = target if target.exists() else work
    if target.exists() and different:  # the files are in two folders: links form the complete checkpoint
        folder = work / ".view"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in files:
            (folder / file.name).symlink_to((work if file in different else target) / file.name)
    validated = Target(Options(model=folder), "")
    try:
        missing, damaged, _ = checkpoint.survey(validated)
        absent = checkpoint.files_missing(validated)
        config = checkpoint.config(validated)
    except Exception as error:
        raise _broken(repository, work, str(error)) from error
    if problems := [*(f"{name} is missing" for name in (*missing, *absent)), *damaged]:
        raise _broken(repository, work, "; ".join(problems[:3]))
    try:
        if not models.draft_of(repository):
            architecture.parse(config, "config.json")
    except InputError as error:
        raise _broken(repository, work, f"{error.what}: {error.why}") from error
    if problems := models.differences(config, repository):
        why = f"its config.json has {'; '.join(problems[:3])} (see sparkforge/recipes)"
        fix = on("rm -r", work, "check the mirror, or name the model that it has")
        raise InputError(f"this checkpoint is not {repository}", why, fix, code="input.model")


def _broken(repository: str, work: Path, why: str) -> InputError:
    fix = on("rm -r", work, "removes the fetched files; name another repository or mirror")
    return InputError(f"{repository} is not a complete checkpoint of a known family", why, fix, code="input.model")


def _note(source: CheckpointSource, work: Path, files: list[RemoteFile]) -> dict[str, object]:
    entries = {}
    for file in files:
        digest = file.digest if file.digest.startswith("sha256:") else digest_of(work / file.name, "sha256:")
        entries[file.name] = {"size": file.size, "sha256": digest.removeprefix("sha256:")}
    origin = {"source": source.name, "repository": source.repository, "revision": source.revision}
    return {"schema": 1, **origin, "files": entries}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
