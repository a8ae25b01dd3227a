"""The device `gpu`: vLLM's CUDA build in an environment, on any Linux machine with an NVIDIA driver, without Docker."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sparkforge.core.console import Steps
from sparkforge.core.errors import UsageError
from sparkforge.core.vllm_flags import SHARE, flag_value
from sparkforge.image.devices import GPU, stack_of
from sparkforge.plan import capabilities
from sparkforge.serve import launch, profiles, settings
from sparkforge.serve.devices.in_environment import InEnvironment, write_tiny
from sparkforge.serve.plan import StartPlan
from sparkforge.serve.profiles import ServeProfile
from sparkforge.serve.record import Server


class Gpu(InEnvironment):
    """vLLM on one NVIDIA GPU; what serves on it is the row of capabilities.toml for its compute capability.

    Making one raises RefusalError for a GPU that cannot serve, and what `InEnvironment` raises.
    """

    name = GPU

    def __init__(self, plan: StartPlan, python: Path | None = None, model: Path | None = None) -> None:
        self.built: dict[str, str] = {}  # variables with which a server finds FlashInfer's compiled modules
        share = flag_value(plan.flags, SHARE) or str(1 - capabilities.IN_USE)
        try:
            self.gpu, self.capability = capabilities.find(os.environ, float(share))
        except ValueError:
            why = "it is the part of the GPU's memory that vLLM takes, a number up to 1"
            raise UsageError(f"{SHARE} cannot be {share!r}", why, f"./inv up --device gpu -- {SHARE}=0.9") from None
        self.validator, self.default_profile = self.capability.validator, self.capability.profile
        super().__init__(plan, python, model)
        self.tiny_first = bool(plan.model) and plan.tiny_first
        self.steps = Steps(self.step_count + self.capability.flashinfer + self.tiny_first)

    def choose_profile(self, plan: StartPlan) -> ServeProfile:
        """Return the plan's profile, or the GPU's. Raises UsageError for one of other machines."""
        profile = profiles.named(
            plan.profile or self.default_profile, stack=plan.stack, family=settings.family(plan.model)
        )
        for_spark = profile.device == ""  # FlashInfer's kernels for 12.x, sizes for a Spark's memory
        if profile.device not in ("", GPU) or (for_spark and not self.capability.flashinfer):
            why = f"it is not made for {self.gpu}; its profile is {self.default_profile}"
            raise UsageError(f"--profile {plan.profile} cannot be served here", why, "without --profile")
        return profile

    def from_variables(self, variables: Mapping[str, str]) -> tuple[str, ...]:
        """Return vLLM's arguments for TP and MAX_MODEL_LEN. Raises UsageError, also for more GPUs than there are."""
        arguments = settings.arguments(variables)
        settings.require_gpus(variables.get("TP", ""))
        return arguments

    def prepare(self) -> None:
        """Make environment and tiny model, and the modules of FlashInfer that this GPU's experts need."""
        super().prepare()
        if not self.capability.flashinfer:
            return
        from sparkforge.compile.flashinfer.build import KernelRequest, build_kernels  # noqa: PLC0415 - for 12.x alone
        from sparkforge.image import packs  # noqa: PLC0415

        with self.steps.step("kernels", f"FlashInfer's modules for {self.capability.architecture}") as tell:
            stack, interpreter = stack_of(GPU, self.plan.stack), str(self.python)
            take = packs.taking("")
            request = KernelRequest(stack, arch=self.capability.architecture, python=interpreter, take=take)
            file, changed = build_kernels(request)
            lines = file.read_text(encoding="utf-8").splitlines()
            self.built = dict(line.split("=", 1) for line in lines)
            tell(f"{file.parent}, {'compiled' if changed else 'unchanged'}")

    def variables(self) -> dict[str, str]:
        """Return those with which FlashInfer finds the compiled modules."""
        return self.built

    def start(self) -> Server:
        """Start vLLM; before a larger model is loaded, the tiny one must answer by the same flags as it is recorded.

        Raises what `launch.start` and `try_tiny` raise.
        """
        if self.tiny_first:
            tiny = copy.copy(self)
            tiny.plan, tiny.model = replace(self.plan, model="", model_id="", trial=True), write_tiny(self.python)
            self.try_tiny(lambda tell: launch.start(tiny.launch(), tell), launch.stop)
        return super().start()
