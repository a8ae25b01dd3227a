"""Where things lie: the checkout, its state, and the user's cache.

`SPARKFORGE_ROOT` (set in the image), `SPARKFORGE_STATE` and `SPARKFORGE_CACHE` (set by tests) move them.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from sparkforge.core.errors import UsageError

# The image has our packages in a folder of their own, and pins, locks and patches elsewhere.
ROOT = Path(os.environ.get("SPARKFORGE_ROOT") or Path(__file__).resolve().parents[2])

# What the Compose files in use are known by in a container. Compose tells a container only of those in COMPOSE_FILE
# (which `./inv` sets too), never of a `-f`; so each file of ours sets a variable of its own, numbered in their order.
COMPOSE_FILES = "SPARKFORGE_COMPOSE_FILE"
COMPOSE_PROFILE = "SPARKFORGE_COMPOSE_PROFILE"
DEFAULT_COMPOSE_FILES = ["docker-compose.yml"]  # Compose finds it by itself, with the override file
COMPOSE_VERBS = "build|config|down|exec|logs|ps|pull|restart|run|start|stop|up"
OF_THE_HOST = ("docker", "sudo", "systemctl", "loginctl", "journalctl")  # no image has them


def where_it_runs(advice: str) -> str:
    """Return an advised command, with a word on where it runs if that is not here.

    An image has no Compose files; that for development has an `./inv`, the one that serves has none. A `docker compose`
    in it gets the `-f` files with which the container was made.
    """
    if (ROOT / "docker-compose.yml").exists():
        return advice
    options = compose_options(os.environ)
    advice = re.sub(rf"docker compose (?=(?:{COMPOSE_VERBS})\b)", lambda _: f"docker compose {options}", advice)
    if "on the host" in advice:
        return advice
    absent = "|".join((*OF_THE_HOST, *(() if (ROOT / "inv").exists() else (r"\./inv",))))
    return f"on the host: {advice}" if re.search(rf"(?:^|[\s(`])(?:{absent})[\s`]", advice) else advice


def compose_options(environment: Mapping[str, str]) -> str:
    """Return what follows `docker compose` to name the files that made this container: empty, or ends in a space."""
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


def state() -> Path:
    """Directory of this checkout's environments, models, logs and records; absolute, may not exist yet."""
    return Path(os.environ.get("SPARKFORGE_STATE") or ROOT / ".sparkforge").absolute()


def secure_state() -> Path:
    """Return the state folder, made if it is not there, and open to its owner alone.

    It holds records that commands believe, such as which process is the server. A folder of another user stays as it
    is: `sparkforge.serve.record` believes nothing in it.
    """
    folder = state()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def cache() -> Path:
    """Directory of verified downloads, shared between checkouts; absolute, may not exist yet."""
    if chosen := os.environ.get("SPARKFORGE_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "sparkforge"


def environment(name: str) -> Path:
    """Folder of one of this checkout's Python environments; may not exist yet."""
    return state() / "envs" / name


def typed(text: str | Path) -> Path:
    """Return the place that a person named, with its `~` expanded. Raises UsageError for a home that nobody has."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"there is no place {text}", "nobody has that home", "write its path out: /…") from error
