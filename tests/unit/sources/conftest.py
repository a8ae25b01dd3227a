"""Small archives and pins for the tests of the stages."""

import os
from types import SimpleNamespace

import pytest

from sparkforge.pins import Component, Pins
from sparkforge.sources import trees


def component(files, **changes):
    files = {name: {"sha256": sha256, "size": "unknown"} for name, sha256 in files.items()}
    values = {"version": "1", "kind": "sdist", "package": "up", "licence": "MIT", "why": "test", "files": files}
    return Component(**{**values, **changes})


def table(components, git=None):
    return Pins.model_validate(
        {
            "schema": 1,
            "default": "s",
            "stacks": {"s": {"summary": "a stack", "git": git or {}, "components": components}},
        }
    )


def install_pins(pins):
    component = next(iter(pins.stack("s").components.values()))
    return trees.tree_folder(component, next(iter(component.files)))


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Skip syncs: tests do not lose power, and a sync waits for all programs' writes."""
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture(scope="session")
def kit(kit):
    def upstream(files):
        return table({"up": component({"up-1.tar.gz": kit.seed("up-1.tar.gz", kit.sdist("up-1", files))})})

    return SimpleNamespace(
        sdist=kit.sdist, seed=kit.seed, component=component, table=table, upstream=upstream, install_pins=install_pins,
    )  # fmt: skip
