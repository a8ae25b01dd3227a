"""Run the tests in an environment that holds vLLM, the tools and pytest, patched like the one that serves."""

from __future__ import annotations

from forge import embedded, envs, memory
from forge.memory import Machine
from sparkforge.console import Steps
from sparkforge.errors import TestsFailedError
from sparkforge.paths import ROOT
from sparkforge.process import call

WORKERS = 2  # one for what serves while the other compiles (tests/conftest.py); more have not been tried
WORKER_BYTES = 8_000_000_000  # pytest with torch 1.5 GB, and a vLLM of two ranks or two servers 6 GB


def run_tests(*, fast: bool, select: str) -> None:
    """Run unit tests, and without `fast` the rest; pytest's output goes straight through. Raises TestsFailedError."""
    env = embedded.prepare(Steps(2), envs.TEST)
    words = ["tests/unit"] if fast else ["tests", "--durations=15"]
    many = 0 if select else workers(memory.measure())
    words += ["-k", select] if select else []
    words += [f"--numprocesses={many}"] if many > 1 else []
    # A thread a worker: two pools of as many threads as there are cores would wait for each other.
    threads = {"OMP_NUM_THREADS": "1"} if many > 1 else {}
    code = call([env.python, "-m", "pytest", *words], cwd=ROOT, env={"PYTHONPATH": "", **threads})
    if code:
        raise TestsFailedError("the tests failed", f"pytest ended with code {code}", "read pytest's report above")


def workers(machine: Machine) -> int:
    """Return how many of pytest's workers a machine has cores and memory for, at least 1."""
    return max(1, min(WORKERS, machine.cores, machine.available // WORKER_BYTES))
