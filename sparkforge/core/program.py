"""Programs that run without `./inv`: their arguments and errors end as those of its commands do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from sparkforge.core.console import say, show_error
from sparkforge.core.declare import declare
from sparkforge.core.errors import UsageError

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError("the arguments cannot be read", message, f"{self.prog} --help")


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
        show_error(declared)
        return declared.exit_code
    return 0
