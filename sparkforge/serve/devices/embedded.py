"""The embedded device: vLLM's CPU build, on any Linux machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from sparkforge.core.errors import UsageError
from sparkforge.core.memory import cpus
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import profiles, settings
from sparkforge.serve.devices.in_environment import InEnvironment
from sparkforge.serve.plan import StartPlan
from sparkforge.serve.profiles import ServeProfile
from validate.checks.arguments import missing_on_cpu
from validate.facts.machine import cpu_flags
from validate.facts.target import Options, Target

# Below site-packages: what vLLM's CPU build preloads.
PRELOADED = ("vllm/libs/libtcmalloc*.so*", "torch/lib/libgomp*.so*")


class Embedded(InEnvironment):
    """vLLM's CPU build in an environment of this checkout."""

    name = validator = default_profile = EMBEDDED

    def choose_profile(self, plan: StartPlan) -> ServeProfile:
        """Return the profile. Raises UsageError for one of another device or that this processor cannot serve."""
        profile = profile_named(plan.profile, settings.family(plan.model))
        if missing := missing_on_cpu(profile.arguments(), platform.machine(), cpu_flags(Target(Options(), ""))):
            failure = f"--profile {plan.profile} cannot be served by this processor"
            raise UsageError(failure, missing, "./inv up --profile embedded")
        return profile

    def from_variables(self, variables: Mapping[str, str]) -> tuple[str, ...]:
        """Return vLLM's arguments for TP and MAX_MODEL_LEN. Raises UsageError for several GPUs."""
        return vllm_arguments(variables)

    def variables(self) -> dict[str, str]:
        """Return the variables that preload libraries, also from a path with spaces, and the engine's threads.

        One core is left to everything else: threads that wait for one that has lost its core make a step of the model
        take seconds.
        """
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cpus(Path("/")) - 1))
        return {**preloaded(self.python), "OMP_NUM_THREADS": threads}


def profile_named(name: str, family: str = "") -> ServeProfile:
    """Return the device's profile of that name, by default `embedded`. Raises UsageError for one of another device."""
    profile = profiles.named(name or EMBEDDED, family=family)
    if profile.device != EMBEDDED:
        own = ", ".join(name for name, settings in profiles.load().items() if settings.device == EMBEDDED)
        fix = f"./inv up --device docker --profile {name}"
        raise UsageError(f"--profile {name} is for containers", f"the embedded device has {own}", fix)
    return profile


def vllm_arguments(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return vLLM's arguments for TP and MAX_MODEL_LEN. Raises UsageError for several GPUs: there is none here."""
    if env.get("TP", "") not in ("", "1"):
        why = "it is the number of GPUs that share the model, and the embedded device serves without one"
        raise UsageError(f"TP={env['TP'][:40]} has no meaning here", why, "TP=1   # or --device docker")
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
    if not libraries:
        return {}
    names = [os.environ.get("LD_PRELOAD", ""), *(library.name for library in libraries)]
    folders = [os.environ.get("LD_LIBRARY_PATH", ""), *(str(library.parent) for library in libraries)]
    return {"LD_PRELOAD": ":".join(filter(None, names)), "LD_LIBRARY_PATH": ":".join(filter(None, folders))}
