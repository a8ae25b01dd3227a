"""When an environment is made and when not; the install itself runs for real in tests/integration/test_road.py."""

import json

import pytest

from forge import envs, pins
from sparkforge.errors import BusyError, DiskFullError, FetchError
from sparkforge.files import locked, write_json

ENV = envs.EMBEDDED


@pytest.fixture
def table():
    return pins.load()


@pytest.fixture
def filled(monkeypatch):
    """Count how often the environment is filled; nothing is installed."""

    def fill(env, table, wheels):
        calls.append(env.name)
        (env.path / "bin").mkdir(parents=True)
        if fill.error:
            raise fill.error
        write_json(env.path / envs.STAMP, envs.inputs(env, table))

    calls, fill.error = [], None
    monkeypatch.setattr(envs, "fetch_vllm", lambda table: envs.paths.cache() / "vllm.whl")
    monkeypatch.setattr(envs.torch_cpu, "fetch_torch", lambda component: envs.paths.cache() / "torch.whl")
    monkeypatch.setattr(envs, "_fill", fill)
    fill.calls = calls
    return fill


def test_it_is_made_once(table, filled):
    assert envs.ensure(ENV, table)
    assert not envs.ensure(ENV, table)
    assert filled.calls == ["embedded"]


def test_a_half_made_one_is_made_anew(table, filled):
    (ENV.path / "bin").mkdir(parents=True)
    assert envs.ensure(ENV, table)


@pytest.mark.parametrize("field", ["lock", "torch", "project", "python", "root"])
def test_any_other_input_makes_it_anew(table, filled, field):
    envs.ensure(ENV, table)
    stamp = json.loads((ENV.path / envs.STAMP).read_text())
    write_json(ENV.path / envs.STAMP, {**stamp, field: "another"})
    assert envs.ensure(ENV, table)


def test_a_failed_remake_puts_the_old_one_back(table, filled):
    envs.ensure(ENV, table)
    (ENV.path / "precious").touch()
    write_json(ENV.path / envs.STAMP, {"lock": "an older one"})
    filled.error = FetchError("a", "b", "c")
    with pytest.raises(FetchError):
        envs.ensure(ENV, table)
    assert (ENV.path / "precious").exists()
    assert not ENV.path.with_suffix(".old").exists()
    filled.error = None
    assert envs.ensure(ENV, table)
    assert not (ENV.path / "precious").exists()


def test_a_failed_first_make_leaves_nothing(table, filled):
    filled.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        envs.ensure(ENV, table)
    assert not ENV.path.exists()


def test_too_little_room_is_named_before_anything_starts(table, filled, monkeypatch):
    monkeypatch.setattr(envs, "ROOM", 1 << 60)
    with pytest.raises(DiskFullError, match="embedded environment"):
        envs.ensure(ENV, table)
    assert filled.calls == []


def test_two_at_once_are_one_too_many(table, filled):
    with locked(ENV.path.with_suffix(".lock"), "make it"), pytest.raises(BusyError):
        envs.ensure(ENV, table)
