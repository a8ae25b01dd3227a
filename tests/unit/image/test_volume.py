"""The container's kernel cache from the host: which container reads the volume, and with what."""

import json

import pytest
from expected import refused

from sparkforge.core import paths
from sparkforge.image import volume


@pytest.fixture
def checkout(tmp_path, monkeypatch, fake_engine, docker_command):
    (tmp_path / "docker-compose.yml").write_text("services: {}\n")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    service = {"image": "sparkforge/vllm:embedded", "ports": [{"published": "8000"}],
               "environment": {"SPARKFORGE_STACK": "embedded"}}  # fmt: skip
    config = {"services": {"vllm": service}, "volumes": {"cache": {"name": "mine_cache"}}}
    docker_command.answers("config --format json", out=json.dumps(config))
    fake_engine.routes[r"GET /volumes/mine_cache"] = lambda query: (200, {"Name": "mine_cache"})
    return docker_command


def last(docker_command):
    return docker_command.calls[-1]


def test_a_running_server_is_asked_itself_because_only_there_its_processes_are_seen(checkout, fake_engine):
    fake_engine.container["State"]["Status"] = "running"
    assert volume.run_cache("clean", "--module", "fused_moe_*") == 0
    container = "c0ffee" * 10
    command = "/opt/venv/bin/python -m sparkforge.compile.cache clean --module fused_moe_*"
    assert last(checkout) == f"exec {container} {command}"


def test_without_a_server_a_container_reads_the_volume_and_has_no_privilege(checkout, fake_engine):
    fake_engine.routes[r"GET /containers/json"] = lambda query: (200, [])
    checkout.answers("run --rm", code=2)
    assert volume.run_cache("list") == 2
    command = last(checkout).split()
    assert command[command.index("--volume") + 1] == "mine_cache:/var/cache/sparkforge"
    for flag, value in (("--network", "none"), ("--cap-drop", "ALL"), ("--user", "1000:1000")):
        assert command[command.index(flag) + 1] == value
    assert {"--rm", "--read-only", "no-new-privileges:true"} <= set(command)


def test_without_a_volume_there_is_nothing_to_do(checkout, fake_engine, capsys):
    fake_engine.routes[r"GET /containers/json"] = lambda query: (200, [])
    del fake_engine.routes[r"GET /volumes/mine_cache"]
    fake_engine.routes[r"GET /volumes/.*"] = lambda query: (404, {"message": "no such volume"})
    assert volume.run_cache("list") == 0
    assert "there is no volume mine_cache" in capsys.readouterr().err


def test_a_volume_whose_image_is_gone_names_the_build(checkout, fake_engine):
    fake_engine.routes[r"GET /containers/json"] = lambda query: (200, [])
    fake_engine.routes[r"GET /images/.+/json"] = lambda query: (404, {"message": "No such image"})
    with refused("engine.image"):
        volume.run_cache("list")
