"""vLLM's flags: those that `./inv up` sets itself, those that take values, and the reading of argument lists.

Lists are read as by vLLM's own parser (vllm/utils/argparse_utils.py, FlexibleArgumentParser): underscores count as
hyphens, a prefix as the flag, `-tp` as its long form, and the last occurrence wins. This module imports only the
standard library and `core.errors`, because vLLM's process loads it.
"""

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
# vLLM's short forms (vllm/engine/arg_utils.py, vllm/entrypoints/launchers/cli_args.py); `-n2` is `-n 2`.
SHORT = {
    "-h": "--help", "-q": QUANTIZATION, "-n": "--nnodes", "-r": "--node-rank", "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size", "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank", "-dpl": "--data-parallel-size-local", "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port", "-dpb": "--data-parallel-backend", "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb", "-dpm": "--data-parallel-multi-port-external-lb",
    "-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel", "-sc": SPECULATION, "-dc": "--diffusion-config",
    "-cc": "--compilation-config", "-ac": "--attention-config", "-asc": "--api-server-count",
}  # fmt: skip
SWITCHES = ("--enable-", "--disable-", "--no-", "--enforce-eager", "--trust-remote-code", "--async-scheduling")


def split_flag(argument: str) -> tuple[str, str | None]:
    """Return the flag of an argument in its long form, with hyphens, and the value in the argument, if any."""
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        return name.replace("_", "-"), value if equals else None
    if name[:2] in SHORT and name[2:]:
        return SHORT[name[:2]], name[2:] + equals + value
    short = next((flag for flag in SHORT if len(name) > 1 and flag.startswith(name)), name)
    return SHORT.get(short, name), value if equals else None


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the last value of `flag`, after it or after an equals sign; None if it is missing or has no value."""
    value = None
    for index, argument in enumerate(arguments):
        name, inline = split_flag(argument)
        if name == flag:
            value = next(iter(arguments[index + 1 : index + 2]), None) if inline is None else inline
    return value


def meant(argument: str, flags: Iterable[str]) -> str:
    """Return the flag of `flags` that an argument means, abbreviated or not; empty for none."""
    name = split_flag(argument)[0]
    return next((flag for flag in flags if len(name) > 2 and flag.startswith(name)), "") if name[:2] == "--" else ""


def without_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """Return the arguments without `flag` and its values."""
    remaining, skip = list[str](), False
    for argument in arguments:
        name, inline = split_flag(argument)
        if skip:
            skip = False
        elif name == flag:
            skip = inline is None
        else:
            remaining.append(argument)
    return remaining


def taken(arguments: Sequence[str], flag: str) -> tuple[list[str], list[str]]:
    """Return all values of a flag that takes several, and the other arguments."""
    values, remaining, inside = list[str](), list[str](), False
    for argument in arguments:
        name, value = split_flag(argument) if argument.startswith("-") else ("", argument)
        inside = name == flag if name else inside
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
            flag, inline = split_flag(word)
            known = FLAGS.get(flag, VllmFlag(0 if flag.startswith(SWITCHES) else 1))
            free = 0 if inline is not None or flag == "--" else known.values
        elif free:
            free -= 1
            if free == 0 and not FLAGS.get(flag, VllmFlag()).is_path:
                words.append((word, flag))
        else:
            words.append((word, ""))
    return words


def passable(flags: Sequence[str], *, relative_to: str | None) -> tuple[str, ...]:
    """Return a user's flags as vLLM gets them. Raises UsageError for a flag that breaks a setting of `./inv up`.

    A value that begins with ./, ../ or ~/ is a path. It is made absolute from the folder `relative_to`, since vLLM runs
    in another folder; None, for a container with its own files, leaves it as it is.
    """
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]!r} is not a flag", "only vLLM's flags follow --", "./inv up -- --max-num-seqs 4")
    for word in flags:
        name, refused = word.partition("=")[0].replace("_", "-"), meant(word, REFUSED)
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
