"""The engine's facts, and the error for each of its failures. The answers are recorded, the transport is real."""

import json
import socket

import pytest
from expected import refused
from programs import write_program

from sparkforge.core import errors
from sparkforge.image import engine, volume


def look():
    with engine.connected() as client:
        return engine.read(client)


def test_facts_come_from_the_engine(fake_engine):
    facts = look()
    assert (facts.version, facts.platform, facts.root) == ("26.1.5+dfsg1", "linux/amd64", "/var/lib/docker")
    assert (facts.runtimes, facts.rootless, facts.gpu) == (("io.containerd.runc.v2", "runc"), False, "")
    fake_engine.info["Architecture"] = "aarch64"
    assert look().platform == "linux/arm64"


def test_the_ways_to_a_gpu_and_without_one_the_toolkit_is_the_fix(fake_engine, docker_command):
    with refused("engine.gpu", r"runtimes io.containerd.runc.v2, runc .* nvidia-ctk"):
        look().require_gpu()
    write_program(docker_command.folder / "nvidia-container-runtime-hook", "")
    assert look().gpu == "nvidia-container-runtime-hook"
    for change, message in (
        ({"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}, "CDI device nvidia.com/gpu=0"),
        ({"Runtimes": {"runc": {}, "nvidia": {"path": "nvidia-container-runtime"}}}, "NVIDIA runtime"),
    ):
        fake_engine.info |= change
        assert look().gpu == message
        look().require_gpu()


@pytest.mark.parametrize("host", ["none.sock", "nonsense", "unix://", "tcp://127.0.0.1:1", "ssh://"])
def test_no_engine_and_no_command_is_not_installed(tmp_path, monkeypatch, no_docker, host):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/{host}" if host == "none.sock" else host)
    with pytest.raises(errors.SparkforgeError, match=r"docs\.docker\.com" if host == "none.sock" else None):
        look()


@pytest.mark.parametrize(("name", "why"), [("none.sock", "No such file"), ("left.sock", "refused")])
def test_a_command_without_its_engine_is_not_running(tmp_path, monkeypatch, docker_command, name, why):
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "left.sock"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/{name}")
    with pytest.raises(errors.EngineError, match=f"{why}.*systemctl start docker"):
        look()


def test_a_refused_socket_is_a_matter_of_the_group(fake_engine, monkeypatch):
    import docker.transport.unixconn as transport

    class Refused(socket.socket):
        def connect(self, _address):
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(transport.socket, "socket", Refused)
    with pytest.raises(errors.EngineError, match="usermod -aG docker"):
        look()


def test_an_engine_that_does_not_answer_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SECONDS", 0.3)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/d.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "d.sock"))
        silent.listen()
        with pytest.raises(errors.EngineError, match="no answer within"):
            look()


@pytest.mark.parametrize(
    ("message", "code"), [("write /x: no space left on device", "storage.full"), ("nobody foresaw", "engine.failed")]
)
def test_each_error_of_the_engine_is_named(fake_engine, message, code):
    fake_engine.routes["GET /info"] = lambda query: (500, {"message": message})
    with refused(code, message):
        look()


def test_a_containers_state(fake_engine):
    with engine.connected() as client:
        state = engine.state(client, "c0ffee")
        assert (state.status, state.health, state.health_output, state.runs) == ("running", "healthy", "fine", True)
        fake_engine.container["State"] |= {"Status": "exited", "ExitCode": 30, "OOMKilled": True}
        del fake_engine.container["State"]["Health"]
        state = engine.state(client, "c0ffee")
        assert (state.runs, state.exit_code, state.health, state.out_of_memory) == (False, 30, "", True)
        fake_engine.routes[r"GET /containers/\w+/json"] = lambda query: (404, {"message": "No such container: x"})
        assert engine.state(client, "c0ffee") is None


def test_health_check_output_before_a_restart_is_ignored(fake_engine):
    log = [{"Start": "2026-11-22T10:59:59.123456789+01:00", "Output": "the server ended too often"}]
    fake_engine.container["State"]["Health"] = {"Status": "starting", "Log": log}
    fake_engine.container["State"]["StartedAt"] = "2026-11-22T10:00:00.000000001Z"
    with engine.connected() as client:
        assert not engine.state(client, "c0ffee").health_output
        fake_engine.container["State"]["StartedAt"] = "2026-11-22T09:59:59Z"
        assert engine.state(client, "c0ffee").health_output == "the server ended too often"


def test_the_newest_container_of_the_service_runs_only_if_its_engine_says_so(
    fake_engine, monkeypatch, tmp_path, docker_command
):
    listed = [{"Id": "old", "Created": 1}, {"Id": "new", "Created": 2}]
    fake_engine.routes["GET /containers/json"] = lambda query: (200, listed)
    with engine.connected() as client:
        assert engine.service_container(client, "sparkforge", "vllm") == "new"
    assert "com.docker.compose.service=vllm" in fake_engine.asked[-1][1]["filters"]
    assert engine.runs("c0ffee")
    fake_engine.container["State"]["Status"] = "exited"
    assert not engine.runs("c0ffee")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert not engine.runs("c0ffee")


@pytest.fixture
def checkout(empty_root, fake_engine, docker_command):
    (empty_root / "docker-compose.yml").write_text("services: {}\n")
    service = {"image": "sparkforge/vllm:embedded", "ports": [{"published": "8000"}],
               "environment": {"SPARKFORGE_STACK": "embedded"}}  # fmt: skip
    config = {"services": {"vllm": service}, "volumes": {"cache": {"name": "mine_cache"}}}
    docker_command.answers("config --format json", out=json.dumps(config))
    fake_engine.routes[r"GET /volumes/mine_cache"] = lambda query: (200, {"Name": "mine_cache"})
    return docker_command


def test_a_running_server_is_asked_itself_because_only_there_its_processes_are_seen(checkout, fake_engine):
    fake_engine.container["State"]["Status"] = "running"
    assert volume.run_cache("clean", "--module", "fused_moe_*") == 0
    container = "c0ffee" * 10
    command = "/opt/venv/bin/python -m sparkforge.compile.cache clean --module fused_moe_*"
    assert checkout.calls[-1] == f"exec {container} {command}"


def test_without_a_server_a_container_reads_the_volume_and_has_no_privilege(checkout, fake_engine):
    fake_engine.routes[r"GET /containers/json"] = lambda query: (200, [])
    checkout.answers("run --rm", code=2)
    assert volume.run_cache("list") == 2
    command = checkout.calls[-1].split()
    assert command[command.index("--volume") + 1] == "mine_cache:/var/cache/sparkforge"
    for flag, value in (("--network", "none"), ("--cap-drop", "ALL"), ("--user", "1000:1000")):
        assert command[command.index(flag) + 1] == value
    assert {"--rm", "--read-only", "no-new-privileges:true"} <= set(command)


def test_without_its_image_the_build_is_named_and_without_a_volume_nothing_is_done(checkout, fake_engine, capsys):
    fake_engine.routes[r"GET /containers/json"] = lambda query: (200, [])
    fake_engine.routes[r"GET /images/.+/json"] = lambda query: (404, {"message": "No such image"})
    with refused("engine.image"):
        volume.run_cache("list")
    fake_engine.routes[r"GET /volumes/mine_cache"] = lambda query: (404, {"message": "no such volume"})
    assert volume.run_cache("list") == 0
    assert "there is no volume mine_cache" in capsys.readouterr().err
