"""Serve on the embedded device: the model on disk, the validator, then vLLM's API server."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sparkforge import environments
from sparkforge.core import paths
from sparkforge.core.console import Steps, say
from sparkforge.core.errors import InputError, RefusalError, UsageError
from sparkforge.core.files import write_json
from sparkforge.core.process import TAIL_LINES, run
from sparkforge.environments import Environment
from sparkforge.image.devices import stack_of
from sparkforge.serve import (
    access,
    command_line,
    environment,
    known_good,
    launch,
    limits,
    profiler,
    profiles,
    proof,
    settings,
)
from sparkforge.serve.command_line import ServerCommand, served_name
from sparkforge.serve.launch import Launch
from sparkforge.serve.plan import StartPlan
from sparkforge.serve.profiles import ServeProfile
from sparkforge.serve.record import Server
from sparkforge.serve.settings import TINY_ID
from validate.checks.arguments import missing_on_cpu
from validate.facts.machine import cpu_flags
from validate.facts.target import Options, Target

DEVICE = "embedded"  # also the name of its first profile

# Below site-packages: what vLLM's CPU build preloads.
PRELOADED = ("vllm/libs/libtcmalloc*.so*", "torch/lib/libgomp*.so*")


def checked(plan: StartPlan) -> StartPlan:
    """Check a plan before minutes go into an environment; return it with its API key and vLLM's arguments complete.

    Raises UsageError, InputError, or StorageError for a key file that `access.read_key` refuses.
    """
    profile = profile_named(plan.profile)
    require_processor(profile, plan.profile)
    if plan.model:
        served_name(paths.typed(plan.model).absolute())
    access.refuse_inherited_key(os.environ)
    settings.require_guard(os.environ)
    limits.read(os.environ)
    flags = (*vllm_arguments(plan.variables), *plan.flags)
    hosts = tuple(access.named_hosts(",".join(plan.hosts) or os.environ.get(access.HOSTS, "")))
    path = access.key_path(plan.key_file)
    key = access.read_key(path) if path else ""
    return replace(plan, key_file=str(path) if path else "", key=key, hosts=hosts, flags=flags, variables={})


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


def start(plan: StartPlan) -> Server:
    """Prepare the environment, then do what `up` does. Raises what `checked`, `environment.prepare` and `up` raise."""
    own_flags, plan = plan.flags, checked(plan)
    for line in profile_named(plan.profile).replaced_by(own_flags):
        say(line)
    steps = Steps(4)
    python = environment.prepare(steps, Environment(stack_of(DEVICE, plan.stack))).python
    return up(plan, python, steps)


def up(plan: StartPlan, python: Path, steps: Steps) -> Server:
    """Prepare the model, validate, start the server; return it once it serves.

    `python` is the environment's interpreter, and `plan` what `checked` returned. Raises InputError, RefusalError, and
    what `launch.start` raises.
    """
    with steps.step("model") as tell:
        model = model_folder(plan, python)
        tell(f"{_model_id(plan, model)} in {model}")
    with steps.step("validation", "profile embedded") as tell:
        tell(validate(plan, python, model))
    with steps.step("server", "vLLM starts") as tell:
        server = launch.start(describe(plan, python, model), tell)
        tell(f"first answers received, {proof.describe(server.proof)}, in {server.proof_seconds:.1f} s")
    write_json(paths.state() / "up.json", {"seconds": steps.seconds, "model": server.model_id})
    if not plan.trial:
        _remember(plan, server, python)
    return server


def model_folder(plan: StartPlan, python: Path) -> Path:
    """Return the folder of the plan's model; without one write the tiny model. Raises InputError."""
    return paths.typed(plan.model).absolute() if plan.model else write_tiny(python)


def _model_id(plan: StartPlan, model: Path) -> str:
    return plan.model_id or (served_name(model) if plan.model else TINY_ID)


def _remember(plan: StartPlan, server: Server, python: Path) -> None:
    """Record a start that proved itself with the hash of its environment, unless its interpreter is another one."""
    own = Environment(python.parent.parent.name)
    if own.python != python or not (inputs := environments.stamp(own)):
        return
    entry = replace(
        known_good.started(server, own.name, server.profile or DEVICE),
        environment=known_good.hashed(inputs),
        settings={
            "model": str(paths.typed(plan.model).absolute()) if plan.model else "",
            "key_file": plan.key_file or "",
            "hosts": list(plan.hosts),
            "host": server.host,
            "profiled": plan.profiled,
            "arguments": list(plan.flags),
        },
    )
    known_good.remember(entry)


def describe(plan: StartPlan, python: Path, model: Path) -> Launch:
    """Return what starts vLLM's API server for the checkpoint in `model`, behind `access.Guard`."""
    profile, model_id = profile_named(plan.profile), _model_id(plan, model)
    variables = {
        **environment_of(profile),
        **preloaded(python),
        "VLLM_CACHE_ROOT": str(paths.state() / "cache" / "vllm"),
        **access.variables(plan.key, plan.key_file or ""),
        **limits.variables(os.environ),
        access.HOSTS: ",".join((*access.served_hosts(plan.address, plan.port, plan.hosts), *plan.hosts)),
        "VLLM_SERVER_DEV_MODE": "0",  # no administration of the engine over HTTP
        **(profiler.ENVIRONMENT if plan.profiled else {}),
    }
    traces = profiler.arguments(profiler.folder()) if plan.profiled else ()
    server = ServerCommand(
        str(model), model_id, plan.address, plan.port, profile, (*traces, *plan.flags), variables,
        forked=model_id == TINY_ID,
    )  # fmt: skip
    plan = replace(plan, device=DEVICE, model_id=model_id, profile=plan.profile or DEVICE)
    return Launch(server.command(python), server.environment, plan, model)


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


def validate(plan: StartPlan, python: Path, model: Path) -> str:
    """Run the validator in the environment that will serve; return its verdict in one line. Raises RefusalError."""
    profile = profile_named(plan.profile)
    report = paths.state() / "validation.json"
    command: list[str | Path] = [python, "-m", "validate", "--profile", "embedded", "--json", report]
    command += ["--model", model, "--host", plan.address, "--port", str(plan.port)]
    command += ["--serve-args", *profile.arguments(), *plan.flags]
    variables = environment_of(profile)  # what the server gets
    process = run(command, cwd=paths.ROOT, env=variables, check=False)
    if process.returncode:
        say(process.stdout + process.stderr)
        failed = [line.strip() for line in process.stdout.splitlines() if line.startswith("FAIL ")]
        why = "\n        ".join(failed) or f"it ended with code {process.returncode}; its report is above"
        fix = "follow the line after `next:` under each FAIL, then ./inv up"
        raise RefusalError("the validator refuses to serve", why, fix, code="validation.failed")
    return process.stdout.strip().splitlines()[-1]
