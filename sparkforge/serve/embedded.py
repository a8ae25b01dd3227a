"""Serve on the embedded device: the model on disk, the validator, then vLLM's API server."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparkforge import environments
from sparkforge.core import paths
from sparkforge.core.console import Steps, say
from sparkforge.core.errors import InputError, RefusalError, UsageError
from sparkforge.core.files import write_json
from sparkforge.core.process import TAIL_LINES, run
from sparkforge.environments import Environment
from sparkforge.serve import access, command_line, known_good, launch, limits, profiler, profiles, proof, settings
from sparkforge.serve.command_line import ServerCommand, served_name
from sparkforge.serve.launch import LOOPBACK, Launch
from sparkforge.serve.profiles import ServeProfile
from sparkforge.serve.record import Server
from sparkforge.serve.settings import TINY_ID
from validate.checks.arguments import missing_on_cpu
from validate.facts.machine import cpu_flags
from validate.facts.target import Options, Target

DEVICE = "embedded"  # also the name of its first profile

# Below site-packages: what vLLM's CPU build preloads.
PRELOADED = ("vllm/libs/libtcmalloc*.so*", "torch/lib/libgomp*.so*")


@dataclass(frozen=True)
class Access:
    """Who may ask the server: the API key with its file, both empty for none, and further names of this host."""

    key_file: str = ""
    key: str = field(default="", repr=False)
    hosts: tuple[str, ...] = ()


def check(model: str, profile: str, key_file: str | None = None, allow_hosts: str = "") -> Access:
    """Check the arguments before minutes go into an environment; return who may ask the server.

    Raises UsageError, InputError, or StorageError for a key file that `access.read_key` refuses.
    """
    require_processor(profile_named(profile), profile)
    if model:
        served_name(paths.typed(model).absolute())
    access.refuse_inherited_key(os.environ)
    settings.require_guard(os.environ)
    limits.read(os.environ)
    hosts = tuple(access.named_hosts(allow_hosts or os.environ.get(access.HOSTS, "")))
    path = access.key_path(key_file)
    return Access(str(path), access.read_key(path), hosts) if path else Access(hosts=hosts)


def profile_named(name: str) -> ServeProfile:
    """Return the device's profile of that name, by default `embedded`. Raises UsageError for one of another device."""
    profile = profiles.named(name or DEVICE)
    if profile.device != DEVICE:
        own = ", ".join(name for name, settings in profiles.load().items() if settings.device == DEVICE)
        fix = f"./inv up --device docker --profile {name}"
        raise UsageError(f"--profile {name} is for containers", f"the embedded device has {own}", fix)
    return profile


def require_processor(profile: ServeProfile, name: str) -> None:
    """Raise UsageError if this machine's processor lacks what the profile's flags need on vLLM's CPU build."""
    if missing := missing_on_cpu(profile.arguments(), platform.machine(), cpu_flags(Target(Options(), ""))):
        raise UsageError(f"--profile {name} cannot be served by this processor", missing, "./inv up --profile embedded")


def environment_of(profile: ServeProfile) -> dict[str, str]:
    """Return the variables that the validator and the server get with a profile."""
    return {
        **command_line.ENVIRONMENT,
        **profile.variables(),
        "PYTHONDONTWRITEBYTECODE": "",  # three processes import vLLM; without bytecode each takes 13 s instead of 7
    }


def up(  # noqa: PLR0913 - a parameter an option
    python: Path,
    model: str,
    port: int,
    steps: Steps,
    allowed: Access | None = None,
    *,
    profiled: bool = False,
    arguments: tuple[str, ...] = (),
    host: str = LOOPBACK,
    profile: str = "",
    trial: bool = False,
) -> Server:
    """Prepare the model, validate, start the server; return it once it serves.

    `python` is the environment's interpreter; an empty `model` means the tiny one; `allowed` is what `check` returned;
    a `profiled` server can be asked for traces; `arguments` come behind the profile's; `host` is the address to bind;
    an empty `profile` means `embedded`. A `trial` ends with this process, and is not recorded as known good.
    Raises InputError, RefusalError, and what `launch.start` raises.
    """
    with steps.step("model") as tell:
        directory = paths.typed(model).absolute() if model else write_tiny(python)
        model_id = served_name(directory) if model else TINY_ID
        tell(f"{model_id} in {directory}")
    with steps.step("validation", "profile embedded") as tell:
        tell(validate(python, directory, port, host, arguments, profile))
    with steps.step("server", "vLLM starts") as tell:
        described = describe(
            python, directory, model_id, port, allowed, profiled=profiled, arguments=arguments, host=host,
            profile=profile,
        )  # fmt: skip
        server = launch.start(replace(described, trial=trial), tell)
        tell(f"first answers received, {proof.describe(server.proof)}, in {server.proof_seconds:.1f} s")
    write_json(paths.state() / "up.json", {"seconds": steps.seconds, "model": model_id})
    if not trial:
        _remember(server, python, model, allowed or Access(), profiled=profiled, arguments=arguments)
    return server


def _remember(
    server: Server, python: Path, model: str, allowed: Access, *, profiled: bool, arguments: tuple[str, ...]
) -> None:
    """Record a start that proved itself, with the hash of its environment; an interpreter of elsewhere has none."""
    environment = Environment(python.parent.parent.name)
    if environment.python != python or not (inputs := environments.stamp(environment)):
        return
    entry = replace(
        known_good.started(server, environment.name, server.profile or DEVICE),
        environment=known_good.hashed(inputs),
        settings={
            "model": str(paths.typed(model).absolute()) if model else "",
            "key_file": allowed.key_file,
            "hosts": list(allowed.hosts),
            "host": server.host,
            "profiled": profiled,
            "arguments": list(arguments),
        },
    )
    known_good.remember(entry)


def describe(  # noqa: PLR0913 - a parameter an option
    python: Path,
    model: Path,
    model_id: str,
    port: int,
    allowed: Access | None = None,
    *,
    profiled: bool = False,
    arguments: tuple[str, ...] = (),
    host: str = LOOPBACK,
    profile: str = "",
) -> Launch:
    """Return what starts vLLM's API server for `model` on the address `host`, behind `access.Guard`.

    A `profiled` one has vLLM's torch profiler, with the routes that start and stop it; `arguments` come behind the
    profile's.
    """
    allowed, serve_profile = allowed or Access(), profile_named(profile)
    environment = {
        **environment_of(serve_profile),
        **preloaded(python),
        "VLLM_CACHE_ROOT": str(paths.state() / "cache" / "vllm"),
        **access.variables(allowed.key, allowed.key_file),
        **limits.variables(os.environ),
        access.HOSTS: ",".join((*access.served_hosts(host, port, allowed.hosts), *allowed.hosts)),
        "VLLM_SERVER_DEV_MODE": "0",  # no administration of the engine over HTTP
        **(profiler.ENVIRONMENT if profiled else {}),
    }
    extra_arguments = (*(profiler.arguments(profiler.folder()) if profiled else ()), *arguments)
    server = ServerCommand(
        str(model), model_id, host, port, serve_profile, extra_arguments, environment, forked=model_id == TINY_ID
    )
    return Launch(
        command=server.command(python),
        environment=server.environment,
        model=model,
        model_id=model_id,
        device="embedded",
        port=port,
        host=host,
        profile=profile or DEVICE,
        key_file=allowed.key_file,
        key=allowed.key,
    )


def vllm_arguments(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return vLLM's arguments for TP and MAX_MODEL_LEN. Raises UsageError for several GPUs: there is none here."""
    if env.get("TP", "") not in ("", "1"):
        why = "it is the number of GPUs that share the model, and the embedded device serves without one"
        raise UsageError(f"TP={env['TP'][:40]} has no meaning here", why, "TP=1 ./inv up; or ./inv up --device docker")
    return settings.arguments({**env, "TP": ""})


def preloaded(python: Path) -> dict[str, str]:
    """Return the variables that preload vLLM's allocator and torch's OpenMP from a path with spaces; none for others.

    vLLM's CPU build puts both into LD_PRELOAD by path, which the dynamic linker cuts at spaces. Names without a slash
    are looked up in LD_LIBRARY_PATH, which it does not cut there (ld.so(8)).
    """
    site = next(python.parent.parent.glob("lib/python3*/site-packages"), None)
    if site is None or not any(letter.isspace() for letter in str(site)):
        return {}
    libraries = [library for pattern in PRELOADED for library in sorted(site.glob(pattern))[:1]]
    former = {name: os.environ.get(name, "") for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    names = ":".join(filter(None, (former["LD_PRELOAD"], *(library.name for library in libraries))))
    folders = ":".join(filter(None, (former["LD_LIBRARY_PATH"], *(str(library.parent) for library in libraries))))
    return {"LD_PRELOAD": names, "LD_LIBRARY_PATH": folders} if libraries else {}


def write_tiny(python: Path) -> Path:
    """Write the tiny checkpoint unless it is there and intact, and return its folder. Raises InputError.

    Runs in the environment of `python`, which holds the Harmony vocabulary.
    """
    directory = paths.state() / "models" / TINY_ID
    process = run([python, "-m", "sparkforge.models.tiny", directory], cwd=paths.ROOT, check=False)
    if process.returncode:
        why = "\n".join((process.stdout + process.stderr).strip().splitlines()[-TAIL_LINES:])
        fix = "follow the line after `next:` above, then run the same command again"
        raise InputError("the tiny model could not be written", why, fix, code="input.model")
    return directory


def validate(
    python: Path, model: Path, port: int, host: str = LOOPBACK, arguments: tuple[str, ...] = (), profile: str = ""
) -> str:
    """Run the validator in the environment that will serve; return its verdict in one line. Raises RefusalError."""
    serve_profile = profile_named(profile)
    report = paths.state() / "validation.json"
    command: list[str | Path] = [python, "-m", "validate", "--profile", "embedded", "--json", report]
    command += ["--model", model, "--host", host, "--port", str(port)]
    command += ["--serve-args", *serve_profile.arguments(), *arguments]
    environment = environment_of(serve_profile)  # what the server gets
    process = run(command, cwd=paths.ROOT, env=environment, check=False)
    if process.returncode:
        say(process.stdout + process.stderr)
        failed = [line.strip() for line in process.stdout.splitlines() if line.startswith("FAIL ")]
        why = "\n        ".join(failed) or f"it ended with code {process.returncode}; its report is above"
        fix = "follow the line after `next:` under each FAIL, then ./inv up"
        raise RefusalError("the validator refuses to serve", why, fix, code="validation.failed")
    return process.stdout.strip().splitlines()[-1]
