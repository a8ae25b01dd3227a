"""The whole benchmark against real vLLM: gate, load, report, and a post to a stub board on loopback."""

import json

import pytest
from findings import faults
from loopback import Quiet, serving

from sparkforge.bench import schema

pytestmark = [pytest.mark.integration, pytest.mark.nightly]  # the server of test_road.py
SHAPE = ["--isl", "32", "--osl", "8", "--warmups", "1", "--num-prompts", "4"]


@pytest.fixture
def board():
    taken = []

    class Handler(Quiet):
        def post(self):
            taken.append(json.loads(self.body()))
            self.reply(200, {})

    with serving(Handler) as server:
        yield taken, f"{server.url}/board"


def inv(up, *arguments):
    return up.inv(*arguments, "--port", str(up.port))


def test_gate_load_report_and_post(up, board, tmp_path):
    taken, url = board
    arguments = ["--conc", "1,2", "--output", str(tmp_path), "--to", url]
    completed = inv(up, "bench.submit", "Team", *SHAPE, *arguments)
    assert completed.returncode == 0, completed.stderr
    (folder,) = tmp_path.glob("batch_isl32_osl8_*")
    assert "Passed: 2\nFailed: 0" in (folder / "summary.txt").read_text()
    result = schema.read(folder / "result_isl32_osl8_conc2.json")
    assert result.gate.tokens > 1800
    assert not result.gate.sanity_only
    m = result.metrics
    assert (m.completed, m.total_input_tokens, m.total_output_tokens) == (4, 4 * 32, 4 * 8)
    assert {check.name for check in result.checks} >= {"the server's own counter agrees"}
    assert result.server.version.startswith("0.32.0")
    assert set(result.server.startup_seconds) == {"environment", "model", "validation", "server"}
    assert result.server.memory_bytes["pss"] > 1e9
    assert faults(result.server.findings) == []
    assert [(post["team"], post["result"]["config"]["conc"]) for post in taken] == [("Team", 1), ("Team", 2)]
    assert str(up.path) not in json.dumps(taken)
