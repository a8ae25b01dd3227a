"""A real vLLM that cannot start, and the doctor who says why."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from sparkforge.core.errors import RefusalError, ServerError
from sparkforge.core.paths import ROOT
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import failure, launch
from sparkforge.serve.devices import embedded
from sparkforge.serve.plan import StartPlan

pytestmark = pytest.mark.integration


@pytest.mark.nightly  # tests/unit/doctor reads the recorded log of such a start
def test_a_kv_cache_without_room_is_the_first_finding(up, tmp_path, monkeypatch, free_port, forking):
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path))
    python, model = up.state / "envs" / "embedded" / "bin" / "python", up.state / "models" / "tiny-gpt-oss"
    server = embedded.Embedded(StartPlan(EMBEDDED, port=free_port()), python, model).launch()
    environment = {name: value for name, value in server.environment.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    command = (*server.command, "--kv-cache-memory-bytes", str(1 << 20))
    with (
        pytest.raises(ServerError, match="inv doctor", check=lambda error: error.code == "server.start"),
        failure.remembered(),
    ):
        launch.start(forking(dataclasses.replace(server, command=command, environment=environment)), lambda _: None)

    arguments = [sys.executable, "-m", "invoke", "doctor", "--json", "--bundle", str(tmp_path / "support.tar.gz")]
    completed = subprocess.run(arguments, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert completed.returncode == RefusalError.exit_code, completed.stderr
    problems = json.loads(completed.stdout)["problems"]
    assert [problem["id"] for problem in problems] == ["kv-cache-too-small", "engine-core-failed", "last-up"]
    assert "4096" in problems[0]["places"][0]["text"]
    assert problems[1]["causes"] == ["kv-cache-too-small"]
    assert "logs/" in completed.stderr
    assert (tmp_path / "support.tar.gz").stat().st_size > 1000


def test_a_server_that_serves_well_gives_nothing_to_say(up):
    (up.state / failure.NAME).unlink(missing_ok=True)  # another test may have asked for a wrong model
    result = up.inv("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing that is known to go wrong was found" in result.stdout
