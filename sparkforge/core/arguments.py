"""Reads or removes a flag in a list of vLLM's arguments, as its own parser would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def meant(argument: str, flags: Iterable[str]) -> str:
    """Return which of `flags` vLLM reads an argument as; empty for none.

    Its parser takes underscores for hyphens, and the beginning of a flag for the flag, as far as no other begins so.
    """
    name = argument.partition("=")[0].replace("_", "-")
    return next((flag for flag in flags if len(name) > 2 and flag.startswith(name)), "") if name[:2] == "--" else ""


def without_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """Return a list of arguments without `flag` and its values."""
    remaining, skip = list[str](), False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if skip:
            skip = False
        elif name.replace("_", "-") == flag:
            skip = not equals
        else:
            remaining.append(argument)
    return remaining
