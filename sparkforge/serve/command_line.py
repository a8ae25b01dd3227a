"""vLLM's command line and environment: the one place that turns what is served, where and how into both."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.errors import UsageError
from sparkforge.core.vllm_flags import HEADLESS, HOST, NAMES, PORT, flag_value, meant, taken
from sparkforge.models import local, recipes
from sparkforge.models.harmony import offline_environment
from sparkforge.serve import access
from sparkforge.serve.profiles import ServeProfile

MODULE = "vllm.entrypoints.openai.api_server"  # unlike the `vllm` command it needs no distribution called vllm
FORKED = "sparkforge.serve.forked_vllm"  # runs MODULE with forks in place of new interpreters
WORKER = ("vllm.entrypoints.cli.main", "serve")  # only that command takes --headless
ENVIRONMENT = {
    **offline_environment(),  # the model is on disk; a start must not wait for a network
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "spark_mxfp4",  # another installed plugin would be an input that nobody pinned
    "PYTHONSAFEPATH": "1",  # no process of vLLM has its working directory on sys.path
}
# vLLM 0.32.0 has POST /start_profile and /stop_profile only if `--profiler-config` names a profiler
# (vllm/entrypoints/serve/profile/api_router.py). `access.Guard` is in front of them as of every route.
PROFILER = "SPARKFORGE_PROFILER"  # in a container: the folder for traces; empty: no profiler
TRACES_IN_CONTAINER = "/var/cache/sparkforge/profiler"  # in the volume that the container's user can write
# vLLM names the phases of a step in the trace, of which sampling is one (vllm/v1/worker/gpu_model_runner.py).
PROFILER_ENVIRONMENT = {"VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"}


@dataclass(frozen=True)
class ServerCommand:
    """The command line of one of vLLM's API servers.

    `model` is a folder and `model_id` the name under which the API offers it. `extra_arguments` come after the
    profile's and win; so do the variables of `extra_environment`. A guarded server has `access.Guard` in front, and
    its API key in `extra_environment`. A `forked` one runs with `sparkforge.serve.forked_vllm`, on a CPU.
    """

    model: str
    model_id: str
    host: str
    port: int
    profile: ServeProfile | None = None
    extra_arguments: tuple[str, ...] = ()
    extra_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    guarded: bool = True
    forked: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments for vLLM."""
        named, extra = taken(self.extra_arguments, NAMES)  # the user's names; the model's own work too
        names = dict.fromkeys(name for model_id in (*named, self.model_id) for name in api_names(model_id))
        flags = ("--model", self.model, NAMES, *names)
        address = ("--host", self.host, "--port", str(self.port))
        profile = self.profile.arguments() if self.profile else ()
        no_docs = ("--disable-fastapi-docs",) if self.environment.get(access.KEY) else ()
        guard = ("--middleware", f"{access.__name__}.{access.Guard.__name__}", *no_docs) if self.guarded else ()
        return (*flags, *address, *profile, *extra, *guard)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the server needs."""
        variables = {**ENVIRONMENT, access.PROXIES: os.environ.get(access.PROXIES, "")}
        return {**variables, **(self.profile.variables() if self.profile else {}), **self.extra_environment}

    def command(self, python: str | Path) -> tuple[str, ...]:
        """Return the whole command, run by the interpreter `python`."""
        module = ("-m", *(WORKER if self.headless else (FORKED, MODULE) if self.forked else (MODULE,)))
        return (str(python), *module, *self.arguments)

    @property
    def headless(self) -> bool:
        """Whether it is a worker of another machine's server, without an API."""
        return HEADLESS in self.arguments

    def address(self) -> tuple[str, int]:
        """Return the host and the port on which it listens. Raises UsageError, also for an abbreviated flag."""
        for word in self.arguments:
            flag, name = meant(word, (HOST, PORT)), word.partition("=")[0]
            if flag and name != flag:
                raise UsageError(
                    f"vLLM reads {name} as {flag}", "the address must be explicit", f"again   # with {flag}"
                )
        host, port = (flag_value(self.arguments, flag) or "" for flag in (HOST, PORT))
        if port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536:
            return host, int(port)
        fix = "without --port   # it is 8000 in the image"
        raise UsageError(f"--port {port!r} is not a port", "ports are 1 to 65535", fix)


def api_names(model_id: str) -> tuple[str, ...]:
    """Return the model's names in the API, `model_id` first: with and without the owner, as guides use both."""
    owner, _, name = model_id.rpartition("/")
    if owner:
        return model_id, name
    return (model_id, *recipes.repositories(model_id))


def served_name(directory: Path) -> str:
    """Return a checkpoint's name in the API. Raises InputError for an unknown family, StorageError if unreadable."""
    local.family_of(directory)
    return local.name_of(directory)


def traces_folder() -> Path:
    """Return where this checkout's servers that have a profiler write their traces; may not exist yet."""
    return paths.state() / "profiler"


def profiler_arguments(traces: Path | str) -> tuple[str, ...]:
    """Return vLLM's arguments for a server that writes its traces into the folder `traces`."""
    # Each worker writes one trace per session. Call stacks would make a trace ten times as large, and the API server's
    # own trace holds no operator of the model (vllm/config/profiler.py).
    config = {"profiler": "torch", "torch_profiler_with_stack": False, "ignore_frontend": True}
    return ("--profiler-config", json.dumps({**config, "torch_profiler_dir": str(traces)}))
