"""Dense layers and KV cache in fewer bits: the formats that a plan compares, and which of them a server is to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkforge.core.documents import DocumentError, parse_json
from sparkforge.core.vllm_flags import flag_value
from sparkforge.plan.architecture import BF16, DenseFormat

COMPARED = (
    BF16,
    DenseFormat("fp8", "bf16"),
    DenseFormat("fp8", "fp8"),
    DenseFormat("mxfp4", "fp8"),
    DenseFormat("mxfp4", "mxfp4"),
)
# vLLM's flag (vllm/config/quantization.py, QuantizationConfigArgs): its keys come behind a dot, or in its JSON. The LM
# head's is of our patch 0013.
CONFIG, LINEAR_KEY, HEAD_KEY = "--quantization-config", "linear", "lm_head"
# The variables of our plugin (spark_mxfp4.vllm.plugin), for --quantization spark-mxfp4.
LINEAR_VARIABLE, HEAD_VARIABLE = "SPARK_MXFP4_LINEAR", "SPARK_MXFP4_LM_HEAD"
# How the names of formats begin → the form as BITS has it. Others, such as int8, are counted as bf16.
NAMES = {"mxfp4": "mxfp4", "mxfp8": "mxfp8", "fp8": "fp8"}


def kv_type(arguments: Sequence[str]) -> str:
    """Return the type of the KV cache that a server's arguments ask for, a key of KV_BYTES."""
    return "fp8" if (flag_value(arguments, "--kv-cache-dtype") or "auto").startswith("fp8") else "bf16"


def dense_format(arguments: Sequence[str], variables: Mapping[str, str]) -> DenseFormat:
    """Return the formats of the dense layers that a server's arguments and environment variables ask for."""
    return DenseFormat(
        attention=_form(_chosen(variables, LINEAR_VARIABLE) or _named(arguments, LINEAR_KEY)),
        head=_form(_chosen(variables, HEAD_VARIABLE) or _named(arguments, HEAD_KEY)),
    )


def _chosen(variables: Mapping[str, str], name: str) -> str:
    """Return the plugin's format; empty for `bf16`, with which it leaves the layers to vLLM and its flag."""
    form = variables.get(name, "")
    return "" if form == BF16.attention else form


def _form(name: str) -> str:
    return next((form for begin, form in NAMES.items() if name.startswith(begin)), "bf16")


def _named(arguments: Sequence[str], key: str) -> str:
    """Return vLLM's name of the format behind `key`; empty for none, and for what its parser will refuse."""
    flag = f"{CONFIG}.{key}".replace("_", "-")  # as flag_value reads it
    if name := flag_value(arguments, flag) or flag_value(arguments, f"{flag}.weight"):
        return name
    try:
        config = parse_json(flag_value(arguments, CONFIG) or "{}", CONFIG)
    except DocumentError:
        return ""
    value = config.get(key) if isinstance(config, dict) else ""
    return str(value.get("weight") if isinstance(value, dict) else value)
