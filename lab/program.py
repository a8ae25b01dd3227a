"""How a program of the laboratory ends: its errors are printed as `./inv` prints them, and give the exit code."""

from __future__ import annotations

from collections.abc import Callable

from sparkforge.core.console import show_error
from sparkforge.core.errors import SparkforgeError


def exit_code(program: Callable[[], object]) -> int:
    """Run `program`; return 0, or the code of the error that it raised."""
    try:
        program()
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return 0
