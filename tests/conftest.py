"""What every test gets: a state and a cache of its own, so that no test sees the checkout's."""

import pytest


@pytest.fixture(autouse=True)
def own_places(tmp_path_factory, monkeypatch, request):
    if request.node.get_closest_marker("integration"):
        return  # these bring real files; the shared cache, verified by hash, saves downloading them again
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path_factory.mktemp("state")))
    monkeypatch.setenv("SPARKFORGE_CACHE", str(tmp_path_factory.mktemp("cache")))
