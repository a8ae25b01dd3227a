"""The docker command, pip and uv: arguments, and the errors for their real messages."""

import os

import pytest
from expected import refused
from programs import write_program

from sparkforge.core import docker as docker_cli
from sparkforge.core import errors, installers
from sparkforge.core.process import started_at

UNPULLED = (
    '#3 ERROR: failed to do request: Head "https://registry.test/v2/base/manifests/sha256:00": dial tcp: lookup '
    "registry.test: no such host\n"
    "Dockerfile:12\nERROR: failed to solve: registry.test/base:1@sha256:00: failed to resolve source metadata for "
    "registry.test/base:1@sha256:00: failed to do request: no such host\n"
)
DAEMON = "Error response from daemon: "
# Printed by docker 26.1 and 28.2, buildx 0.13 and compose 2.26 → the code of our error, and words of its fix.
MESSAGES = {
    UNPULLED: ("engine.base", "docker login"),
    'Head "https://10.0.0.2:5000/v2/x/manifests/1": no basic auth credentials': (
        "engine.registry", "docker login 10.0.0.2:5000"),
    'Head "https://10.0.0.2:5000/v2/x/manifests/1": tls: failed to verify certificate: x509: unknown authority': (
        "engine.registry", "/etc/docker/certs.d/10.0.0.2:5000/ca.crt"),
    'Get "https://10.0.0.2:5000/v2/": dial tcp: i/o timeout': ("engine.registry", "the network"),
    "Cannot connect to the Docker daemon at unix:///nope. Is the docker daemon running?": ("engine.down", "systemctl"),
    "failed to connect to the docker API at unix:///x; check if the path is correct": ("engine.down", "systemctl"),
    "permission denied while trying to connect to the Docker daemon socket at unix:///x": ("engine.permission", "-aG"),
    "docker: 'buildx' is not a docker command.\nSee 'docker --help'": ("engine.tool", "docker-buildx-plugin"),
    "ERROR: BuildKit is enabled but the buildx component is missing or broken.": ("engine.tool", "buildx"),
    "docker: 'compose' is not a docker command.\nSee 'docker --help'": ("engine.tool", "docker-compose-plugin"),
    "unknown shorthand flag: 'p' in -p\nSee 'docker --help'.": ("engine.tool", "compose"),
    "ERROR: OCI exporter is not supported for the docker driver.\nSwitch to a different driver": (
        "engine.store", "containerd-snapshotter"),
    f'{DAEMON}could not select device driver "" with capabilities: [[gpu]].': ("engine.gpu", "nvidia-ctk"),
    f"{DAEMON}CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all": ("engine.gpu", "nvidia-ctk"),
    "ERROR: failed to solve: write /x: no space left on device": ("storage.full", "docker builder prune"),
    f"{DAEMON}Bind for 127.0.0.1:8000 failed: port is already allocated": ("server.port", "--port 8001"),
    "ERROR: no matching manifest for linux/arm64 in the manifest list entries": ("integrity.image", "./inv build"),
    "exec /usr/bin/tini: exec format error": ("integrity.image", "./inv build"),
    f"{DAEMON}No such image: nope:latest": ("engine.image", "./inv build"),
    f'{DAEMON}failed to resolve reference "docker.io/library/base:ci": …': ("engine.image", "./inv build"),
    "something else": ("engine.failed", "docker compose up   # by hand"),
    "": ("engine.failed", "# by hand"),
}  # fmt: skip


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return lambda lines: write_program(tmp_path / "docker", lines)


@pytest.mark.parametrize("text", MESSAGES, ids=lambda text: text[:40] or "nothing")
def test_a_message_becomes_its_error_with_a_fix(script, tmp_path, text):
    (tmp_path / "message").write_text(f"noise\n{text}\nmore\n" if text else "")
    script(f"cat {tmp_path}/message >&2; exit 1")
    with pytest.raises(errors.SparkforgeError) as caught:
        docker_cli.docker(["compose", "up"])
    code, fix = MESSAGES[text]
    assert (caught.value.code, caught.value.family) == (code, code.partition(".")[0])
    assert fix in caught.value.fix
    lines = text.splitlines() or ["it printed nothing"]
    assert any(line in caught.value.why for line in lines)
    assert code == "engine.failed" or "noise" not in caught.value.why


def test_a_plugin_tells_its_version_or_is_missing_like_the_command(script, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(errors.EngineError, match=r"docs\.docker\.com"):
            docker_cli.docker(["info"])
    missing = "echo \"docker: '$1' is not a docker command.\" >&2; exit 1"
    script(f"[ $1 = compose ] && echo 'Docker Compose version 2.26.1' && exit 0\n{missing}")
    assert docker_cli.require_plugin("compose").endswith("2.26.1")
    with pytest.raises(errors.EngineError, match="docker-buildx-plugin"):
        docker_cli.require_plugin("buildx")


@pytest.mark.slow
def test_a_build_prints_its_steps_and_keeps_its_log(script, tmp_path):
    script("echo '#5 [runtime 2/9] COPY pins.toml /opt/'; sleep 0.6; echo '#5 DONE 0.0s'")
    steps = []
    docker_cli.docker_logged(["buildx", "build"], tmp_path / "logs" / "build.log", steps.append)
    assert set(steps) == {"[runtime 2/9] COPY pins.toml /opt/"}
    assert "DONE" in (tmp_path / "logs" / "build.log").read_text()


@pytest.mark.parametrize(
    ("lines", "why"),
    [("echo '#9 3.2 cc1plus: fatal error'; exit 3", "cc1plus"), ("echo 'connect: refused'; seq 4000; exit 1", "4000")],
)
def test_a_build_that_fails_gives_its_last_lines_and_its_log(script, tmp_path, lines, why):
    script(lines)
    with refused("engine.failed", why) as caught:
        docker_cli.docker_logged(["buildx", "build"], tmp_path / "build.log", print)
    assert caught.value.fix == f"less {tmp_path}/build.log"


def test_ctrl_c_ends_the_build(script, tmp_path):
    script(f"echo $$ > {tmp_path}/pid; echo '#1 [a 1/1] RUN x'; sleep 600")

    def interrupted(_text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        docker_cli.docker_logged(["buildx", "build"], tmp_path / "build.log", interrupted)
    assert started_at(int((tmp_path / "pid").read_text())) is None


OFFERED = "ERROR: Could not find a version that satisfies the requirement demo==1.0 (from versions: {})\n"
TIMEOUT = (
    "error: Failed to fetch: `https://x/demo/`\n  Caused by: error sending request\n  Caused by: operation timed out\n"
)
UNREACHABLE = """\
error: Failed to fetch: `https://proxy.example.org/timeout/demo/`
  Caused by: Connection refused (os error 111)
"""
CONFLICT = """\
Looking in indexes: https://x/simple
ERROR: Cannot install torch==2.13.0+cpu because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested torch==2.13.0+cpu
    The user requested (constraint) torch<=2.12

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/
"""
CASES = {
    "a constraint": (CONFLICT, "is needed, and a constraint of pip's settings demands torch<=2.12"),
    "another Python": (OFFERED.format("0.8, 0.9"), "no demo==1.0 for this Python and machine, only 0.8, 0.9"),
    "busy": ("error: Failed to fetch: http://x/\n  cause: HTTP status server error (503 Service", "busy (503 S"),
    "silence": (TIMEOUT, "stopped answering"),
    "refused": (UNREACHABLE, "nothing answers"),
    "no name": ("dns error: failed to lookup address information: Name or service", "cannot be resolved"),
    "credentials": ("hint: An index URL (http://x) could not be queried (401 Unauthorized)", "refuses the credentials"),
    "hash, uv": ("error: Failed to download `demo==1.0`\n  cause: Hash mismatch for `demo==1.0`\n", "demo==1.0 with"),
    "hash, pip": ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM\n    demo==1.0 from http://x", "demo==1.0 with"),
    "missing": ("Because demo was not found in the package registry and you\n    require demo==1.0", "has no demo"),
    "full disk": ("ERROR: Could not install due to an OSError: [Errno 28] No space left on device", "no space"),
    "certificate": ("Caused by: invalid peer certificate: UnknownIssuer", "certificate is not trusted"),
    "a proxy": ("  Caused by: client error (Connect)\n  Caused by: tunnel error: unsuccessful", "proxy refuses"),
    # Words in a mirror's address and in package names are no causes.
    "a mirror called proxy": (f"Looking in: https://proxy.example.org/\nhttp-proxy\n{UNREACHABLE}", "nothing answers"),
    "a package called timeout": ("Collecting async-timeout==9\n" + OFFERED.format("4.0"), "no demo==1.0 for this"),
    "unknown": ("Collecting demo\nERROR: something new happened\nWARNING: a newer pip\n", "something new happened"),
    "unknown, without an error": ("Collecting demo\nit broke\n\nWARNING: a newer pip\n", "it broke"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_is_one_line_with_its_cause(case, monkeypatch):
    monkeypatch.setenv("PIP_CONSTRAINT", "limits.txt")
    output, cause = CASES[case]
    refusal = installers.refusal(output)
    assert cause in refusal.cause
    assert "\n" not in refusal.cause
    assert refusal.busy is (case in {"busy", "silence", "no name"})
    assert refusal.fix
    assert ("PIP_CONSTRAINT=limits.txt" in refusal.cause) == (case == "a constraint")


@pytest.mark.parametrize(("failures", "attempts"), [(1, 2), (9, 3)])
def test_a_busy_index_is_asked_again(monkeypatch, failures, attempts):
    monkeypatch.setattr(installers, "RETRY_SECONDS", (0.01, 0.01))
    outputs = [CASES["busy"][0]] * failures + [""] * 3
    lines, asked = [], []
    refused = installers.insist(lambda: asked.append(1) or outputs.pop(0), lines.append, "the wheel")
    assert (len(asked), refused is None) == (attempts, failures < 3)
    assert len(lines) == attempts - 1
