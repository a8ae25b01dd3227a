"""The commands for Invoke itself (`invoke --list` in this folder). Run them with `./inv`."""

import sys

try:
    from sparkforge.cli import namespace
except ModuleNotFoundError as error:  # the Invoke of another environment
    from sparkforge.core.errors import ProcessError

    print(
        "✗ Invoke cannot load the commands [process.setup]\n"
        f"  why:  its Python environment lacks {error.name}\n"
        "  next: ./inv --list, which makes an environment of its own",
        file=sys.stderr,
    )
    sys.exit(ProcessError.exit_code)

__all__ = ["namespace"]
