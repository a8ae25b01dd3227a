"""Profiles: which checks a kind of device must pass (required) and which only warn (advised)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkforge.core.errors import UsageError


@dataclass(frozen=True)
class Profile:
    """A named choice of checks. `stack` is the table of pins.toml whose versions are expected, unless one is named."""

    name: str
    summary: str
    stack: str
    required: tuple[str, ...]
    advised: tuple[str, ...]

    @property
    def severities(self) -> dict[str, bool]:
        """Every check of the profile, and whether it is required."""
        return {**dict.fromkeys(self.required, True), **dict.fromkeys(self.advised, False)}

    def foreign(self) -> Profile:
        """Return the profile for an environment that its user made: what compares it with our locks only warns."""
        kept = tuple(check for check in self.required if check not in PINNED)
        compared = tuple(check for check in self.required if check in PINNED)
        return replace(self, required=kept, advised=(*self.advised, *compared))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Checks that compare the environment with pins, locks and patches.
PINNED = _names(
    "python-version vllm-version torch-version torch-cpu-build torch-companions flashinfer-version "
    "cudnn-version patches-intact"
)

SPARK = Profile(
    "spark",
    "gpt-oss on DGX Spark with hardware FP4",
    "spark",
    required=_names(
        "architecture gpu-name gpu-capability driver-version cuda-version memory-unified cuda-memory-uncounted "
        "serve-arguments disk-space port-free python-version python-optimize vllm-version torch-version "
        "flashinfer-version cudnn-version flashinfer-arch-list jit-toolchain patches-intact unknown-environment "
        "blackwell-class moe-backend dense-kernels attention-backend numerics layers model-files model-format"
    ),
    advised=_names("gpu-clock shared-memory remove-ipc sm121-modules offline-hub"),
)
EMBEDDED = Profile(
    "embedded",
    "a tiny gpt-oss on the CPU, without GPU and without Docker",
    "embedded",
    required=_names(
        "cpu-instructions cpu-arguments memory-host disk-space port-free python-version python-optimize "
        "vllm-version torch-version torch-cpu-build torch-companions patches-intact spark-mxfp4-plugin numerics "
        "model-files model-format"
    ),
    advised=_names("shared-memory remove-ipc unknown-environment offline-hub"),
)
GPU = Profile(
    "gpu",
    "gpt-oss on one NVIDIA GPU with memory of its own, without Docker",
    "spark",
    required=_names(
        "gpu-supported driver-version cuda-version gpu-memory disk-space port-free python-version python-optimize "
        "vllm-version torch-version patches-intact unknown-environment spark-mxfp4-plugin numerics layers "
        "model-files model-format"
    ),
    advised=_names("gpu-clock flashinfer-version cudnn-version shared-memory remove-ipc offline-hub"),
)
PROFILES = {profile.name: profile for profile in (SPARK, EMBEDDED, GPU)}


def named(name: str) -> Profile:
    """Return the profile called `name`. Raises UsageError if there is none."""
    if name not in PROFILES:
        names = ", ".join(PROFILES)
        raise UsageError(f"no profile {name!r}", f"there are {names}", "--profile spark")
    return PROFILES[name]
