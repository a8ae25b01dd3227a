"""The container's settings: environment variables and file secrets, read strictly."""

import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge import pins
from sparkforge.core import gpus, paths
from sparkforge.core.errors import InputError, StorageError, UsageError
from sparkforge.core.process import ProbeError
from sparkforge.core.vllm_flags import CONTEXT, MODEL, flag_value, passable
from sparkforge.models import local
from sparkforge.plan import families, thresholds
from sparkforge.serve import access, command_line, limits, profiles
from sparkforge.serve.health import RUN
from sparkforge.serve.record import StartPlan

STRICT, WARN, OFF = "strict", "warn", "off"
EXIT, HOLD = "exit", "hold"  # what a container does after a failed validation
FAMILY = families.load()[families.default()]
TINY, TINY_ID = "tiny", FAMILY.tiny
HF_TOKEN, HF_TOKEN_FILE = "/run/secrets/hf_token", "SPARKFORGE_HF_TOKEN_FILE"  # the file; its variable
SECONDS = 800.0  # the whole validation: facts 8 s, torch and vLLM 240 s, numerics and layers 180 s each, and a margin
VLLM_ARGS = "VLLM_ARGS"  # vLLM's flags, quoted as in a shell; not a variable of vLLM's own
CONTEXT_VARIABLE = "MAX_MODEL_LEN"
# Variables whose names the gpt-oss competition defined → vLLM's flags.
NUMBERS = {"TP": "--tensor-parallel-size", CONTEXT_VARIABLE: CONTEXT}
# The validator's profile → serve profile and model by default.
DEFAULTS = {"spark": ("safe", f"/models/{FAMILY.served}"), "embedded": ("embedded", TINY)}
STACK, SERVE_PROFILE = "SPARKFORGE_STACK", "SPARKFORGE_SERVE_PROFILE"
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
CHOICES = {name: tuple(map(str, values)) for name, values in _TABLES["choices"].items()}  # the default first
FORMS: dict[str, list[str]] = _TABLES["forms"]  # variable → the form of its value, the form in words, and an example


@dataclass(frozen=True)
class Settings:
    """The container's settings. `model` is a folder, OWNER/NAME or `tiny`; `seconds` bounds the whole validation.

    `stack` is the image's; empty outside one. `traces` is where vLLM's profiler writes. `arguments` are vLLM's, from
    variables. `bind` is the address on which the host publishes the server.
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
    refused: str = EXIT
    bind: str = ""


def one_of(env: Mapping[str, str], variable: str) -> str:
    """Return the value of a variable of CHOICES, by default its first choice. Raises UsageError for any other value."""
    values = CHOICES[variable]
    if (value := env.get(variable) or values[0]) not in values:
        why = f"it must be {' or '.join(values)}"
        raise UsageError(f"{variable} is {value[:40]!r}", why, f"{variable}={values[0]}")
    return value


def judge(env: Mapping[str, str]) -> None:
    """Raise UsageError for the first variable whose value is invalid on every device. Call it before any change."""
    for name in CHOICES:
        one_of(env, name)
    for name, (form, what, example) in FORMS.items():
        if (value := env.get(name)) and not re.fullmatch(form, value):
            raise UsageError(f"{name} is {value[:40]!r}", f"it must be {what}", f"{name}={example}")
    try:
        thresholds.configured(env)
    except ValueError as error:  # the server would run without a guard
        fix = f"{thresholds.VARIABLE}=3, or 0 for no guard"
        raise UsageError(f"{thresholds.VARIABLE} is invalid", str(error), fix) from error
    limits.read(env)
    for prefix in ("", "SPARKFORGE_"):
        arguments(env, prefix)
    vllm_args(env)
    access.chosen_hosts((), env)
    if address := env.get(access.BIND):
        access.require_key(address, "any")
    stack, table = env.get(STACK) or "", pins.load()
    if stack and stack not in table.stacks:
        fix = f"{STACK}={table.default}"
        raise UsageError(f"{STACK} is {stack[:40]!r}", f"pins.toml has {', '.join(table.stacks)}", fix)
    if (profile := env.get(SERVE_PROFILE)) and profile not in (known := profiles.load(stack=stack)):
        why, fix = f"choose from {', '.join(known)}", f"{SERVE_PROFILE}=safe"
        raise UsageError(f"{SERVE_PROFILE} is {profile[:40]!r}", why, fix)


def read(env: Mapping[str, str]) -> Settings:
    """Read the SPARKFORGE_ variables.

    Raises UsageError for an invalid value, and for a serve profile that needs a GPU if SPARKFORGE_PROFILE is embedded.
    """
    judge(env)
    profile, stack = one_of(env, "SPARKFORGE_PROFILE"), env.get(STACK) or ""
    serve_profile, model = DEFAULTS[profile]
    serve_profile, model = env.get(SERVE_PROFILE) or serve_profile, env.get("SPARKFORGE_MODEL") or model
    known = profiles.load(stack=stack)
    if profile == "embedded" and known[serve_profile].device != "embedded":
        own = ", ".join(name for name, settings in known.items() if settings.device == "embedded")
        why, fix = f"without a GPU this stack has {own}", f"{SERVE_PROFILE}=embedded"
        raise UsageError(f"the serve profile {serve_profile} needs a GPU", why, fix)
    return Settings(
        profile=profile,
        stack=stack,
        serve_profile=serve_profile,
        mode=one_of(env, "SPARKFORGE_VALIDATE"),
        seconds=float(env.get("SPARKFORGE_VALIDATE_SECONDS") or SECONDS),
        run=Path(env.get("SPARKFORGE_RUN") or RUN),
        model=model,
        model_id=env.get("SPARKFORGE_MODEL_ID") or served_id(model),
        traces=env.get(command_line.PROFILER) or "",
        arguments=(*arguments(env, "SPARKFORGE_"), *vllm_args(env)),
        refused=one_of(env, "SPARKFORGE_REFUSED"),
        bind=env.get(access.BIND) or "",
    )


def served_id(model: str) -> str:
    """Return a model's default name in the API: a repository's, as with `vllm serve`, or a folder's."""
    if model == TINY:
        return TINY_ID
    return model if local.REPOSITORY.fullmatch(model) else local.name_of(Path(model))


def vllm_args(env: Mapping[str, str]) -> list[str]:
    """Return vLLM's arguments in VLLM_ARGS, split as a shell would. Raises UsageError if that fails."""
    try:
        split = shlex.split(env.get(VLLM_ARGS) or "")
    except ValueError as error:
        raise UsageError(f"{VLLM_ARGS} cannot be read", str(error), f"{VLLM_ARGS}='--max-num-seqs 8'") from error
    if flag_value(split, MODEL) is not None:
        raise UsageError(f"{VLLM_ARGS} names a model", "the model is a setting of its own", "SPARKFORGE_MODEL=…")
    return split


def with_variables(plan: StartPlan, env: Mapping[str, str]) -> StartPlan:
    """Return the plan with the variables of model, name and flags applied. Raises UsageError or InputError."""
    folder = env.get("INV_CWD") or str(Path.cwd())  # the caller's
    named = env.get("SPARKFORGE_MODEL") or TINY
    model = plan.model or ("" if named == TINY else checkpoint(named, str(Path(folder) / paths.typed(named))))
    flags = passable(vllm_args(env), relative_to=folder)
    model_id = plan.model_id or env.get("SPARKFORGE_MODEL_ID", "")
    return replace(plan, model=model, model_id=model_id, flags=(*flags, *plan.flags))


def arguments(env: Mapping[str, str], prefix: str = "") -> tuple[str, ...]:
    """Return vLLM's arguments for TP and MAX_MODEL_LEN, whose names follow `prefix`. Raises UsageError."""
    numbers = {name: env.get(f"{prefix}{name}", "") for name in NUMBERS}
    for name, text in numbers.items():
        if text and not _is_count(text):
            why = "it must be a whole number above 0"
            raise UsageError(f"{prefix}{name} is {text[:40]!r}", why, f"unset {prefix}{name}")
    return tuple(f"{NUMBERS[name]}={int(text)}" for name, text in numbers.items() if text)


def require_gpus(count: str) -> None:
    """Raise UsageError if `count` (TP) is more than nvidia-smi lists; later checks report a missing GPU."""
    with suppress(ProbeError):
        if 1 < (wanted := int(count or 1)) > (present := len(gpus.query("name", env=os.environ))):
            why = f"it is the number of GPUs that share the model, and nvidia-smi lists {present}"
            raise UsageError(f"TP={wanted} is too many", why, f"TP={present} ./inv up")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0


def with_context(environment: Mapping[str, str], context: str, flags: Sequence[str]) -> dict[str, str]:
    """Return the environment with --context in MAX_MODEL_LEN. Raises UsageError for a conflict with `flags`."""
    if not context:
        return dict(environment)
    if not _is_count(context):
        fix = "./inv up --context 8192"
        raise UsageError(f"--context {context[:40]!r} is not a length", "it must be a number of tokens above 0", fix)
    if (value := flag_value(flags, CONTEXT)) is not None:
        failure = f"--context {context} and {CONTEXT} {value}"
        raise UsageError(failure, "they set the same length", "without --context")
    return {**environment, CONTEXT_VARIABLE: context}


def family(model: str) -> str:
    """Return the family of the checkpoint in a folder.

    Return the default family if no folder is given, or if its family is unknown; then a later check refuses it.
    """
    with suppress(InputError, StorageError):
        return local.family_of(paths.typed(model).absolute()) if model else families.default()
    return families.default()


def checkpoint(model: str, folder: str) -> str:
    """Return a checkpoint's folder: `folder` or that of a repository. Raises InputError or StorageError."""
    if not model or Path(folder).is_dir() or not local.REPOSITORY.fullmatch(model):
        return folder
    return str(local.find(model, os.environ))


def secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hand file secrets to the server; an empty token counts as none.

    Raises StorageError for a secret that cannot be read or was named and is missing, and for a file without an API key.
    """
    key, key_file = access.configured_key(env)
    variables = access.variables(key, str(key_file)) if key else {}
    path = Path(env.get(HF_TOKEN_FILE) or HF_TOKEN)
    try:
        if path.read_text(encoding="utf-8").strip():
            variables["HF_TOKEN_PATH"] = str(path)
    except (OSError, ValueError) as error:
        if env.get(HF_TOKEN_FILE) or not isinstance(error, FileNotFoundError):
            failure = f"cannot read the Hugging Face token in {path}"
            why = f"{getattr(error, 'strerror', None) or error} (running as uid {os.getuid()})"
            fix = f"chmod a+r {path}   # on the host: the secret's file"
            raise StorageError(failure, why, fix, code="storage.access") from error
    return variables
