"""The accuracy gate on real vLLM serving the trained tiny model: right weights pass, every broken kernel fails."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import serving

from sparkforge.bench import baselines, gate
from sparkforge.core.paths import ROOT
from sparkforge.image.devices import EMBEDDED
from sparkforge.models.tiny import write_tiny
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan
from sparkforge.serve.settings import TINY_ID

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
HERE = Path(__file__).parent
RIGHT = ["none", "requantized", "mxfp8"]
WRONG = [
    "nibbles_swapped", "scale_off_by_one", "clamp_removed", "gate_up_bias_dropped", "down_bias_dropped",
    "mxfp8_scale_off_by_one",
]  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory, free_port, forking):
    """One server for all faults: its experts read the fault from a file; see faulty_experts.py."""
    work, port = tmp_path_factory.mktemp("gate"), free_port()
    (work / "fault").write_text("none")
    plan, model = StartPlan(EMBEDDED, port=port), write_tiny(work / "tiny")
    launch = forking(in_environment.Embedded(plan, Path(sys.executable), model).launch())
    variables = {"SPARK_MXFP4_KERNEL": "faulty_experts:faulty", "FAULT_FILE": str(work / "fault")}
    # The cache must not keep results of another fault.
    launch = dataclasses.replace(launch, command=(*launch.command, "--no-enable-prefix-caching"))
    with serving(launch, TINY_ID, work, (ROOT, HERE), **variables) as endpoint:
        yield SimpleNamespace(endpoint=endpoint, fault=work / "fault", log=work / "log")


def verdict(served, fault, **changes):
    table = baselines.load().model_copy(update=changes)
    served.fault.write_text(fault)
    return gate.run(served.endpoint, table, gate.passage(table, ""))


@pytest.mark.parametrize("fault", RIGHT)
def test_what_computes_rightly_passes(served, fault):
    result = verdict(served, fault)
    assert result.passed, [check.told for check in result.checks if not check.ok]
    assert {"canary: first_token", "canary: content", "canary: tool_call"} <= {check.name for check in result.checks}
    assert "Using 'SPARK_FAULTY_EXPERTS:FAULTY' Mxfp4 MoE backend" in served.log.read_text(errors="replace")


@pytest.mark.parametrize("fault", WRONG)
def test_every_fault_fails_the_gate(served, fault):
    result = verdict(served, fault, canaries=[])  # a broken kernel would answer canaries up to the token limit
    failures = [check.told for check in result.checks if not check.ok]
    assert any(line.startswith("bits_per_byte is ") and "must be ≤" in line for line in failures), result


def test_hello_gets_words(served):
    served.fault.write_text("none")
    answer = "".join(delta.text for delta in served.endpoint.stream_chat([{"role": "user", "content": "Hello"}], 64))
    assert len(answer.split()) > 5, answer
    assert answer.isascii()
