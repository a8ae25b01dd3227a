"""Makes this folder importable as `robustness`, also in programs started by its tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).resolve().parent.parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)


@pytest.fixture(scope="session")
def attack(tmp_path_factory):
    """Run a program of this package and return its counts by scenario."""

    def run(module, *arguments):
        output = tmp_path_factory.mktemp(module) / "counts.json"
        environment = {**os.environ, "PYTHONPATH": TESTS, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
        command = [sys.executable, "-m", f"robustness.{module}", *map(str, arguments), "--json", str(output)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        assert output.exists(), result.stdout + result.stderr
        return {row["scenario"]: row for row in json.loads(output.read_text())}

    return run
