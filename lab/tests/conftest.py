"""Fixtures that the laboratory shares with the tests of the product, and a made-up stack for upstream checks."""

import pytest

from lab.tests.fake_stack import world  # noqa: F401
from tests.conftest import (  # noqa: F401
    certificates,
    ended,
    free_port,
    own_folders,
    pytest_runtest_setup,
    state_folders,
    use_pins,
)
from tests.unit.bench.conftest import endpoint, stub  # noqa: F401
from tests.unit.conftest import docker_command, kit, tiny_file  # noqa: F401


@pytest.fixture(autouse=True)
def no_index(monkeypatch, request):
    """Give a test a package index only if it is marked as reading real upstream sources."""
    if not request.node.get_closest_marker("integration"):
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
