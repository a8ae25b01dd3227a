"""vLLM's API server in a Python environment of this machine: the devices `embedded` and `gpu`.

`embedded` is vLLM's CPU build, on any Linux machine; `gpu` its CUDA build, on one with an NVIDIA driver.
"""

import copy
import os
import platform
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from sparkforge import environments, pins
from sparkforge.core import paths
from sparkforge.core.console import Steps, say
from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.memory import cpus
from sparkforge.core.process import TAIL_LINES, run_unchecked
from sparkforge.core.vllm_flags import SHARE, flag_value
from sparkforge.environments import Environment
from sparkforge.image.devices import EMBEDDED, GPU, environment_of, stack_of
from sparkforge.plan import capabilities
from sparkforge.serve import access, command_line, known_good, launch, limits, logs, profiles, proof, settings
from sparkforge.serve.command_line import ServerCommand, served_name
from sparkforge.serve.devices.device import UNPROVED, Device
from sparkforge.serve.launch import Launch
from sparkforge.serve.profiles import ServeProfile
from sparkforge.serve.record import Server, StartPlan
from sparkforge.serve.settings import TINY_ID
from validate.checks.arguments import missing_on_cpu
from validate.facts.machine import cpu_flags
from validate.facts.target import Options, Target


class InEnvironment(Device):
    """vLLM in an environment of this checkout, or in that of the plan's interpreter.

    `python` and `model` name an existing interpreter and checkpoint; without them `prepare` makes both. The constructor
    raises UsageError, InputError, RefusalError, or StorageError for a key file that `access.read_key` refuses.
    """

    name: ClassVar[str]  # of the device
    validator: str  # the validator's profile
    default_profile: str  # the serve profile where none is named
    built: dict[str, str] = {}  # noqa: RUF012 - variables with which a server finds FlashInfer's compiled modules

    def __init__(self, plan: StartPlan, python: Path | None = None, model: Path | None = None) -> None:
        plan = settings.with_variables(plan, os.environ)
        self.profile = self.choose_profile(plan)
        if plan.python:
            python = paths.typed(plan.python).absolute()  # not resolved: the link's path finds a virtual environment
            if not (python.is_file() and os.access(python, os.X_OK)):
                why = "there is no such interpreter"
                raise UsageError(f"cannot serve with {python}", why, "without --python")
        if plan.model:
            model = paths.typed(plan.model).absolute()
            served_name(model)
        access.refuse_inherited_key(os.environ)
        self.validation_mode = settings.one_of(os.environ, "SPARKFORGE_VALIDATE")
        self.own_flags = plan.flags
        path = access.key_path(plan.key_file)
        super().__init__(
            replace(
                plan,
                key_file=str(path) if path else "",
                key=access.read_key(path) if path else "",
                hosts=access.chosen_hosts(plan.hosts, os.environ),
                flags=(*self.from_variables(plan.variables), *plan.flags),
                variables={},
            )
        )
        self._makes_environment, self._makes_model = python is None, model is None
        self.python = python or self.environment.python
        self.model = model or paths.shared() / "models" / TINY_ID

    @abstractmethod
    def choose_profile(self, plan: StartPlan) -> ServeProfile:
        """Return the plan's serve profile or the default. Raises an error if this machine cannot serve with it."""

    @staticmethod
    @abstractmethod
    def from_variables(variables: Mapping[str, str]) -> tuple[str, ...]:
        """Return vLLM's arguments for TP and MAX_MODEL_LEN. Raises UsageError."""

    def variables(self) -> dict[str, str]:
        """Return the variables that this device adds to the profile's."""
        return self.built

    @property
    def environment(self) -> Environment:
        """The environment of the plan's stack."""
        return Environment(environment_of(self.name, self.plan.stack))

    @property
    def model_id(self) -> str:
        """The model's name in the API."""
        return self.plan.model_id or (served_name(self.model) if self.plan.model else TINY_ID)

    def prepare(self) -> None:
        """Make the environment and the tiny model if they are missing. Raises what `environments.ensure` raises."""
        for line in self.profile.replaced_by(self.own_flags):
            say(line)
        if self._makes_environment:
            prepare_environment(self.steps, self.environment)
        elif self.plan.python:
            with self.steps.step("environment") as tell:
                tell(f"yours: {self.python}, which no lock describes")
        with self.steps.step("model") as tell:
            if self._makes_model:
                write_tiny(self.python)
            tell(f"{self.model_id} in {self.model}")

    def validate(self) -> str:
        """Run the validator in the environment that will serve. SPARKFORGE_VALIDATE=warn continues after a failure."""
        report = paths.state() / "validation.json"
        command: list[str | Path] = [self.python, "-m", "validate", "--profile", self.validator, "--json", report]
        command += ["--foreign"] if self.plan.python else []
        command += ["--model", self.model, "--host", self.plan.address, "--port", str(self.plan.port)]
        command += ["--serve-args", *self.profile.arguments(), *self.plan.flags]
        with self.steps.step("validation", f"profile {self.validator}") as tell:
            if self.validation_mode == settings.OFF:
                verdict = "left out: SPARKFORGE_VALIDATE=off"
            else:
                process = run_unchecked(command, cwd=paths.ROOT, env={**variables_of(self.profile), **self.variables()})
                verdict = process.stdout.strip().rpartition("\n")[2]
                if process.returncode or not verdict:
                    say(process.stdout + process.stderr)
                    why = f"it ended with code {process.returncode}; its report is above"
                    if not process.returncode:
                        why = f"{self.python} printed no report: is it a Python interpreter?"
                    if self.validation_mode == settings.STRICT:
                        problem = "the validator refuses to serve"
                        raise logs.refusal(problem, process.stdout, why=why, fix="./inv doctor", then="./inv up")
                    say("WARNING: the validator refuses; SPARKFORGE_VALIDATE=warn lets the server start all the same")
            tell(verdict)
        return verdict

    def launch(self) -> Launch:
        """Return the launch of vLLM's API server, with `access.Guard` in front."""
        profile = self.plan.profile or self.default_profile
        plan = replace(self.plan, device=self.name, model_id=self.model_id, profile=profile)
        variables = {
            **variables_of(self.profile),
            **self.variables(),
            "VLLM_CACHE_ROOT": str(paths.shared() / "cache" / "vllm"),
            **access.variables(plan.key, plan.key_file or ""),
            **limits.variables(os.environ),
            access.HOSTS: ",".join((*access.served_hosts(plan.address, plan.port, plan.hosts), *plan.hosts)),
            "VLLM_SERVER_DEV_MODE": "0",  # no administration of the engine over HTTP
            **(command_line.PROFILER_ENVIRONMENT if plan.profiled else {}),
        }
        flags = (*(command_line.profiler_arguments(command_line.traces_folder()) if plan.profiled else ()), *plan.flags)
        if is_tiny := plan.model_id == TINY_ID:
            # Without the flag vLLM looks for a template in a processor, and for that reads the vocabulary again.
            flags = ("--chat-template", str(self.model / "chat_template.jinja"), *flags)
        server = ServerCommand(
            str(self.model), plan.model_id, plan.address, plan.port, self.profile, flags, variables,
            forked=is_tiny and self.name == EMBEDDED,
        )  # fmt: skip
        family = settings.family(self.plan.model)
        return Launch(server.command(self.python), server.environment, plan, self.model, family=family)

    def start(self) -> Server:
        """Start vLLM and run the start-up test."""
        with self.steps.step("server", "vLLM starts") as tell:
            server = launch.start(self.launch(), tell)
            tell(f"first answers received, {proof.describe(server.proof)}, in {server.proof_seconds:.1f} s")
        return server

    def remember(self, server: Server) -> None:
        """Record the start with the hash of its environment, if that is ours and its validation could fail it."""
        if self.validation_mode != settings.STRICT:
            say(UNPROVED)
        elif self.environment.python == self.python and (inputs := environments.stamp(self.environment)):
            plan = replace(self.plan, stack=self.environment.name)
            known_good.remember(server, plan, environment=known_good.hashed(inputs))


def variables_of(profile: ServeProfile) -> dict[str, str]:
    """Return the variables that the validator and the server get with a profile, in which the user's values win."""
    return {
        **command_line.ENVIRONMENT,
        **{name: os.environ.get(name, value) for name, value in profile.variables().items()},
        "PYTHONDONTWRITEBYTECODE": "",  # three processes import vLLM; without bytecode each takes 13 s instead of 7
    }


def prepare_environment(steps: Steps, env: Environment | None = None) -> Environment:
    """Make `env`, by default the embedded device's, unless it is current. Raises what `environments.ensure` raises."""
    table, env = pins.load(), env or Environment(environment_of(EMBEDDED))
    with steps.step("environment", "hash-locked wheels; the first time takes minutes") as tell:
        is_new = environments.ensure(env, table)
        components = [table.component(*name.split("/")) for name in table.environment(env.name).wheels]
        patched = [component for component in components if component.patches]
        versions = [f"{component.package} {environments.installed_version(component)}" for component in patched]
        tell(", ".join([*versions, "made" if is_new else "unchanged"]))
    return env


def write_tiny(python: Path) -> Path:
    """Write the tiny checkpoint, with `python`, unless it is there and intact; return its folder. Raises InputError."""
    directory = paths.shared() / "models" / TINY_ID
    process = run_unchecked([python, "-m", "sparkforge.models.tiny", directory], cwd=paths.ROOT)
    if process.returncode:
        why = "\n".join((process.stdout + process.stderr).strip().splitlines()[-TAIL_LINES:])
        fix = "again   # first follow the line after `next:` above"
        raise InputError("the tiny model could not be written", why, fix, code="input.model")
    return directory


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

    @staticmethod
    def from_variables(variables: Mapping[str, str]) -> tuple[str, ...]:
        """Return vLLM's arguments for TP and MAX_MODEL_LEN. Raises UsageError for several GPUs: there is none here."""
        if variables.get("TP", "") not in ("", "1"):
            why = "it is the number of GPUs that share the model, and the embedded device serves without one"
            raise UsageError(f"TP={variables['TP'][:40]} has no meaning here", why, "TP=1   # or --device docker")
        return settings.arguments({**variables, "TP": ""})

    def variables(self) -> dict[str, str]:
        """Return the variables that preload libraries and set the engine's threads."""
        # One core stays free: threads that wait for one that has lost its core make a step take seconds.
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


def preloaded(python: Path) -> dict[str, str]:
    """Return the variables that preload vLLM's allocator and torch's OpenMP from a path with spaces; none for others.

    vLLM's CPU build puts both into LD_PRELOAD by path, which the dynamic linker cuts at spaces. Names without a slash
    are looked up in LD_LIBRARY_PATH, which it does not cut there (ld.so(8)).
    """
    site = next(python.parent.parent.glob("lib/python3*/site-packages"), None)
    if site is None or not any(letter.isspace() for letter in str(site)):
        return {}
    libraries = [library for pattern in PRELOADED for library in sorted(site.glob(pattern))[:1]]
    names, folders = [library.name for library in libraries], [str(library.parent) for library in libraries]
    added = {"LD_PRELOAD": names, "LD_LIBRARY_PATH": folders} if libraries else {}
    return {name: ":".join(filter(None, [os.environ.get(name, ""), *values])) for name, values in added.items()}


class Gpu(InEnvironment):
    """vLLM on one NVIDIA GPU; capabilities.toml has its profile. Raises RefusalError for one that cannot serve."""

    name = GPU

    def __init__(self, plan: StartPlan, python: Path | None = None, model: Path | None = None) -> None:
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

    @staticmethod
    def from_variables(variables: Mapping[str, str]) -> tuple[str, ...]:
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
            stack, arch = stack_of(GPU, self.plan.stack), self.capability.architecture
            request = KernelRequest(stack, arch=arch, python=str(self.python), take=packs.taking(""))
            file, changed = build_kernels(request)
            self.built = dict(line.split("=", 1) for line in file.read_text(encoding="utf-8").splitlines())
            tell(f"{file.parent}, {'compiled' if changed else 'unchanged'}")

    def start(self) -> Server:
        """Start vLLM; with `tiny_first` the tiny model must first give its recorded answers with the same flags."""
        if self.tiny_first:
            tiny = copy.copy(self)
            tiny.plan, tiny.model = replace(self.plan, model="", model_id="", trial=True), write_tiny(self.python)
            self.try_tiny(lambda tell: launch.start(tiny.launch(), tell), launch.stop)
        return super().start()
