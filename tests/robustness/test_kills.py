"""SIGKILL at steps and at moments: nothing lost, no half artifact accepted, and the next run heals."""

import pytest

from robustness.scenarios import SCENARIOS

pytestmark = [pytest.mark.needs("cc"), pytest.mark.timeout(1800)]
SEED = 13


@pytest.fixture(scope="module")
def rows(attack):
    """The counts of every scenario: one process runs them all, for starting it takes as long as thirty runs."""
    return attack("faults", *SCENARIOS, "--faults", 0, "--kills", 10, "--seed", SEED)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_at_any_step(rows, name):
    assert not rows[name]["failures"], rows[name]["shown"]
    assert rows[name]["kills"]
