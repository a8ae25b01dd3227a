"""Run the tests in an environment that holds vLLM, the tools and pytest, patched like the one that serves."""

from __future__ import annotations

from forge import embedded, envs
from sparkforge.console import Steps
from sparkforge.errors import TestsFailedError
from sparkforge.paths import ROOT
from sparkforge.process import call


def run_tests(*, fast: bool, select: str) -> None:
    """Run unit tests, and without `fast` the rest; pytest's output goes straight through. Raises TestsFailedError."""
    env = embedded.prepare(Steps(2), envs.TEST)
    folders = ["tests/unit"] if fast else ["tests"]
    selection = ["-k", select] if select else []
    code = call([env.python, "-m", "pytest", *folders, *selection], cwd=ROOT, env={"PYTHONPATH": ""})
    if code:
        raise TestsFailedError("the tests failed", f"pytest ended with code {code}", "read pytest's report above")
