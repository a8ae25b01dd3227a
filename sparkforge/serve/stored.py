"""The checkpoints on this machine: their folders, sizes, users, and removal.

They are those that `./inv pull` wrote, the tiny one, and the repositories in Hugging Face's cache, whose blobs are
counted once, however many snapshots link to them.
"""

import difflib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from sparkforge.core import paths
from sparkforge.core.console import confirmed, echo, echo_json, say
from sparkforge.core.errors import InputError, SparkforgeError, StorageError, UsageError
from sparkforge.core.files import fsync_directory, locked, tree_size
from sparkforge.image.devices import FLEET
from sparkforge.models import local
from sparkforge.models.hub import PARTIAL
from sparkforge.serve import record, status
from sparkforge.serve.command_line import api_names
from sparkforge.serve.record import Server

REMOVED = ".sparkforge-removed"  # suffix of a folder that is being removed, after `.NAME.PID`


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint on this machine; `folder` is a whole repository if it is in a hub's cache."""

    name: str
    folder: Path
    bytes: int
    family: str
    used_by: tuple[str, ...]


def find_all(env: Mapping[str, str]) -> list[StoredModel]:
    """Return every checkpoint by name, also incomplete downloads, without folders that this process cannot read."""
    fetched = [paths.ROOT / "models", local.MODELS, paths.state() / "models"]
    if compose := env.get("SPARKFORGE_MODELS"):
        fetched.append(Path(compose))
    folders = dict[Path, str]()
    for place in fetched:
        with suppress(OSError):
            for folder in place.iterdir():
                if (folder / "config.json").is_file() or folder.name.endswith(PARTIAL):
                    folders.setdefault(folder.absolute(), folder.name)
    for place in local.hub_caches(env):
        for folder in place.glob("models--*--*/"):
            folders.setdefault(folder.absolute(), folder.name.removeprefix("models--").replace("--", "/", 1))
    server = record.read()
    server = server if server and server.alive else None
    models, programs = [], _programs()
    for folder, name in folders.items():
        with suppress(OSError):
            used_by = _users(folder, name, server, programs)
            size = 0 if folder.is_symlink() else tree_size(folder)
            models.append(StoredModel(name, folder, size, _family(folder), used_by))
    return sorted(models, key=lambda model: (model.name, model.folder))


def find(name: str, env: Mapping[str, str]) -> StoredModel:
    """Return the checkpoint of a name or folder. Raises InputError for none, UsageError for several."""
    models = find_all(env)
    exact = [model for model in models if name == model.name or Path(name).absolute() == model.folder]
    matching = exact or [model for model in models if set(api_names(name)) & set(api_names(model.name))]
    if len(matching) == 1:
        return matching[0]
    if matching:
        folders = " and ".join(str(model.folder) for model in matching)
        fix = "./inv list   # name the folder of the one that you mean"
        raise UsageError(f"{name} is here more than once", folders, fix)
    pullable = next((word for word in api_names(name) if local.REPOSITORY.fullmatch(word)), "")
    nearest = difflib.get_close_matches(name, [model.name for model in models], cutoff=0.5)
    why = f"the nearest: {', '.join(nearest)}" if nearest else "nothing here has a similar name"
    fix = f"./inv pull {pullable}" if pullable else "./inv list"
    raise InputError(f"there is no model {name} on this machine", why, fix, code="input.model")


def show(env: Mapping[str, str], *, as_json: bool) -> None:
    """Print the checkpoints, and how much they take together."""
    models = find_all(env)
    if as_json:
        rows = [{**vars(model), "folder": str(model.folder), "used_by": list(model.used_by)} for model in models]
        echo_json({"models": rows})
        return
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        users = f"  used by {', '.join(model.used_by)}" if model.used_by else ""
        echo(f"{model.name:{width}}  {model.bytes / 1e9:7.2f} GB  {model.family:14}  {model.folder}{users}")
    say(f"{len(models)} models, {sum(model.bytes for model in models) / 1e9:.2f} GB; ./inv rm NAME removes one")


def remove(name: str, env: Mapping[str, str], *, yes: bool) -> None:
    """Remove a checkpoint, after a question. Raises StorageError for one that is in use, and the errors of `find`."""
    model = find(name, env)
    folder, fix, size = model.folder, f"./inv down && ./inv rm {name}", f"{model.bytes / 1e9:.2f} GB"
    target = folder.name.removeprefix(".").removesuffix(PARTIAL)  # a fetch into it has the same lock
    lock = f".locks/{folder.name}.lock" if "/" in model.name else f".{target}.lock"
    with locked(folder.parent / lock, f"remove {model.name}"):
        if model.used_by:
            raise StorageError(f"{model.name} is in use", ", ".join(model.used_by), fix, code="storage.busy")
        kept = f"{model.name} is not removed"
        if not yes and not confirmed(f"remove {folder}, {size}?", kept, f"./inv rm {name} --yes"):
            say("nothing was removed")
            return
        for left in folder.parent.glob(f".*{REMOVED}"):  # by a removal that was killed
            shutil.rmtree(left)
        if folder.is_symlink():
            folder.unlink()
        else:
            renamed = folder.with_name(f".{folder.name}.{os.getpid()}{REMOVED}")  # a half-removed one is never found
            folder.rename(renamed)
            fsync_directory(folder.parent)
            if users := _users(folder, model.name, None, _programs()):  # started meanwhile
                renamed.rename(folder)
                raise StorageError(f"{model.name} is in use", ", ".join(users), fix, code="storage.busy")
            shutil.rmtree(renamed)
    say(f"removed {model.name}: {size}")


def _family(folder: Path) -> str:
    """Return a checkpoint's family; `unknown` for one that we do not serve, `-` without a configuration."""
    configs = [path for path in (folder / "config.json", *folder.glob("snapshots/*/config.json")) if path.is_file()]
    with suppress(SparkforgeError):
        return local.family_of(configs[0].parent) if configs else "-"
    return "unknown"


def _programs() -> dict[str, list[str]]:
    """Return the arguments of every other program by its name and id; those with `/` also as absolute paths."""
    own, programs = psutil.Process(), dict[str, list[str]]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, ValueError):
            if process in (own, *own.parents()):
                continue
            words = [word.partition("=")[2] if word.startswith("-") else word for word in process.cmdline()[1:]]
            places = [str(Path(process.cwd(), word).resolve()) for word in words if "/" in word]
            programs[f"{process.name()}, pid {process.pid}"] = words + places
    return programs


def _users(folder: Path, name: str, server: Server | None, programs: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return what uses a checkpoint: our server, else the programs that were started with its folder or repository."""
    whole = folder.resolve()

    def names_it(word: str) -> bool:
        return (word == name and "/" in name) or (word.startswith("/") and Path(word).is_relative_to(whole))

    if server and any(map(names_it, _served(server))):
        return (server.url,)
    return tuple(program for program, words in programs.items() if any(map(names_it, words)))


def _served(server: Server) -> list[str]:
    model = Path(server.model)
    if server.device == FLEET:
        return [str(Path(row["folder"]).resolve()) for row in status.fleet() if row["folder"]]
    if not server.container or not model.is_absolute():
        return [server.model if local.REPOSITORY.fullmatch(server.model) else str(model.resolve())]
    from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

    for target in (model, *model.parents):
        if source := engine.mounted_from(server.container, str(target)):
            return [str(Path(source, model.relative_to(target)).resolve())]
    return [server.model]
