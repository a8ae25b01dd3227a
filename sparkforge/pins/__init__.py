"""Every external input by version and hash: pins.toml, lock files, the package index, Debian packages."""

from sparkforge.pins.table import Component, EnvironmentPin, GitSource, Pins, Stack, StackImage, TextPin, load

__all__ = ["Component", "EnvironmentPin", "GitSource", "Pins", "Stack", "StackImage", "TextPin", "load"]
