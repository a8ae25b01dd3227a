"""The docker command: its arguments, and what its complaints mean. The messages are those of real programs."""

import os
import stat

import pytest

from sparkforge.core import docker as docker_cli
from sparkforge.core import errors
from sparkforge.core.process import started_at

# Printed by docker 26.1 and 28.2, buildx 0.13 and compose 2.26 unless a line says where its words come from.
SAID = [
    (
        "ERROR: Cannot connect to the Docker daemon at unix:///nope. Is the docker daemon running?",
        errors.EngineError,
    ),
    ("failed to connect to the docker API at unix:///x; check if the path is correct", errors.EngineError),
    (
        'permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: Get "…"',
        errors.EngineError,
    ),
    ("docker: 'buildx' is not a docker command.\nSee 'docker --help'", errors.EngineError),
    ("ERROR: BuildKit is enabled but the buildx component is missing or broken.", errors.EngineError),
    ("docker: 'compose' is not a docker command.\nSee 'docker --help'", errors.EngineError),
    ("unknown shorthand flag: 'p' in -p\nSee 'docker --help'.", errors.EngineError),
    ("unknown flag: --project-name\nSee 'docker --help'.", errors.EngineError),
    (
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
        errors.EngineError,
    ),
    ("docker: Error response from daemon: unknown or invalid runtime name: nvidia.", errors.EngineError),
    (
        "Error response from daemon: CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all",
        errors.EngineError,
    ),
    ("ERROR: failed to solve: write /x: no space left on device", errors.StorageError),
    (
        "Error response from daemon: … on endpoint x: Bind for 127.0.0.1:8000 failed: port is already allocated",
        errors.ServerError,
    ),
    ("ERROR: no matching manifest for linux/arm64 in the manifest list entries", errors.IntegrityError),
    ("exec /usr/bin/tini: exec format error", errors.IntegrityError),
    ("Error response from daemon: No such image: nope:latest", errors.EngineError),
    (
        'Error response from daemon: failed to resolve reference "docker.io/library/base:ci": failed to do request: …',
        errors.EngineError,
    ),
    ("something else", errors.EngineError),
    ("", errors.EngineError),
]


UNPULLED = (
    '#3 ERROR: failed to do request: Head "https://registry.test/v2/base/manifests/sha256:00": dial tcp: lookup '
    "registry.test: no such host\n"
    "Dockerfile:12\nERROR: failed to solve: registry.test/base:1@sha256:00: failed to resolve source metadata for "
    "registry.test/base:1@sha256:00: failed to do request: no such host\n"
)


def test_a_base_that_cannot_be_pulled_is_named_and_not_taken_for_an_image_of_ours():
    error = docker_cli.explained(UNPULLED, "docker compose ended with code 1", "less log")
    assert error.code == "engine.base"
    assert "registry.test/base:1" in error.why
    assert "docker login" in error.fix


@pytest.mark.parametrize(
    ("message", "fix"),
    [("no basic auth credentials", "docker login 10.0.0.2:5000"),
     ("tls: failed to verify certificate: x509: certificate signed by unknown authority",
      "/etc/docker/certs.d/10.0.0.2:5000/ca.crt")],
)  # fmt: skip
def test_what_a_registry_lacks_is_named_with_the_registry(message, fix):
    error = docker_cli.explained(f'Head "https://10.0.0.2:5000/v2/x/manifests/1": {message}', "docker failed", "")
    assert error.code == "engine.registry"
    assert fix in error.fix


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A `docker` command that runs the given shell lines."""

    def script(lines):
        path = tmp_path / "docker"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return script


@pytest.mark.parametrize(("text", "error"), SAID, ids=[text[:40] or "nothing" for text, _ in SAID])
def test_a_complaint_becomes_its_error_with_a_fix(script, tmp_path, text, error):
    (tmp_path / "said").write_text(text)
    script(f"cat {tmp_path}/said >&2; exit 1")
    with pytest.raises(error) as caught:
        docker_cli.docker(["compose", "up"])
    assert type(caught.value) is error
    assert caught.value.why
    assert caught.value.fix


def test_the_reason_is_the_line_that_was_recognised(script):
    script("echo noise >&2; echo 'Error: port is already allocated' >&2; echo more >&2; exit 1")
    with pytest.raises(errors.ServerError) as caught:
        docker_cli.docker(["compose", "up"])
    assert caught.value.why == "Error: port is already allocated"


def test_arguments_and_variables_arrive_and_stdout_comes_back(script):
    script('printf "%s|" "$@"; echo "$PORT"; echo noise >&2')
    assert docker_cli.docker(["compose", "a b"], env={"PORT": "1"}) == "compose|a b|1\n"


def test_without_the_command_the_fix_is_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.EngineError, match=r"docs\.docker\.com"):
        docker_cli.docker(["info"])


def test_a_plugin_tells_its_version_or_is_missing(script):
    script(
        "[ $1 = compose ] && echo 'Docker Compose version 2.26.1' && exit 0\n"
        "echo \"docker: '$1' is not a docker command.\" >&2; exit 1"
    )
    assert docker_cli.require_plugin("compose").endswith("2.26.1")
    with pytest.raises(errors.EngineError, match="docker-buildx-plugin"):
        docker_cli.require_plugin("buildx")


@pytest.mark.slow
def test_a_build_tells_its_steps_and_its_log_stays(script, tmp_path):
    script("echo '#5 [runtime 2/9] COPY pins.toml /opt/'; sleep 0.6; echo '#5 DONE 0.0s'")
    steps = []
    docker_cli.docker_logged(["buildx", "build"], tmp_path / "logs" / "build.log", steps.append)
    assert set(steps) == {"[runtime 2/9] COPY pins.toml /opt/"}
    assert "DONE" in (tmp_path / "logs" / "build.log").read_text()


def test_a_build_that_fails_points_to_its_log(script, tmp_path):
    script("echo '#9 3.2 cc1plus: fatal error'; exit 3")
    with pytest.raises(errors.EngineError, match="cc1plus") as caught:
        docker_cli.docker_logged(["buildx", "build"], tmp_path / "build.log", print)
    assert caught.value.fix == f"less {tmp_path}/build.log"


def test_an_early_line_of_a_long_log_is_not_taken_for_the_reason(script, tmp_path):
    script("echo 'connect: connection refused'; seq 4000; exit 1")
    with pytest.raises(errors.EngineError):
        docker_cli.docker_logged(["buildx", "build"], tmp_path / "build.log", print)


def test_ctrl_c_ends_the_build(script, tmp_path):
    script(f"echo $$ > {tmp_path}/pid; echo '#1 [a 1/1] RUN x'; sleep 600")

    def interrupted(_text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        docker_cli.docker_logged(["buildx", "build"], tmp_path / "build.log", interrupted)
    assert started_at(int((tmp_path / "pid").read_text())) is None
