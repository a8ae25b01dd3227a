"""What the container is told by environment variables and file secrets; read strictly."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve.harmony import offline_environment
from serve.healthy import RUN
from sparkforge.errors import StorageError, UsageError
from validate.profiles import PROFILES

STRICT, WARN, OFF = "strict", "warn", "off"
TINY, TINY_ID = "tiny", "tiny-gpt-oss"
SECONDS = 600.0  # the whole validation: facts 8 s, torch and vLLM 240 s, numerics 180 s, and some air
# Validator's profile → its serve profile and its model unless told otherwise.
DEFAULTS = {"spark": ("safe", "/models/gpt-oss-120b"), "embedded": ("embedded", TINY)}
# What every server runs under; a variable that is set for the container wins.
STEADY = {
    **offline_environment(),  # the model lies on disk; a start must not wait for a network
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "spark_mxfp4",  # ours alone: another installed plugin is an input that nobody pinned
}


@dataclass(frozen=True)
class Secret:
    """A file secret: where it lies by default, which variable names another file, and how the server gets it."""

    name: str
    path: str
    variable: str
    target: str
    by_path: bool


SECRETS = (
    # The environment rather than --api-key: arguments can be read by everybody with `ps`.
    Secret("API key", "/run/secrets/api_key", "SPARKFORGE_API_KEY_FILE", "VLLM_API_KEY", by_path=False),
    Secret("Hugging Face token", "/run/secrets/hf_token", "SPARKFORGE_HF_TOKEN_FILE", "HF_TOKEN_PATH", by_path=True),
)


@dataclass(frozen=True)
class Settings:
    """The container's settings. `model` is a folder or `tiny`; `seconds` bounds the whole validation."""

    profile: str
    serve_profile: str
    mode: str
    seconds: float
    run: Path
    model: str
    model_id: str


def read(env: Mapping[str, str]) -> Settings:
    """Read the SPARKFORGE_ variables. Raises UsageError for a value that has no meaning."""
    profile = _one_of("SPARKFORGE_PROFILE", env.get("SPARKFORGE_PROFILE") or "spark", tuple(PROFILES))
    serve_profile, model = DEFAULTS[profile]
    model = env.get("SPARKFORGE_MODEL") or model
    return Settings(
        profile=profile,
        serve_profile=env.get("SPARKFORGE_SERVE_PROFILE") or serve_profile,
        mode=_one_of("SPARKFORGE_VALIDATE", env.get("SPARKFORGE_VALIDATE") or STRICT, (STRICT, WARN, OFF)),
        seconds=_seconds(env.get("SPARKFORGE_VALIDATE_SECONDS") or str(SECONDS)),
        run=Path(env.get("SPARKFORGE_RUN") or RUN),
        model=model,
        model_id=env.get("SPARKFORGE_MODEL_ID") or (TINY_ID if model == TINY else Path(model).name),
    )


def secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hand file secrets to the server. An empty file, or none at the usual place, is none.

    Raises StorageError for a secret that is there and cannot be read, or that was named and is not there: a server
    must not start without the key that it was meant to have.
    """
    found = {}
    for secret in SECRETS:
        path = Path(env.get(secret.variable) or secret.path)
        try:
            value = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError as error:
            if env.get(secret.variable):
                raise _unreadable(secret, path, error) from error
            continue
        except (OSError, ValueError) as error:
            raise _unreadable(secret, path, error) from error
        if value:
            found[secret.target] = str(path) if secret.by_path else value
    return found


def argument(words: Sequence[str], flag: str) -> str:
    """Return the value of `--flag VALUE` or `--flag=VALUE`, the last one, which wins; empty if there is none."""
    found = ""
    for word, behind in zip(words, (*words[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else behind
    return found


def port(text: str) -> int:
    """Return `text` as a port. Raises UsageError."""
    if text.isdecimal() and 0 < int(text) < 65536:
        return int(text)
    raise UsageError(f"--port {text!r} is no port", "ports are 1 to 65535", "leave --port out: it is 8000 in the image")


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


def _unreadable(secret: Secret, path: Path, error: Exception) -> StorageError:
    why = f"{getattr(error, 'strerror', None) or error} (running as uid {os.getuid()})"
    return StorageError(f"cannot read the {secret.name} in {path}", why, "chmod a+r the secret's file on the host")
