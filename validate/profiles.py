"""Profiles of `profiles.toml`: the checks that a kind of device must pass (required), and those that only warn."""

from __future__ import annotations

from pathlib import Path

from sparkforge.core import tables
from sparkforge.core.errors import UsageError
from sparkforge.core.tables import Record


class Profile(Record):
    """A named selection of checks. `stack` is the default for the table of pins.toml with the expected versions."""

    name: str
    stack: str
    required: tuple[str, ...]
    advised: tuple[str, ...]

    @property
    def severities(self) -> dict[str, bool]:
        """Every check of the profile, and whether it is required."""
        return {**dict.fromkeys(self.required, True), **dict.fromkeys(self.advised, False)}

    def foreign(self) -> Profile:
        """Return the profile for a user's own environment, in which checks against our locks only warn."""
        compared = tuple(check for check in self.required if check in TABLE.pinned)
        kept = tuple(check for check in self.required if check not in compared)
        return self.model_copy(update={"required": kept, "advised": (*self.advised, *compared)})


class Profiles(Record):
    """The whole table."""

    pinned: tuple[str, ...]
    profile: tuple[Profile, ...]


TABLE = tables.load(Path(__file__).with_suffix(".toml"), Profiles)
PROFILES = {profile.name: profile for profile in TABLE.profile}


def named(name: str) -> Profile:
    """Return the profile called `name`. Raises UsageError if there is none."""
    if name not in PROFILES:
        raise UsageError(f"no profile {name!r}", f"choose from {', '.join(PROFILES)}", "--profile spark")
    return PROFILES[name]
