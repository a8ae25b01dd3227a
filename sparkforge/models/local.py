"""Find a checkpoint on this machine: a folder, a checkpoint that `pull` fetched, or a snapshot in Hugging Face's cache.

Hugging Face's cache (huggingface_hub, "Understand caching") has a folder `models--OWNER--NAME` for each repository:
`refs/main` holds a commit, and `snapshots/COMMIT` holds the files, as links into `blobs`.
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from sparkforge.core import files, paths
from sparkforge.core.errors import InputError, StorageError
from sparkforge.core.files import DocumentError, read_json
from sparkforge.models import recipes
from sparkforge.plan import families

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODELS = Path("/models")  # where Compose mounts a folder of models
MOUNTED = Path("/root/.cache/huggingface")  # users' mount point with `docker run`; Compose mounts the folder hub
CONFIG_BYTES = 10_000_000  # a config.json has a few kilobytes
TOKENS = ("token", "stored_tokens")  # files that `hf auth login` writes beside the folder hub


def find(model: str, env: Mapping[str, str], revision: str = "") -> Path:
    """Return the folder of a checkpoint: `model` itself if it is a folder, else that of the repository OWNER/NAME.

    Of several snapshots it takes that of `revision`, else the pinned one, else the one of refs/main, else the only one;
    snapshots with weights come first. Raises InputError if there is none, StorageError if it cannot be read.
    """
    folder = paths.typed(model)
    if not REPOSITORY.fullmatch(model) or folder.is_dir():
        require_readable(folder)
        return folder
    owner, name = model.split("/")
    fetched = [folder / name for folder in (paths.ROOT / "models", MODELS) if not revision]
    caches = [cache / f"models--{owner}--{name}" for cache in hub_caches(env)]
    denials: list[StorageError] = []
    for place in (*fetched, *caches):
        try:
            require_readable(place)
            snapshot = _snapshot(place, model, revision) if place in caches else place
            if snapshot:
                require_readable(snapshot)
                if (snapshot / "config.json").is_file():
                    return snapshot
        except StorageError as error:  # another place may have the model
            denials.append(error)
    if denials:
        raise denials[0]
    why = f"there is no {caches[0].name} in {', '.join(str(cache.parent) for cache in caches)}"
    failure = f"{model} is not on this machine" + (f" at {revision}" if revision else "")
    why = f"{why}, and no {' and no '.join(map(str, fetched))}" if fetched else why
    fix = f"./inv pull {model}   # or hf download {model}; a container needs ~/.cache/huggingface mounted at {MOUNTED}"
    raise InputError(failure, why, fix, code="input.model")


def hub_caches(env: Mapping[str, str]) -> list[Path]:
    """Return the folders that may hold `models--OWNER--NAME`: huggingface_hub's, and the usual mount points."""
    mounted = str(MOUNTED) if os.access(MOUNTED.parents[1], os.X_OK) else ""  # on a host, /root belongs to another user
    homes = [env.get("HF_HUB_CACHE"), env.get("HF_HOME"), mounted]
    homes += [f"{env['XDG_CACHE_HOME']}/huggingface" if env.get("XDG_CACHE_HOME") else "", "~/.cache/huggingface"]
    roots = [paths.typed(home).absolute() for home in homes if home]
    return list(dict.fromkeys(folder for root in (*roots, MODELS) for folder in (root / "hub", root)))


def name_of(folder: Path) -> str:
    """Return the name under which a checkpoint's folder is served: a snapshot's repository, else the folder's name."""
    repository = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and repository[0] == "models" and len(repository) == 3:
        return "/".join(repository[1:])
    return folder.name


def family_of(folder: Path) -> str:
    """Return the family of a checkpoint. Raises InputError for an unknown family or weight format."""
    config = folder / "config.json"
    fix = "./inv list   # shows the models to serve; --model takes a folder with a checkpoint of a known family"
    require_readable(folder)
    try:
        content = read_json(config, largest=CONFIG_BYTES)
    except (OSError, DocumentError) as error:
        why = f"cannot read {config.name}: {getattr(error, 'strerror', '') or getattr(error, 'why', error)}"
        raise InputError(f"no model in {folder}", why, fix, code="input.model") from error
    try:
        name = families.name_of(content, folder.name)
        families.stored(content, name, folder.name)
    except InputError as error:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        failure = f"{folder.name} cannot be served: {error.what}"
        raise InputError(failure, error.why, recipes.advice(size or math.inf), code="input.model") from error
    return name


def hub_cache_of(folder: Path) -> Path | None:
    """Return the hub's cache that a snapshot is in; None for another folder."""
    return folder.parents[2] if "/" in name_of(folder) else None


def require_readable(folder: Path) -> None:
    """Raise StorageError, with the owner and the fix, for a folder whose files this process cannot read."""
    if denied := files.unreadable(folder):
        why, fix = denied
        raise StorageError(f"cannot read the model in {folder}", why, fix, code="storage.access")


def _snapshot(cache: Path, repository: str, revision: str) -> Path | None:
    """Return the snapshot to serve from the cache's folder of a repository; None if there is none."""
    require_readable(cache / "snapshots")
    reference = cache / "refs" / (revision or "main")
    commit_of_ref = reference.read_text(encoding="utf-8").strip() if reference.is_file() else ""
    snapshots = sorted(path for path in cache.glob("snapshots/*") if path.is_dir())
    commits = [revision, commit_of_ref] if revision else [recipes.pinned_revision(repository), commit_of_ref]
    wanted = [path for commit in commits for path in snapshots if path.name == commit]
    if not revision and len(snapshots) == 1:
        wanted += snapshots
    complete = [path for path in wanted if any(path.glob("*.safetensors"))]  # some have only the tokenizer
    return next(iter((*complete, *wanted)), None)
