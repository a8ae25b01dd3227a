"""Arguments, errors and exit codes of programs that run without `./inv`, the same as those of its commands."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import NoReturn

from sparkforge.core.advice import completed
from sparkforge.core.console import say, show_error
from sparkforge.core.declare import declare
from sparkforge.core.errors import UsageError

INTERRUPTED = 130  # 128 plus the number of SIGINT, as in shells


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError("the arguments cannot be read", message, f"{self.prog} --help")


def parse_whole(text: str, label: str, least: int, most: int) -> int:
    """Return an option's text as a whole number from `least` to `most`. Raises UsageError."""
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else least - 1
    if not least <= value <= most:
        why = f"it takes a whole number from {least} to {most}"
        raise UsageError(f"{label}={text[:40]} is not valid", why, f"{label}={least}")
    return value


def exit_code(program: Callable[[], object]) -> int:
    """Run `program`; return 0, or the code of the error that it raised, which is printed in three parts."""
    try:
        program()
    except KeyboardInterrupt:
        say("interrupted; the same command continues where it can")
        return INTERRUPTED
    except Exception as error:
        if (declared := declare(error)) is None:
            raise
        declared.fix = completed(declared.fix, shlex.join(sys.orig_argv))
        show_error(declared)
        return declared.exit_code
    return 0
