"""A server that uses up a real memory cgroup is ended by name, and its cgroup answers meanwhile."""

import pytest

from sparkforge.bench import pressure
from sparkforge.core.memory import measure

pytestmark = pytest.mark.integration


@pytest.fixture
def place():
    if measure().available < 2 * pressure.LIMIT:
        pytest.skip("there is too little memory for a cgroup of 900 MB")
    try:
        with pressure.limited() as place:
            yield place
    except OSError as error:
        pytest.skip(f"this user may not make a memory cgroup ({error}); root may")


def test_a_server_that_takes_all_memory_is_ended_before_the_kernel_must_kill(place, tmp_path):
    made = pressure.trial(place, "as a starting vLLM", pressure.RATES["as a starting vLLM"], tmp_path / "none")
    assert made.named, made
    assert "the container's or cgroup's limit has" in made.why
    assert made.probes > 0  # other programs of the cgroup ran to the end


def test_what_only_the_kernel_could_end_has_a_name_too(place, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKFORGE_GUARD_GIB", "0.000001")  # it looks on, and ends nothing
    made = pressure.trial(place, "unguarded", pressure.RATES["as a starting vLLM"], tmp_path / "none")
    assert not made.named
    assert made.kills >= 1
    assert made.why.startswith("the kernel killed")
    assert made.code == 137
