"""The verbs against a real engine: build, up, status, logs, chat, image.*, a refused validation, down. No GPU."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from waiting import wait_for

from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.engine


@dataclass
class Checkout:
    """A checkout whose verbs run as a user runs them, with a separate state folder, port and Compose project."""

    path: Path
    environment: dict
    port: int

    def inv(self, *arguments, **more):
        command = [sys.executable, "-m", "invoke", *arguments]
        env = {**self.environment, **more}
        result = subprocess.run(command, cwd=self.path, env=env, capture_output=True, text=True, check=False)
        assert "Traceback" not in result.stdout + result.stderr
        return result

    def good(self, *arguments, **more):
        result = self.inv(*arguments, **more)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    def docker(self, *arguments):
        command = ["docker", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=True
        ).stdout


@pytest.fixture(scope="module")
def checkout(engine, tmp_path_factory, free_port):
    settings = {"SPARKFORGE_COMPOSE_FILES": "tests/engine/ci.yml", "COMPOSE_PROJECT_NAME": "sparkforge-verbs"}
    settings["SPARKFORGE_STATE"] = str(tmp_path_factory.mktemp("state"))
    checkout = Checkout(ROOT, {**engine.environment, **settings}, free_port())
    checkout.good("build", "--engine", "docker", "--stack", "embedded")
    yield checkout
    checkout.inv("down")
    for project in ("sparkforge-verbs", "sparkforge-verbs-red", "sparkforge-verbs-green"):  # the last two are a fleet's
        with contextlib.suppress(subprocess.CalledProcessError):
            checkout.docker("compose", "--project-name", project, "down", "--volumes")


@pytest.fixture(scope="module")
def served(checkout):
    """The embedded image, served."""
    said = checkout.good("up", "--device", "docker-cpu", "--port", str(checkout.port))
    assert f"http://127.0.0.1:{checkout.port}/v1" in said
    assert "device: docker-cpu, because you asked for it" in said
    assert "first answers received, proved: " in said
    return checkout


def test_status_chat_and_logs_work_with_a_served_container(served):
    status = served.good("status")
    assert f"tiny-gpt-oss at http://127.0.0.1:{served.port}/v1 · healthy, the container says healthy" in status
    log = served.good("logs")
    assert "ok   numerics" in log
    assert "serve: the server may start" in log
    assert served.good("chat", "Hello", "--max-tokens", "4")


def test_the_image_tells_what_it_holds_and_belongs_to_this_checkout(checkout, tmp_path):
    said = checkout.good("image.verify", "--stack", "embedded")
    assert "platform   linux/" in said
    assert "patches    vllm-0.32.0" in said
    assert "every lock as in this checkout" in said
    assert int(re.search(r"audited in the build: (\d+) files hashed", said)[1]) > 5_000
    other = tmp_path / "other"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", ".sparkforge", ".*_cache", "__pycache__", "models", ".hypothesis"
    )
    shutil.copytree(ROOT, other, ignore=left_out)
    with (other / "locks" / "embedded.txt").open("a") as lock:
        lock.write("# changed\n")
    environment = {key: value for key, value in checkout.environment.items() if key != "PYTHONPATH"}
    result = Checkout(other, environment, checkout.port).inv("image.verify", "--stack", "embedded")
    assert result.returncode == 12, result.stdout + result.stderr
    assert "locked set embedded" in result.stderr


def test_down_leaves_nothing_and_a_refusal_ends_with_30_and_its_fix(served):
    assert "stopped" in served.good("down")
    assert served.inv("status").returncode == 24
    listed = ("ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project=sparkforge-verbs")
    assert served.docker(*listed) == ""
    result = served.inv(
        "up", "--device", "docker-cpu", "--port", str(served.port), SPARKFORGE_MODEL="/models/that-is-not-there"
    )
    assert result.returncode == 30, result.stdout + result.stderr
    assert "FAIL model-files" in result.stderr
    assert "./inv pull REPOSITORY" in result.stderr
    assert served.inv("status").returncode == 24
    assert served.docker(*listed, "--filter", "status=running") == ""


def test_a_refused_container_is_restarted_thrice_and_then_stays_down(checkout):
    """The container is started by `docker compose up`, because `./inv` would stop it at the first refusal."""
    settings = {"PORT": str(checkout.port), "SPARKFORGE_MODEL": "/models/that-is-not-there"}
    own = replace(checkout, environment={**checkout.environment, **settings, "SPARKFORGE_STACK": "embedded"})
    files = ("--file=docker-compose.yml", "--file=tests/engine/ci.yml")

    def compose(*more):
        return own.docker("compose", "--project-name", "sparkforge-verbs", *files, *more)

    compose("down")
    compose("up", "--detach", "--no-build", "vllm")
    container = compose("ps", "--all", "--quiet", "vllm").strip()

    def state():
        inspection = json.loads(checkout.docker("inspect", container))[0]
        return inspection["State"]["Status"], inspection["State"]["ExitCode"], inspection["RestartCount"]

    wait_for(lambda: state() == ("exited", 30, 3), 600, state)
    log = compose("logs", "--no-log-prefix", "vllm")
    compose("down")
    assert log.count("validate · profile embedded") == 4
    assert "next: " in log.strip().splitlines()[-1]


def test_a_fleet_of_two_containers_is_one_server(checkout, tmp_path):
    """The second model starts when a request asks for it, in a Compose project of its own."""
    text = "schema = 1\n"
    for name, resident in (("red", "true"), ("green", "false")):
        text += f'[models.{name}]\nmodel = "tiny-gpt-oss"\ndevice = "docker-cpu"\nresident = {resident}\n'
    (tmp_path / "fleet.toml").write_text(text)
    url = f"http://127.0.0.1:{checkout.port}"

    def containers():
        names = checkout.docker("ps", "--all", "--format", "{{.Names}}").split()
        return sorted(name for name in names if name.startswith("sparkforge-verbs-"))

    def fleet():
        return json.loads(checkout.good("status", "--json"))["server"]["fleet"]

    checkout.good("up", "--fleet", str(tmp_path / "fleet.toml"), "--port", str(checkout.port))
    try:
        names = [model["id"] for model in Endpoint(url).get("/v1/models").json()["data"]]
        assert names == ["red", "openai/red", "green", "openai/green"]
        assert containers() == ["sparkforge-verbs-red-vllm-1"]
        hello = [{"role": "user", "content": "Hello"}]
        assert [Endpoint(url, name).chat(hello, max_tokens=4)["model"] for name in names[1:3]] == ["red", "green"]
        assert containers() == ["sparkforge-verbs-green-vllm-1", "sparkforge-verbs-red-vllm-1"]
        body = {"model": "green", "messages": hello, "max_tokens": 1000, "stream": True, "ignore_eos": True}
        moments = [time.monotonic() for _ in Endpoint(url).events("/v1/chat/completions", body)]
        assert moments[-1] - moments[0] > 0.5  # piece by piece
        for row in fleet():
            assert row["state"] == "ready"
            assert row["where"].startswith("container ")
            assert row["memory"] > 500_000_000
    finally:
        checkout.good("down")
    assert containers() == []
    assert checkout.inv("status").returncode == 24
