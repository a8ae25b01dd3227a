"""Serve profiles: `serve/profiles.toml`, a table from a profile's name to vLLM's flags, each with its reason.

[profiles.NAME]
about = "when to take it"

[[profiles.NAME.flags]]
flag = "--max-num-seqs"
value = "16"             # left out for a switch
why = "what it is good for"

[[profiles.NAME.environment]]
name = "VARIABLE"
value = "1"
why = "what it is good for"
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.errors import StorageError, UsageError

TABLE = Path(__file__).with_name("profiles.toml")
EDIT = f"edit {TABLE.parent.name}/{TABLE.name}"


@dataclass(frozen=True)
class Setting:
    """One flag (`name` begins with --) or one environment variable; an empty `value` means a switch."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class ServeProfile:
    """What vLLM is started with for one kind of use."""

    name: str
    about: str
    flags: tuple[Setting, ...]
    environment: tuple[Setting, ...]

    def words(self) -> tuple[str, ...]:
        """Return the flags as arguments."""
        return tuple(f"{flag.name}={flag.value}" if flag.value else flag.name for flag in self.flags)

    def variables(self) -> dict[str, str]:
        """Return the environment variables."""
        return {setting.name: setting.value for setting in self.environment}


def load(table: Path = TABLE) -> dict[str, ServeProfile]:
    """Read every profile. Raises StorageError for a file that cannot be read, UsageError for one that is malformed."""
    try:
        profiles = tomllib.loads(table.read_text(encoding="utf-8"))["profiles"]
        return {name: _profile(name, entry) for name, entry in profiles.items()}
    except OSError as error:
        raise StorageError(
            f"cannot read {table}", error.strerror or str(error), "git status   # is it gone?"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{table.name} is malformed", f"{type(error).__name__}: {error}", EDIT) from error


def named(name: str, table: Path = TABLE) -> ServeProfile:
    """Return one profile. Raises UsageError, with the names that there are, if there is none of that name."""
    profiles = load(table)
    if name not in profiles:
        raise UsageError(
            f"no serve profile {name!r}",
            f"there are {', '.join(profiles)} (serve/{TABLE.name})",
            f"./inv up --profile {next(iter(profiles), 'safe')}",
        )
    return profiles[name]


def _profile(name: str, entry: dict[str, Any]) -> ServeProfile:
    _refuse_unknown(name, entry, {"about", "flags", "environment"})
    flags = tuple(_setting(name, row, "flag") for row in entry.get("flags", []))
    variables = tuple(_setting(name, row, "name") for row in entry.get("environment", []))
    if wrong := [flag.name for flag in flags if not flag.name.startswith("--") or "=" in flag.name]:
        raise ValueError(f"{name}: {wrong[0]!r} is no flag")
    return ServeProfile(name, str(entry["about"]), flags, variables)


def _setting(profile: str, row: dict[str, Any], key: str) -> Setting:
    _refuse_unknown(profile, row, {key, "value", "why"})
    value = row.get("value", "")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"{profile}: the value of {row[key]} is no text")
    return Setting(str(row[key]), str(value), str(row["why"]))


def _refuse_unknown(profile: str, entry: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(entry.keys() - known):
        raise ValueError(f"{profile}: unknown key {unknown[0]!r}")
