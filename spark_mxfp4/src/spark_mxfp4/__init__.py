"""MXFP4 numbers and mixture-of-experts kernels, usable from vLLM, transformers or alone.

Importing it imports nothing else. Each integration (`vllm`, `hf`, `max`) names the package that it misses.
"""


def __getattr__(name: str) -> str:
    """Return `__version__`: the installed distribution's, whose one home is pyproject.toml."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - takes longer than all else here

    try:
        return version("spark-mxfp4")
    except PackageNotFoundError as error:  # a checkout that was never installed
        raise AttributeError(f"module {__name__!r} is not installed, so it has no {name}") from error
