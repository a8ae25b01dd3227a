"""Reproducible builds of vLLM and gpt-oss for NVIDIA DGX Spark; docs/concepts/architecture.md shows the packages."""

import tomllib
from pathlib import Path


def _version() -> str:
    """Return the version in pyproject.toml, or in the metadata of an installed copy, which has no pyproject.toml."""
    try:
        text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        from importlib import metadata  # noqa: PLC0415 - 40 ms, which a checkout need not pay

        try:
            return metadata.version("sparkforge")
        except metadata.PackageNotFoundError:
            return "unknown"
    return str(tomllib.loads(text)["project"]["version"])


__version__ = _version()
