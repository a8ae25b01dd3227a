"""A server that uses up a real memory cgroup ends with a named error, while other programs in the cgroup respond."""

import pytest

from lab import memory_guard as pressure
from sparkforge.core.memory import measure

pytestmark = pytest.mark.integration


@pytest.fixture
def cgroup():
    if measure().available < 2 * pressure.LIMIT:
        pytest.skip("there is too little memory for a cgroup of 900 MB")
    try:
        with pressure.limited() as cgroup:
            yield cgroup
    except OSError as error:
        pytest.skip(f"this user may not make a memory cgroup ({error}); root may")


def test_a_server_that_takes_all_memory_is_ended_before_the_kernel_must_kill(cgroup, tmp_path):
    result = pressure.trial(cgroup, "as a starting vLLM", pressure.RATES["as a starting vLLM"], tmp_path / "none")
    assert result.named, result
    assert "the container's or cgroup's limit has" in result.why
    assert result.probes > 0  # other programs of the cgroup ran to the end


def test_a_server_killed_by_the_kernel_has_a_named_error_too(cgroup, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKFORGE_GUARD_GIB", "0.000001")  # the guard then ends nothing
    result = pressure.trial(cgroup, "unguarded", pressure.RATES["as a starting vLLM"], tmp_path / "none")
    assert not result.named
    assert result.kills >= 1
    assert result.why.startswith("the kernel killed")
    assert result.code == 137
