"""vLLM's flags: which ones `./inv up` sets itself, which take values, and how a list of arguments is read.

It reads a list as vLLM's own parser does (vllm/utils/argparse_utils.py, FlexibleArgumentParser): underscores stand for
hyphens, the beginning of a flag for the flag, and the last occurrence wins. It imports the standard library and
`core.errors` only: vLLM's process loads it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.errors import UsageError

MODEL, REVISION, HOST, PORT = "--model", "--revision", "--host", "--port"
QUANTIZATION, CONTEXT = "--quantization", "--max-model-len"
SPECULATION = "--speculative-config"
SHARE = "--gpu-memory-utilization"
HEADLESS = "--headless"  # a worker of another machine's server, without an API
NAMES = "--served-model-name"


@dataclass(frozen=True)
class VllmFlag:
    """A row of vllm_flags.toml: how many values a flag takes, whether they are paths, and why a user may not pass it.

    `instead` is the command to use; both texts are empty for a flag that anybody may pass.
    """

    values: float = 1
    is_path: bool = False
    refusal: str = ""
    instead: str = ""


KEY_FIX = "(umask 077; openssl rand -hex 32 > key) && ./inv up --api-key-file key"
FLAGS = {
    name: VllmFlag(**row) for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
REFUSED = tuple(name for name, flag in FLAGS.items() if flag.refusal)
SWITCHES = ("--enable-", "--disable-", "--no-", "--enforce-eager", "--trust-remote-code", "--async-scheduling")


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the last value of `flag`, behind it or behind an equals sign; None if it is not there or has none."""
    value = None
    for index, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        if name.replace("_", "-") == flag:
            value = inline if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return value


def flag_of(argument: str) -> str:
    """Return the flag of an argument: without its value, with hyphens."""
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def meant(argument: str, flags: Iterable[str]) -> str:
    """Return the one of `flags` that an argument means, abbreviated or not; empty for none."""
    name = flag_of(argument)
    return next((flag for flag in flags if len(name) > 2 and flag.startswith(name)), "") if name[:2] == "--" else ""


def without_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """Return the arguments without `flag` and its values."""
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


def taken(arguments: Sequence[str], flag: str) -> tuple[list[str], list[str]]:
    """Return all values of a flag that takes several, and the other arguments."""
    values, remaining, inside = list[str](), list[str](), False
    for argument in arguments:
        inside = flag_of(argument) == flag if argument.startswith("-") else inside
        value = argument.partition("=")[2] if argument.startswith("-") else argument
        if not inside:
            remaining.append(argument)
        elif value:
            values.append(value)
    return values, remaining


def positional(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the words that may be the model, each with the flag before it ("" if none).

    A flag that takes several values takes all words up to the next flag. If a flag takes one value and that value is
    not a path, the word may be the value or the model, so it is returned with its flag.
    """
    words, flag, free = list[tuple[str, str]](), "", 0.0
    for word in arguments:
        if word.startswith("-") and word != "-":
            flag = flag_of(word)
            known = FLAGS.get(flag, VllmFlag(0 if flag.startswith(SWITCHES) else 1))
            free = 0 if "=" in word or flag == "--" else known.values
        elif free:
            free -= 1
            if free == 0 and not FLAGS.get(flag, VllmFlag()).is_path:
                words.append((word, flag))
        else:
            words.append((word, ""))
    return words


def passable(flags: Sequence[str], *, relative_to: str | None) -> tuple[str, ...]:
    """Return a user's flags as vLLM gets them. Raises UsageError for one that would break what `./inv up` sets.

    A value that begins with ./, ../ or ~ is a path: below the folder `relative_to`, if one is named, it becomes
    absolute, since vLLM runs in another folder. A container has its own files.
    """
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]!r} is no flag", "only flags of vLLM may follow --", "./inv up -- --max-num-seqs 4")
    for word in flags:
        name, refused = flag_of(word), meant(word, REFUSED)
        if word == "--":
            raise UsageError("-- cannot be passed to vLLM", "one -- is enough", "./inv up -- FLAGS")
        if refused:
            meaning = f", which vLLM reads as {refused}," if refused != name else ""
            flag = FLAGS[refused]
            raise UsageError(f"{name}{meaning} cannot be passed to vLLM", flag.refusal, flag.instead)
    return tuple(_absolute(word, relative_to) if relative_to else word for word in flags)


def _absolute(word: str, folder: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if value.startswith(("./", "../", "~/")):
        value = str((Path(folder) / Path(value).expanduser()).resolve())
    return f"{flag}{equals}{value}"
