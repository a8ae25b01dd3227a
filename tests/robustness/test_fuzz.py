"""Malformed input gives only our own errors, within time and memory; patches are accepted and refused as by git."""

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from robustness import fuzz
from robustness.parsers import PARSERS
from sparkforge.core.errors import SparkforgeError

pytestmark = [pytest.mark.needs("cc", "git"), pytest.mark.timeout(300)]
SEED = 13
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
READS_JSON = ("architecture", "failure-record", "manifest", "result", "server-record")


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_samples(name, monkeypatch):
    """The first inputs are the samples themselves."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    counts = fuzz.campaign(name, int(1000 / PARSERS[name].cost), 120.0, SEED)
    assert not counts["failures"], fuzz.show(counts)
    assert counts["accepted"]


@pytest.mark.parametrize("name", READS_JSON)
def test_every_json_value(name, tmp_path, monkeypatch):
    """Inputs are valid JSON of any shape, with the keys that the parser knows."""
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "state"))
    known = [key for sample in PARSERS[name].samples(tmp_path) for key in json.loads(sample)]
    values = JSON | st.dictionaries(st.sampled_from(known), JSON, min_size=1)

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(value=values)
    def read(value):
        with contextlib.suppress(SparkforgeError):
            PARSERS[name].read(json.dumps(value).encode(), tmp_path)

    read()
