"""Where things lie: the checkout, its state, and the user's cache.

`SPARKFORGE_STATE` and `SPARKFORGE_CACHE` move the last two (tests do).
"""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent


def state() -> Path:
    """Directory of this checkout's environments, models, logs and records; absolute, may not exist yet."""
    return Path(os.environ.get("SPARKFORGE_STATE", ROOT / ".sparkforge")).absolute()


def cache() -> Path:
    """Directory of verified downloads, shared between checkouts; absolute, may not exist yet."""
    if chosen := os.environ.get("SPARKFORGE_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")).absolute() / "sparkforge"


def typed(text: str | Path) -> Path:
    """Return the place that a person named, with its `~` expanded. Raises UsageError for a home that nobody has."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"there is no place {text}", "nobody has that home", "write its path out: /…") from error
