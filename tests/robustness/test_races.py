"""The same command in four processes at once: each ends well, or with the refusal that is documented."""

import pytest

from robustness.races import RACED

pytestmark = [pytest.mark.needs("cc"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def rows(attack):
    """The counts of every scenario, from one process."""
    return attack("races", *RACED, "--rounds", 2)


@pytest.mark.parametrize("name", RACED)
def test_four_at_once(rows, name):
    assert not rows[name]["failures"], rows[name]["shown"]
    assert rows[name]["succeeded"]
