"""vLLM's torch profiler, for `./inv up --profiler` and `./inv bench.profile`: its arguments and where traces go.

vLLM 0.32.0 has POST /start_profile and /stop_profile only if `--profiler-config` names a profiler
(vllm/entrypoints/serve/profile/api_router.py). `access.Guard` is in front of them as of every route.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sparkforge.core import paths

VARIABLE = "SPARKFORGE_PROFILER"  # in a container: the folder for traces; empty: no profiler
IN_CONTAINER = "/var/cache/sparkforge/profiler"  # in the volume that the container's user can write
# Each worker writes one trace per session. Call stacks would make a trace ten times as large, and the API server's own
# trace holds no operator of the model (vllm/config/profiler.py).
SETTINGS: Mapping[str, object] = {"profiler": "torch", "torch_profiler_with_stack": False, "ignore_frontend": True}

# vLLM names the phases of a step in the trace, of which sampling is one (vllm/v1/worker/gpu_model_runner.py).
ENVIRONMENT = {"VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"}


def folder() -> Path:
    """Return where this checkout's servers that have a profiler write their traces; may not exist yet."""
    return paths.state() / "profiler"


def arguments(traces: Path | str) -> tuple[str, ...]:
    """Return vLLM's arguments for a server that writes its traces into the folder `traces`."""
    return ("--profiler-config", json.dumps({**SETTINGS, "torch_profiler_dir": str(traces)}))
