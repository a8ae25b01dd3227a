"""Small archives and pins for the tests of the stages."""

import os
from types import SimpleNamespace

import pytest

from sparkforge.pins import Component, Pins, index

# A git dependency that the build of the package `up` downloads; its address has no server.
DEPENDENCY = {
    "of": "up", "asked_in": "CMakeLists.txt", "dependency": "dep", "repository": "https://127.0.0.1:9/dep.git",
    "tag": "d" * 40, "commit": "d" * 40, "tree": "unknown", "size": "unknown", "licence": "MIT", "needed": True,
    "why": "wanted", "src_dir": "DEP_SRC_DIR",
}  # fmt: skip
DECLARED = f"FetchContent_Declare(dep GIT_REPOSITORY {DEPENDENCY['repository']} GIT_TAG {DEPENDENCY['tag']})"
ASKS = f"if(NOT DEP_SRC_DIR)\n{DECLARED}\nendif()\n"


def component(files, **changes):
    files = {name: {"sha256": sha256, "size": "unknown"} for name, sha256 in files.items()}
    values = {"version": "1", "kind": "sdist", "package": "up", "licence": "MIT", "why": "test", "files": files}
    return Component(**{**values, **changes})


def table(components, git=None):
    stack = {"summary": "a stack", "git": git or {}, "components": components}
    return Pins.model_validate({"schema": 1, "default": "s", "stacks": {"s": stack}})


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    """Skip syncs, because tests do not lose power and a sync waits for all programs' writes; retry at once."""
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(index, "FIRST_WAIT", 0.0)


@pytest.fixture(scope="session")
def kit(kit):
    def upstream(files):
        return table({"up": component({"up-1.tar.gz": kit.seed("up-1.tar.gz", kit.sdist("up-1", files))})})

    more = {"component": component, "table": table, "upstream": upstream, "asks": ASKS, "dependency": DEPENDENCY}
    return SimpleNamespace(**vars(kit), **more)
