"""Disk operations that fail: an error of ours, nothing lost, and the next run heals."""

import pytest

from robustness.scenarios import SCENARIOS

pytestmark = [pytest.mark.needs("cc"), pytest.mark.timeout(1800)]
SEED = 13


@pytest.fixture(scope="module")
def rows(attack):
    """The counts of every scenario: one process runs them all, for starting it takes as long as thirty runs.

    `./inv test --robustness` runs as many as its time allows.
    """
    return attack("faults", *SCENARIOS, "--faults", 16, "--kills", 0, "--seed", SEED)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_disk_that_fails(rows, name):
    assert not rows[name]["failures"], rows[name]["shown"]
    assert rows[name]["faults"]
