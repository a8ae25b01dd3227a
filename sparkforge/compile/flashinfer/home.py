"""The environment that kernels are built for where none is named: FlashInfer, patched, and torch without CUDA.

It is for trying out, for tests and for measuring. A server has another interpreter, and with it other paths.
"""

from __future__ import annotations

from pathlib import Path

from sparkforge import environments, pins
from sparkforge.environments import Environment


def ensure(stack: str) -> Path:
    """Make the environment that pins.toml names for a stack, unless it is complete; return its interpreter.

    Raises the errors of `environments.ensure`.
    """
    table = pins.load()
    home = Environment(table.image(stack).environments["kernels"])
    environments.ensure(home, table)
    return home.python
