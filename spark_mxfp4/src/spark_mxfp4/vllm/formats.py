"""The formats of attention's projections and the LM head that a user sets in the environment."""

from __future__ import annotations

import os

LINEAR_VARIABLE, HEAD_VARIABLE = "SPARK_MXFP4_LINEAR", "SPARK_MXFP4_LM_HEAD"
AS_STORED = "bf16"
FORMATS = (AS_STORED, "fp8", "mxfp8", "mxfp4")  # kernels.linear.Format has all except the first


def chosen(variable: str) -> str:
    """Return the format in the environment variable `variable`, else `bf16`. Raises ValueError for another value."""
    name = os.environ.get(variable) or AS_STORED
    if name not in FORMATS:
        raise ValueError(f"{variable} is {name!r} · it must be one of {', '.join(FORMATS)} · set or unset it")
    return name
