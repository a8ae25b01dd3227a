"""The facts of the machine that a result belongs to, without host names or paths."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from sparkforge import __version__
from sparkforge.core.errors import ProcessError
from sparkforge.core.git import checkout_git
from sparkforge.core.gpus import query
from sparkforge.core.paths import ROOT
from sparkforge.core.process import ProbeError


def facts() -> dict[str, Any]:
    """Return processor, cores, memory (bytes), GPUs, system, Python, our version and commit, and the time in UTC."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "sparkforge": __version__,
        "commit": _commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpus() -> list[str]:
    """Return name and driver of each NVIDIA GPU; none where nvidia-smi is absent or sees none."""
    try:
        return [", ".join(row.values()) for row in query("name", "driver_version")]
    except ProbeError:
        return []


def _commit() -> str:
    """Return the commit, marked if files differ from it; empty outside a git checkout."""
    try:
        return checkout_git(ROOT, "describe", "--always", "--dirty", "--abbrev=12").strip()
    except ProcessError:
        return ""
