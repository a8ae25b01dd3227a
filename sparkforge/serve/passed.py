"""What a user passes to vLLM through `./inv up`: an address, a context length, and flags behind `--`.

A flag that would move the server away from its address, from its guard, or from what its start proves is refused with
the option that does it right. Every other flag comes behind the profile's and wins over it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkforge.core.arguments import flag_value, meant
from sparkforge.core.console import say
from sparkforge.core.errors import UsageError
from sparkforge.serve import profiles
from sparkforge.serve.plan import LOOPBACK
from sparkforge.serve.profiles import ServeProfile

CONTEXT, CONTEXT_VARIABLE = "--max-model-len", "MAX_MODEL_LEN"
CHECKPOINTS = "mxfp4"  # vLLM's name of gpt-oss's own format
QUANTIZATION, OURS = "--quantization", "spark-mxfp4"  # OURS is also the profile with our experts on a GPU
KERNEL_VARIABLE = "SPARK_MXFP4_KERNEL"  # as spark_mxfp4.registry has it, which imports torch
_NAME = "the start's proof and our commands ask by that name"
_HTTP = "the start's proof and our commands speak HTTP to the address"
_GUARD = "the guard, which checks keys and host names, must stand in front"
_TOOLS = "the start's proof calls a tool"
# Flag → why it is refused, and what to do instead (vllm/entrypoints/launchers/cli_args.py, 0.32.0).
RESERVED: Mapping[str, tuple[str, str]] = {
    "--host": ("./inv up sets it, and asks for a key where others reach it", "./inv up --host ADDRESS"),
    "--port": ("./inv up sets it", "./inv up --port N"),
    "--model": ("./inv up sets it, and validates that model", "./inv up --model FOLDER"),
    "--api-key": ("arguments can be read by every user of the machine", "./inv up --api-key-file FILE"),
    "--hf-token": ("arguments can be read by every user of the machine", "hf auth login"),
    "--served-model-name": (_NAME, "name the model's folder so, then ./inv up --model FOLDER"),
    "--middleware": (_GUARD, "run a proxy of yours in front"),
    "--root-path": (_GUARD, "run a proxy of yours in front"),
    "--uds": (_HTTP, "./inv up --host ADDRESS"),
    "--ssl-keyfile": (_HTTP, "docs/guide/docker.md, access from another machine"),
    "--ssl-certfile": (_HTTP, "docs/guide/docker.md, access from another machine"),
    "--ssl-ca-certs": (_HTTP, "docs/guide/docker.md, access from another machine"),
    "--grpc": (_HTTP, "leave it out"),
    "--headless": ("it serves no API", "leave it out"),
    "--config": ("a file could set any of the flags that ./inv up sets", "write its flags behind --"),
    "--tool-call-parser": (_TOOLS, "leave it out"),
    "--no-enable-auto-tool-choice": (_TOOLS, "leave it out"),
    "--enable-scale-out": ("it opens routes that move the engine's cache", "leave it out"),
}


def address(host: str, key_file: str | None) -> str:
    """Return the IP address that `host` names; empty means loopback. Raises UsageError.

    `key_file` is that of the API key: an address that other machines reach needs one.
    """
    try:
        ip = ipaddress.ip_address({"": LOOPBACK, "localhost": LOOPBACK}.get(host, host))
    except ValueError:
        why = "it takes an address of this machine, such as 127.0.0.1 or 192.168.1.20; 0.0.0.0 is all of them"
        raise UsageError(f"--host {host[:80]!r} is no IP address", why, "hostname -I") from None
    if not ip.is_loopback and not key_file:
        why = "other machines reach that address, and without a key everybody there may use the server"
        raise UsageError(f"--host {ip} needs --api-key-file", why, f"./inv up --host {ip} --api-key-file FILE")
    return str(ip)


def with_context(environment: Mapping[str, str], context: str, flags: Sequence[str]) -> dict[str, str]:
    """Return the environment with --context in MAX_MODEL_LEN. Raises UsageError for a conflict with `flags`."""
    if not context:
        return dict(environment)
    if not (context.isascii() and context.isdecimal() and len(context) < 10 and int(context)):
        raise UsageError(
            f"--context {context[:40]!r} is no length", "it takes tokens, above 0", "./inv up --context 8192"
        )
    if (value := flag_value(flags, CONTEXT)) is not None:
        raise UsageError(
            f"--context {context} and {CONTEXT} {value}", "they set the same length", "leave one of them out"
        )
    return {**environment, CONTEXT_VARIABLE: context}


def with_quantization(
    quantization: str, profile: str, flags: Sequence[str], *, gpu: bool, stack: str = ""
) -> tuple[str, tuple[str, ...]]:
    """Return the profile and vLLM's flags that --quantization asks for; those that are there if it is empty.

    mxfp4 is what the checkpoint is already, so it changes nothing, as in a container (entrypoint.py). spark-mxfp4
    stands for the profile of that name, or without a GPU for `embedded`, which has our experts already; beside a
    profile it is vLLM's flag, behind the profile's. Raises UsageError for another name, beside the flag itself, and
    beside a profile that leaves the experts to vLLM.
    """
    if quantization in ("", CHECKPOINTS):
        return profile, tuple(flags)
    if quantization != OURS:
        why = (
            f"it takes {OURS}, our experts, or {CHECKPOINTS}, what the checkpoint is; vLLM's other ways stand behind --"
        )
        fix = f"./inv up --quantization {OURS}; or: ./inv up -- {QUANTIZATION} {quantization[:40]}"
        raise UsageError(f"--quantization {quantization[:40]!r} is not known", why, fix)
    short = next((word for word in flags if word.startswith("-q")), None)  # vLLM's short form: -q NAME, -qNAME
    if short or flag_value(flags, QUANTIZATION) is not None:
        why = "they choose the same"
        raise UsageError(f"{short or QUANTIZATION} stands behind -- too", why, "leave one of them out")
    if profile:
        require_our_experts(profile, stack)
        return profile, (*flags, f"{QUANTIZATION}={OURS}")
    return OURS if gpu else "embedded", tuple(flags)


def require_our_experts(profile: str, stack: str = "") -> None:
    """Raise UsageError for a profile that leaves the experts to vLLM; an unknown one is refused where it is read."""
    known = profiles.load(stack=stack)
    if profile in known and known[profile].variables().get(KERNEL_VARIABLE) == "vllm":
        why = f"it sets {KERNEL_VARIABLE}=vllm: our plugin computes its dense layers, and vLLM the experts"
        fix = f"leave one of them out; our experts: ./inv up {QUANTIZATION} {OURS}"
        raise UsageError(f"{QUANTIZATION} {OURS} has no effect beside --profile {profile}", why, fix)


def checked(flags: Sequence[str], *, relative_to: str | None) -> tuple[str, ...]:
    """Return vLLM's flags as it gets them. Raises UsageError for one that it must not get.

    A value that begins with ./, ../ or ~ is a path: below the folder `relative_to`, if one is named, it becomes
    absolute, since vLLM runs in another folder. A container has its own files.
    """
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]!r} is no flag", "behind -- stand flags of vLLM", "./inv up -- --max-num-seqs 4")
    for word in flags:
        name = flag_name(word)
        reserved = meant(word, RESERVED)
        if word == "--" or reserved:
            why, fix = RESERVED.get(reserved, ("one -- is enough", "./inv up -- FLAGS"))
            meaning = f", which vLLM reads as {reserved}," if reserved not in {"", name} else ""
            raise UsageError(f"{name}{meaning} cannot be passed to vLLM", why, fix)
    return tuple(_absolute(word, relative_to) if relative_to else word for word in flags)


def flag_name(word: str) -> str:
    """Return the flag of an argument as vLLM's parser reads it: without its value, with dashes."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _absolute(word: str, folder: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if value.startswith(("./", "../", "~/")):
        value = str((Path(folder) / Path(value).expanduser()).resolve())
    return f"{flag}{equals}{value}"


def say_replaced(flags: Sequence[str], profile: ServeProfile) -> None:
    """Say which of a profile's flags a user's flags take the place of."""
    for word in flags:
        name = flag_name(word)
        profile_flag = next((flag for flag in profile.flags if name in {flag, flag.replace("--", "--no-", 1)}), "")
        if profile_flag:
            value = f" ({profile.flags[profile_flag].value})" if profile.flags[profile_flag].value != "" else ""
            say(f"{word.partition('=')[0]} takes the place of the profile's {profile_flag}{value}")
