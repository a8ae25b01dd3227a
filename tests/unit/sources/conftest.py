"""Small archives and pins for the tests of the stages, and a way to kill a stage at each of its steps."""

import itertools
import os
import signal
import sys
import traceback
from types import SimpleNamespace

import pytest

from sparkforge.pins import Component, Pins
from sparkforge.sources import trees

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


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


def kill_at_each_step(action, check):
    """Run `action` in a child killed at its Nth change to the disk, then `check()`, for every N; return the last N."""
    for step in itertools.count(1):
        child = os.fork()
        if child == 0:
            _die_at(step, action)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the action failed by itself"
            check()
            return step - 1
        assert os.WTERMSIG(status) == signal.SIGKILL
        check()
    return None


def _die_at(step, action):
    seen = itertools.count(1)

    def hook(event, arguments):
        changes = event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES)
        if changes and next(seen) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        action()
    except BaseException:  # noqa: BLE001 - the child must not return into pytest
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """The machine does not lose power here, and a sync waits for everybody's disk."""
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture(scope="session")
def kit(kit):
    def upstream(files):
        """Seed the sdist of `up` 1 with `files` and return the table that pins it."""
        return table({"up": component({"up-1.tar.gz": kit.seed("up-1.tar.gz", kit.sdist("up-1", files))})})

    return SimpleNamespace(
        sdist=kit.sdist,
        seed=kit.seed,
        component=component,
        table=table,
        upstream=upstream,
        install_pins=install_pins,
        kill_at_each_step=kill_at_each_step,
    )
