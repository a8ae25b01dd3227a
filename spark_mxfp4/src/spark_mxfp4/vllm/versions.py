"""The releases of vLLM that the plugin supports. For other releases it raises an error that names the release."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata

import vllm

SUPPORTED = ("0.32.0", "0.33.0")  # also in pyproject.toml's extra `vllm` and the table of README.md
UNBUILT = "dev"  # the version in vllm/version.py of a checkout that was never built


def release() -> str:
    """Return vLLM's release without a local part (`+cpu`); for an unbuilt checkout, that of the installed package."""
    version: str = vllm.__version__
    if version == UNBUILT:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version("vllm")
    return version.partition("+")[0]


def refuse_other_releases() -> None:
    """Raise NotImplementedError unless the running vLLM is one of SUPPORTED."""
    if (version := release()) not in SUPPORTED:
        raise NotImplementedError(
            f"spark-mxfp4 does not support vLLM {version} · it supports {' and '.join(SUPPORTED)} · "
            f"pip install 'vllm=={SUPPORTED[-1]}', or leave the plugin out: VLLM_PLUGINS='' vllm serve …"
        )
