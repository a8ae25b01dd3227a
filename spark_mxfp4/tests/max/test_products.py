"""What shows MAX's faults on Hopper finds none on a CPU, where there are none."""

import json
import os
import subprocess
from pathlib import Path


def test_products_on_a_cpu_are_right_and_stay_in_their_result(mojo, compiled):
    environment = {**os.environ, "MODULAR_TELEMETRY_ENABLED": "0", "MODULAR_CACHE_DIR": str(compiled), "PYTHONPATH": ""}
    command = [mojo.with_name("python"), Path(__file__).with_name("products.py"), "--device", "cpu"]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    results = [json.loads(line) for line in completed.stdout.splitlines()]
    assert {(result["columns"], result["result"]) for result in results} >= {(4, "bfloat16"), (512, "float32")}
    assert {result["rows"] for result in results} >= {1, 127, 128, 129}
    for result in results:
        assert (result["wrong"], result["overwritten"], result["factors_changed"]) == (0, 0, 0), result
