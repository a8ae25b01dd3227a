"""The same command in four processes at once: each succeeds, or ends with the documented refusal."""

import pytest

from robustness.races import RACED

pytestmark = [pytest.mark.needs("cc"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.nightly)])
def rows(attack, request):
    return attack("races", *RACED, "--rounds", request.param)


@pytest.mark.parametrize("name", RACED)
def test_four_at_once(rows, name):
    assert not rows[name]["failures"]
    assert rows[name]["succeeded"]
