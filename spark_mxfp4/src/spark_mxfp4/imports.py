"""Import modules that a user names: own kernels and kernels hubs. All other imports of this package are statements."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def named_module(name: str, folder: Path | None = None) -> ModuleType:
    """Import the module `name` and return it; with `folder`, Python looks there first.

    Raises ImportError, ValueError for an empty name, and whatever the module's own code raises.
    """
    if folder is None:
        return importlib.import_module(name)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
