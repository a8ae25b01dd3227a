"""Our systemd unit: its text, quoted as systemd reads it, and our mark in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparkforge.core import paths, tables
from sparkforge.core.errors import InputError, IntegrityError, PatchError, RefusalError, UsageError
from sparkforge.core.tables import Record

TABLE = Path(__file__).with_name("unit.toml")
NAME = "sparkforge.service"
GROWING_SINCE = 254  # the first systemd with RestartSteps= and RestartMaxDelaySec= (its NEWS)
# No restart cures a wrong argument, a missing model, a wrong hash, a broken patch or a refusal.
LASTING = (UsageError, InputError, IntegrityError, PatchError, RefusalError)
MARK = "# Written by `./inv service.install` of {root}; sha256 of what follows: {digest}\n"


class Variables(Record):
    """Names of variables that are taken over from the installation's environment, and what containers get besides."""

    carried: tuple[str, ...]
    container: dict[str, str]


class UnitTable(Record):
    """The table unit.toml: keys of systemd.unit(5), systemd.service(5) and systemd.resource-control(5) → values.

    `restarts` is growing and constant pauses, `resources` is by what serves, `system` is for a system unit of the
    embedded device, `environment` names variables that an installation takes over, and what containers get besides.
    """

    limits: dict[str, str]
    restarts: dict[Literal["growing", "constant"], dict[str, str]]
    service: dict[str, str]
    system: dict[Literal["service", "environment"], dict[str, str]]
    resources: dict[Literal["embedded", "docker"], dict[str, str]]
    environment: Variables


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
        table = tables.load(TABLE, UnitTable)
        restarts = table.restarts["growing" if self.version >= GROWING_SINCE else "constant"]
        inv = str(self.root / "inv")
        # With `:` systemd replaces no $VARIABLE in the command.
        start = f":{command((inv, 'up', '--foreground', '--hold', *self.arguments))}"
        service = {
            "Type": "notify",
            "NotifyAccess": "main",
            "WorkingDirectory": plain(str(self.root)),
            "ExecStart": start,
            **({"User": self.user} if self.user else {}),
            "Restart": "on-failure",
            "RestartPreventExitStatus": " ".join(str(family.exit_code) for family in LASTING),
            **restarts,
            **table.service,
            **table.resources["docker" if self.container else "embedded"],
        }
        variables = {**self.environment, **(table.environment.container if self.container else {})}
        if self.user and not self.container:  # a container has a /dev/shm of its own
            service |= table.system["service"]
            variables |= table.system["environment"]
        if self.container:
            # The container is no child of the command: if that is killed, the container would serve on.
            killed = '[ "$$EXIT_CODE" != killed ] || exec "$$0" down'
            service["ExecStopPost"] = f"-{command(('/bin/sh', '-c'))} '{killed}' {quoted(inv).replace('$', '$$')}"
        lines = ["[Unit]", "Description=Sparkforge serves a model", *_lines(table.limits)]
        lines += [f"RequiresMountsFor={command(map(str, (self.root, *self.places)))}"]
        if self.user:
            # Logins and the desktop do not wait for minutes of loading: without this line the target waits for us.
            lines += ["After=multi-user.target network.target docker.service nvidia-persistenced.service"]
        lines += ["", "[Service]", *_lines(service)]
        lines += [f"Environment={quoted(f'{name}={value}')}" for name, value in sorted(variables.items())]
        lines += ["", "[Install]", f"WantedBy={'multi-user' if self.user else 'default'}.target", ""]
        body = "\n".join(lines)
        return MARK.format(root=self.root, digest=hashlib.sha256(body.encode()).hexdigest()) + body


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` that a unit takes over."""
    names = tables.load(TABLE, UnitTable).environment.carried
    return {name: environment[name] for name in names if environment.get(name)}


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

    Raises UsageError for a control character or what is no UTF-8.
    """
    return '"' + plain(word + " ")[:-1].replace("\\", "\\\\").replace('"', '\\"') + '"'


def plain(text: str) -> str:
    """Return a text that systemd takes as it is to the line's end, such as WorkingDirectory=. Raises UsageError."""
    if text.endswith("\\") or any(ord(letter) < 32 or "\ud800" <= letter <= "\udfff" for letter in text):
        why = "a unit's line holds UTF-8 without control characters and does not end with a backslash"
        raise UsageError(f"{text!r} cannot stand in a unit", why, "move the checkout, the model or the state folder")
    return text.replace("%", "%%")


def _lines(settings: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]
