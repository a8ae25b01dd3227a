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
    """Run a program of this package and return its counts by scenario; `shown` has its failures as text."""

    def run(module, *arguments):
        output = tmp_path_factory.mktemp(module) / "counts.json"
        environment = {**os.environ, "PYTHONPATH": TESTS, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
        command = [sys.executable, "-m", f"robustness.{module}", *map(str, arguments), "--json", str(output)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        assert output.exists(), result.stdout + result.stderr
        shown = "\n".join(line for line in result.stderr.splitlines())
        return {
            row["scenario"]: {**row, "shown": _of(row["scenario"], shown)} for row in json.loads(output.read_text())
        }

    return run


def _of(scenario, shown):
    lines, keep = [], False
    for line in shown.splitlines():
        keep = line.startswith((f"{scenario},", f"{scenario}:")) or (keep and line.startswith(" "))
        lines += [line] if keep else []
    return "\n".join(lines)
