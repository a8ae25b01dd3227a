"""The ground that every room stands on: errors, console, files, processes, paths. It imports none of them."""

__version__ = "0.1.0"
