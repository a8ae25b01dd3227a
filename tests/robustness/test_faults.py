"""Failing disk operations, and SIGKILL at steps and moments: nothing is lost, and the next run recovers."""

import pytest

from robustness.scenarios import SCENARIOS

pytestmark = [pytest.mark.needs("cc"), pytest.mark.timeout(1800)]
SEED = 13


@pytest.fixture(scope="module", params=[(6, 4), pytest.param((24, 16), marks=pytest.mark.nightly)])
def rows(attack, request):
    """The counts of every scenario, all run by one process, because its start takes as long as thirty runs.

    12 faults and 8 kills cover each kind of operation once. `./inv test --robustness` runs as many as its time allows.
    """
    faults, kills = request.param
    return attack("faults", *SCENARIOS, "--faults", faults, "--kills", kills, "--seed", SEED)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_disk_that_fails_and_a_kill_at_any_step(rows, name):
    """Each run ends with one of our errors or is killed, and no incomplete artifact is accepted."""
    assert not rows[name]["failures"]
    assert rows[name]["faults"]
    assert rows[name]["kills"]
