"""Reads the value of a flag in a list of vLLM's arguments, as its own parser would."""

from __future__ import annotations

from collections.abc import Sequence


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the value of `flag` (such as "--port") in a list of arguments; None if it is not there or has no value.

    A value follows its flag or an equals sign. The last occurrence wins, and vLLM reads `--max_model_len` as
    `--max-model-len` (vllm/utils/argparse_utils.py, FlexibleArgumentParser).
    """
    value = None
    for index, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        if name.replace("_", "-") == flag:
            value = inline if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return value
