"""The commands for Invoke itself: `invoke --list` in this folder; `./inv` is the way to run them."""

from sparkforge.cli import namespace

__all__ = ["namespace"]
