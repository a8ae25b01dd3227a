"""Our systemd unit: its text, quoted as systemd reads it, and our mark in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.errors import InputError, IntegrityError, PatchError, RefusalError, UsageError

TEMPLATE = "deploy/sparkforge.service"
NAME = "sparkforge.service"
GROWING_SINCE = 254  # the first systemd with RestartSteps= and RestartMaxDelaySec= (its NEWS)
# No restart cures a wrong argument, a missing model, a wrong hash, a broken patch or a refusal.
LASTING = (UsageError, InputError, IntegrityError, PatchError, RefusalError)
MARK = "# Written by `./inv service.install` of {root}; sha256 of what follows: {digest}\n"
# Taken over from the shell that installs, if they are set there. No name of a secret belongs in here, and not
# SPARKFORGE_VALIDATE: a check that was switched off for one start is not off at every boot.
CARRIED = (
    "SPARKFORGE_STATE", "SPARKFORGE_CACHE", "SPARKFORGE_COMPOSE_FILES", "SPARKFORGE_STACK", "SPARKFORGE_MODELS",
    "SPARKFORGE_MODEL", "SPARKFORGE_MODEL_NAME", "SPARKFORGE_MODEL_ID", "SPARKFORGE_SERVE_PROFILE", "SPARKFORGE_BIND",
    "SPARKFORGE_ALLOWED_HOSTS", "SPARKFORGE_MEMORY", "SPARKFORGE_SHM", "SPARKFORGE_MEMLOCK", "SPARKFORGE_GUARD_GIB",
    "SPARKFORGE_METRICS", "SPARKFORGE_LIMITS", "SPARKFORGE_START_PERIOD", "SPARKFORGE_VALIDATE_SECONDS", "VLLM_ARGS",
    "COMPOSE_PROJECT_NAME", "DOCKER_HOST", "DOCKER_CONFIG", "TP", "MAX_MODEL_LEN", "OMP_NUM_THREADS", "HF_HOME",
    "HF_HUB_CACHE", "PYTHON", *(variable for variable, _ in paths.USER_FOLDERS.values()),
)  # fmt: skip


@dataclass(frozen=True)
class ServiceUnit:
    """A unit to write: the arguments of `./inv up`, and whose it is.

    `user` is the account of a system unit, empty for a user's own. `version` is systemd's. `environment` are variables
    of the unit, `places` folders that must be mounted before.
    """

    arguments: tuple[str, ...] = ()
    user: str = ""
    container: bool = False
    version: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    places: tuple[Path, ...] = ()
    root: Path = paths.ROOT

    def text(self) -> str:
        """Return the unit's text, its mark included. Raises UsageError for a path that no unit can hold."""
        true = {
            "system" if self.user else "user",
            "docker" if self.container else "embedded",
            "growing" if self.version >= GROWING_SINCE else "constant",
        }
        inv = quoted(str(self.root / "inv"))
        values = {
            "places": command(map(str, (self.root, *self.places))),
            "folder": plain(str(self.root)),
            "inv": inv,
            "inv_in_shell": inv.replace("$", "$$"),
            "arguments": "".join(f" {quoted(word)}" for word in self.arguments),
            "user": self.user,
            "lasting": " ".join(str(family.exit_code) for family in LASTING),
            "environment": "\n".join(
                f"Environment={quoted(f'{name}={value}')}" for name, value in sorted(self.environment.items())
            ),
        }
        template = (paths.ROOT / TEMPLATE).read_text(encoding="utf-8")
        rows = [line.split("|", 1) for line in template.splitlines() if not line.startswith("#")]
        body = "".join(f"{line[1:].format(**values)}\n" for words, line in rows if true.issuperset(words.split()))
        return MARK.format(root=self.root, digest=hashlib.sha256(body.encode()).hexdigest()) + body


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` that a unit takes over."""
    return {name: environment[name] for name in CARRIED if environment.get(name)}


def root_of(text: str) -> str:
    """Return the checkout that wrote the unit; empty if none did, or somebody has edited it since."""
    first, _, body = text.partition("\n")
    start, _, digest = first.partition("; sha256 of what follows: ")
    begin = MARK.partition("{root}")[0]
    written = start.startswith(begin) and digest == hashlib.sha256(body.encode()).hexdigest()
    return start.removeprefix(begin) if written else ""


def command(arguments: Iterable[str]) -> str:
    """Return words as systemd reads them from one line."""
    return " ".join(quoted(word) for word in arguments)


def quoted(word: str) -> str:
    r"""Return a word between double quotes, with `\`, `"` and `%` escaped (systemd.syntax(7), systemd.unit(5)).

    Raises UsageError for a control character or invalid UTF-8.
    """
    return '"' + plain(word + " ")[:-1].replace("\\", "\\\\").replace('"', '\\"') + '"'


def plain(text: str) -> str:
    """Return a text that systemd takes as it is to the line's end, such as WorkingDirectory=. Raises UsageError."""
    if text.endswith("\\") or any(ord(letter) < 32 or "\ud800" <= letter <= "\udfff" for letter in text):
        why = "a unit's line holds UTF-8 without control characters and does not end with a backslash"
        raise UsageError(
            f"{text!r} cannot stand in a unit",
            why,
            "again   # first move the checkout, the model or the state folder",
        )
    return text.replace("%", "%%")
