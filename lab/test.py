"""python -m lab.test [ARGUMENTS OF PYTEST]: the laboratory's tests, in the environment of `./inv test`."""

from __future__ import annotations

import sys

from lab.program import exit_code
from sparkforge import environments
from sparkforge.core.console import Steps
from sparkforge.core.errors import ProcessError
from sparkforge.core.paths import ROOT
from sparkforge.core.process import call
from sparkforge.serve import environment


def main() -> None:
    """Make the environment if it is missing, and run pytest. Raises ProcessError if a test failed."""
    python = environment.prepare(Steps(1), environments.TEST).python
    # Compiled bytecode is kept: the tests start many interpreters.
    settings = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}
    if code := call([python, "-m", "pytest", "lab/tests", *sys.argv[1:]], cwd=ROOT, env=settings):
        why = f"pytest ended with code {code}"
        raise ProcessError("the laboratory's tests failed", why, "read pytest's report above", code="process.tests")


if __name__ == "__main__":
    sys.exit(exit_code(main))
