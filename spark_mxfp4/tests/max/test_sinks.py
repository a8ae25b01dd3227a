"""The fault of MAX that our architecture corrects is still there: with a MAX that has it cured, the tests fail."""

import json
import os
import subprocess
from pathlib import Path


def test_max_counts_a_sink_once_for_each_run_of_128_keys(mojo, compiled):
    environment = {**os.environ, "MODULAR_TELEMETRY_ENABLED": "0", "MODULAR_CACHE_DIR": str(compiled), "PYTHONPATH": ""}
    command = [mojo.with_name("python"), Path(__file__).with_name("sinks.py")]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    results = [json.loads(line) for line in completed.stdout.splitlines()]
    assert {result["keys"] for result in results} >= {128, 129, 257}
    for result in results:
        assert round(result["counted"], 2) == -(-result["keys"] // 128)
