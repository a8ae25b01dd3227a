"""The folders: the checkout, its state, and the user's cache.

`SPARKFORGE_ROOT` (set in the image), `SPARKFORGE_STATE` and `SPARKFORGE_CACHE` (set by tests) move them. An installed
wheel has its checkout, with the models, in the user's data folder, and its state in the state folder (USER_FOLDERS).
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from sparkforge.core.errors import StorageError, UsageError, completed, with_remark

# The image has our packages in a folder of their own, and pins, locks and patches elsewhere.
ROOT = Path(os.environ.get("SPARKFORGE_ROOT") or Path(__file__).resolve().parents[2])

WHEEL_LIST = ".wheel"  # the files that a wheel laid out, with their hashes
INSTALLED = (ROOT / WHEEL_LIST).is_file()
# A user's folders by the XDG base directory specification: the variable, and the default folder in the home.
USER_FOLDERS = {
    "data": ("XDG_DATA_HOME", ".local/share"),  # an installed wheel's checkout, models, settings
    "state": ("XDG_STATE_HOME", ".local/state"),  # an installed wheel's environments, logs, records
    "cache": ("XDG_CACHE_HOME", ".cache"),  # verified downloads
}

# The variables that name the Compose files in use, inside a container. Compose passes on only COMPOSE_FILE (which
# `./inv` sets too), never the files of `-f`; so each of our files sets a variable of its own, numbered in their order.
COMPOSE_FILES = "SPARKFORGE_COMPOSE_FILE"
COMPOSE_PROFILE = "SPARKFORGE_COMPOSE_PROFILE"
DEFAULT_COMPOSE_FILES = ["docker-compose.yml"]  # Compose finds it by itself, with the override file
COMPOSE_VERBS = "build|config|down|exec|logs|ps|pull|restart|run|start|stop|up"
SHARED = "SPARKFORGE_SHARED_STATE"  # set for a model of a fleet, whose own state folder has only its records
OF_THE_HOST = ("docker", "sudo", "systemctl", "loginctl", "journalctl")  # commands that no image has


def user_folder(kind: str) -> Path:
    """Return the user's folder of a kind, a key of USER_FOLDERS; absolute, may not exist yet."""
    variable, default = USER_FOLDERS[kind]
    return Path(os.environ.get(variable) or Path.home() / default).absolute() / "sparkforge"


def as_called_here(text: str) -> str:
    """Return `text`; in an installed wheel, a checkout's commands and folders are replaced by the wheel's."""
    if not INSTALLED:
        return text
    text = re.sub(r"(?<![\w/.])sudo \./inv\b", f"sudo {ROOT}/inv", text)  # root has another home, and no `sparkforge`
    text = re.sub(r"(?<![\w/.])\./inv\b", "sparkforge", text)
    text = re.sub(r"(?<![\w/.-])\.sparkforge/", lambda _: f"{state()}/", text)
    compose = f"docker compose --project-directory {shlex.quote(str(ROOT))} "
    return re.sub(rf"docker compose (?=(?:{COMPOSE_VERBS})\b)", lambda _: compose, text)


def where_it_runs(advice: str, root: Path = ROOT) -> str:
    """Return an advised command, with a remark if it must run on the host: an image has no Compose files.

    `docker compose` gets the `-f` files with which the container was made.
    """
    if (root / "docker-compose.yml").exists():
        return completed(advice, "./inv up")
    advice, options = completed(advice, "docker compose up -d"), compose_options(os.environ)
    advice = re.sub(rf"docker compose (?=(?:{COMPOSE_VERBS})\b)", lambda _: f"docker compose {options}", advice)
    if "on the host" in advice:
        return advice
    absent = "|".join((*OF_THE_HOST, *(() if (root / "inv").exists() else (r"\./inv",))))
    if not re.search(rf"(?:^|[\s(`])(?:{absent})[\s`]", advice):
        return advice
    return with_remark(advice, "on the host")


def compose_options(environment: Mapping[str, str]) -> str:
    """Return the `docker compose` options, files and profile, of this container: empty, or with a space at the end."""
    files = [name for name in environment.get(COMPOSE_FILES, "").split(os.pathsep) if name]
    if not files:
        named = {
            int(number): value
            for name, value in environment.items()
            if value and (number := name.removeprefix(f"{COMPOSE_FILES}_")) != name and number.isdecimal()
        }
        files = [named[number] for number in sorted(named)]
        files = [] if files == DEFAULT_COMPOSE_FILES else files
    profile = environment.get(COMPOSE_PROFILE, "")
    options = [word for name in files for word in ("-f", name)] + (["--profile", profile] if profile else [])
    return "".join(f"{shlex.quote(word)} " for word in options)


OWN = {"envs", "hold.lock", "models", "serve.lock", "starts.json", "up.json", "validation.json"}  # in a state folder


def state() -> Path:
    """Directory of this checkout's environments, models, logs and records; absolute, may not exist yet."""
    usual = user_folder("state") if INSTALLED else ROOT / ".sparkforge"
    return Path(os.environ.get("SPARKFORGE_STATE") or usual).absolute()


def require_state() -> None:
    """Raise StorageError if the state folder cannot be used, or SPARKFORGE_STATE names one that cannot be made."""
    folder, variable = state(), "SPARKFORGE_STATE"
    part = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    why = ""
    fix = f"unset {variable}   # the default folder"
    if not os.environ.get(variable):
        fix = f"ls -ld {shlex.quote(str(part))}"
    if not part.is_dir():
        why = f"{part} is not a folder"
    elif (part == folder or os.environ.get(variable)) and not os.access(part, os.R_OK | os.W_OK | os.X_OK):
        why = f"uid {os.geteuid()} must be able to read and write {part}"
    elif part == folder and os.environ.get(variable) and _of_others(folder):
        why = "other programs use it, and a state folder is closed to all but its owner"
        fix = f"{variable}={shlex.quote(str(folder / 'sparkforge'))}"
    if why:
        raise StorageError(f"cannot use the state folder {folder}", why, fix, code="storage.access")


def _of_others(folder: Path) -> bool:
    """Tell whether a folder such as /tmp, /var or / is open to other users and used by other programs."""
    status, entries = folder.stat(), [path for path in folder.iterdir() if path.name != "lost+found"]
    if not entries or not status.st_mode & 0o077:
        return False
    if status.st_mode & stat.S_ISVTX or any(path.lstat().st_uid != os.geteuid() for path in entries):
        return True
    return len(folder.parts) <= 2 and not OWN & {path.name for path in entries}  # the root folder, and those in it


def secure_state() -> Path:
    """Return the state folder; create it if it is missing, and close it to other users: commands trust its records.

    The mode of another user's folder is not changed: `sparkforge.serve.record` refuses its records.
    """
    folder = state()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def cache() -> Path:
    """Directory of verified downloads, shared between checkouts; absolute, may not exist yet."""
    chosen = os.environ.get("SPARKFORGE_CACHE")
    return Path(chosen).absolute() if chosen else user_folder("cache")


def shared() -> Path:
    """Directory that a fleet's models share, with environments, the tiny model, vLLM's cache."""
    return Path(os.environ.get(SHARED) or state())


def environment(name: str) -> Path:
    """Folder of one of this checkout's Python environments; may not exist yet."""
    return shared() / "envs" / name


def typed(text: str | Path) -> Path:
    """Return the path that a user typed, with its `~` expanded. Raises UsageError for an unknown user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        fix = "--help   # write the absolute path"
        raise UsageError(f"there is no path {text}", "that user does not exist", fix) from error
