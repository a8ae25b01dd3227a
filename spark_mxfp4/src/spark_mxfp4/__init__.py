"""MXFP4 numbers and mixture-of-experts kernels, usable from vLLM, transformers or alone.

Importing this package loads none of them. Each integration (`vllm`, `hf`, `max`) names a missing package in its error.
"""


def __getattr__(name: str) -> str:
    """Return `__version__`, read from the installed distribution, because only pyproject.toml states it."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - takes longer than all else here

    try:
        return version("spark-mxfp4")
    except PackageNotFoundError as error:  # a checkout that was never installed
        raise AttributeError(f"module {__name__!r} is not installed, so it has no {name}") from error
