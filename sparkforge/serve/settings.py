"""The container's settings: environment variables and file secrets, read strictly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.errors import InputError, StorageError, UsageError
from sparkforge.serve import access, profiler
from sparkforge.serve.health import RUN
from validate.profiles import PROFILES

STRICT, WARN, OFF = "strict", "warn", "off"
TINY, TINY_ID = "tiny", "tiny-gpt-oss"
HF_TOKEN, HF_TOKEN_FILE = "/run/secrets/hf_token", "SPARKFORGE_HF_TOKEN_FILE"  # a file; what names another one
SECONDS = 600.0  # the whole validation: facts 8 s, torch and vLLM 240 s, numerics 180 s, and some air
# The validator's profile → serve profile and model by default.
DEFAULTS = {"spark": ("safe", "/models/gpt-oss-120b"), "embedded": ("embedded", TINY)}


@dataclass(frozen=True)
class Settings:
    """The container's settings. `model` is a folder or `tiny`; `seconds` bounds the whole validation.

    `stack` is the image's; empty outside one. `traces` is where vLLM's profiler writes; empty for no profiler.
    `arguments` are those of vLLM that variables ask for.
    """

    stack: str
    profile: str
    serve_profile: str
    mode: str
    seconds: float
    run: Path
    model: str
    model_id: str
    traces: str = ""
    arguments: tuple[str, ...] = ()


def read(env: Mapping[str, str]) -> Settings:
    """Read the SPARKFORGE_ variables. Raises UsageError for a value that has no meaning."""
    profile = _one_of("SPARKFORGE_PROFILE", env.get("SPARKFORGE_PROFILE") or "spark", tuple(PROFILES))
    serve_profile, model = DEFAULTS[profile]
    model, traces = env.get("SPARKFORGE_MODEL") or model, env.get(profiler.VARIABLE) or ""
    if traces and not traces.startswith("/"):
        why, fix = "it must be a folder's whole path", f"{profiler.VARIABLE}={profiler.IN_CONTAINER}"
        raise UsageError(f"{profiler.VARIABLE} is {traces!r}", why, fix)
    return Settings(
        profile=profile,
        stack=env.get("SPARKFORGE_STACK") or "",
        serve_profile=env.get("SPARKFORGE_SERVE_PROFILE") or serve_profile,
        mode=_one_of("SPARKFORGE_VALIDATE", env.get("SPARKFORGE_VALIDATE") or STRICT, (STRICT, WARN, OFF)),
        seconds=_seconds(env.get("SPARKFORGE_VALIDATE_SECONDS") or str(SECONDS)),
        run=Path(env.get("SPARKFORGE_RUN") or RUN),
        model=model,
        model_id=env.get("SPARKFORGE_MODEL_ID") or (TINY_ID if model == TINY else Path(model).name),
        traces=traces,
        arguments=arguments(env, "SPARKFORGE_"),
    )


def arguments(env: Mapping[str, str], prefix: str = "") -> tuple[str, ...]:
    """Return vLLM's arguments for the gpt-oss competition's variables TP and MAX_MODEL_LEN, their names after `prefix`.

    A variable that is empty or not there leaves the serve profile's. Raises UsageError for one that is no number.
    """
    flags = {"TP": "--tensor-parallel-size", "MAX_MODEL_LEN": "--max-model-len"}
    numbers = {name: env.get(f"{prefix}{name}", "") for name in flags}
    for name, text in numbers.items():
        if text and not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
            why = "it must be a whole number above 0"
            raise UsageError(f"{prefix}{name} is {text[:40]!r}", why, f"unset {prefix}{name}")
    return tuple(f"{flags[name]}={int(text)}" for name, text in numbers.items() if text)


def checkpoint(model: str, folder: str) -> str:
    """Return the folder that the competition's variable MODEL names: `folder`, if it is one, or a fetched repository.

    An empty `model` stays empty. Raises InputError for a repository that was not fetched.
    """
    if not model or Path(folder).is_dir():
        return folder
    fetched = paths.ROOT / "models" / Path(model).name  # where model.fetch writes
    if not fetched.is_dir():
        fix = f"./inv model.fetch {model}; or unset MODEL"
        raise InputError(f"MODEL={model} is not here", f"there is no folder {fetched}", fix, code="input.model")
    return str(fetched)


def secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hand file secrets to the server.

    Raises StorageError for a secret that is there and cannot be read, or that was named and is not there, and for an
    API key's file without a key: a server must not start without the key that it was meant to have. An empty token is
    none.
    """
    key, path = access.configured_key(env)
    variables = access.variables(key, str(path)) if key else {}
    path = Path(env.get(HF_TOKEN_FILE) or HF_TOKEN)
    try:
        if path.read_text(encoding="utf-8").strip():
            variables["HF_TOKEN_PATH"] = str(path)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not env.get(HF_TOKEN_FILE):
            return variables
        why = f"{getattr(error, 'strerror', None) or error} (running as uid {os.getuid()})"
        fix = "chmod a+r the secret's file on the host"
        raise StorageError(f"cannot read the Hugging Face token in {path}", why, fix, code="storage.access") from error
    return variables


def _one_of(variable: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageError(f"{variable} is {value!r}", f"it must be {' or '.join(known)}", f"{variable}={known[0]}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86400:
        raise UsageError(
            f"SPARKFORGE_VALIDATE_SECONDS is {text!r}",
            "it must be a number of seconds above 0",
            f"unset it ({SECONDS:g})",
        )
    return value
