"""The laboratory's tests, in the environment of `./inv test`: `python -m lab.test [ARGUMENTS OF PYTEST]`.

`python -m lab.test --max [--device gpu]` instead serves the tiny model with MAX and compares its tokens.
"""

from __future__ import annotations

import sys

from sparkforge import environments
from sparkforge.core.console import Steps
from sparkforge.core.errors import ProcessError
from sparkforge.core.paths import ROOT
from sparkforge.core.process import call
from sparkforge.core.program import exit_code
from sparkforge.serve.devices.in_environment import prepare_environment


def main() -> None:
    """Make the environment if it is missing, and run pytest. Raises ProcessError if a test failed."""
    python = prepare_environment(Steps(1), environments.TEST).python
    # Compiled bytecode is kept: the tests start many interpreters.
    settings = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}
    serves_max, arguments = sys.argv[1:2] == ["--max"], sys.argv[1:]
    arguments = ["lab/tests/max", *arguments[1:]] if serves_max else ["lab/tests", "--ignore=lab/tests/max", *arguments]
    if code := call([python, "-m", "pytest", *arguments], cwd=ROOT, env=settings):
        why = f"pytest ended with code {code}"
        raise ProcessError("the laboratory's tests failed", why, "read pytest's report above", code="process.tests")


if __name__ == "__main__":
    sys.exit(exit_code(main))
