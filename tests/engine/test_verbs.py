"""The verbs against a real engine: build, up, status, logs, chat, image.*, a refused validation, down. No GPU."""

import json
import re
import shutil
import time

import pytest
from engine.conftest import Verbs
from waiting import wait_for

from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def checkout(engine, tmp_path_factory, free_port):
    settings = {"SPARKFORGE_COMPOSE_FILES": "tests/engine/ci.yml", "COMPOSE_PROJECT_NAME": "sparkforge-verbs"}
    settings["SPARKFORGE_STATE"] = str(tmp_path_factory.mktemp("state"))
    checkout = Verbs(engine, {**engine.environment, **settings}, free_port())
    checkout.good("build", "--engine", "docker", "--stack", "embedded")
    yield checkout
    checkout.inv("down")
    for project in ("sparkforge-verbs", "sparkforge-verbs-red", "sparkforge-verbs-green"):  # the last two are a fleet's
        engine.docker("compose", "--project-name", project, "down", "--volumes", check=False)


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
    left_out = (".git", ".venv", ".sparkforge", ".*_cache", "__pycache__", "models", ".hypothesis")
    shutil.copytree(ROOT, other, ignore=shutil.ignore_patterns(*left_out))
    with (other / "locks" / "embedded.txt").open("a") as lock:
        lock.write("# changed\n")
    environment = {key: value for key, value in checkout.environment.items() if key != "PYTHONPATH"}
    code, said = Verbs(checkout.engine, environment, checkout.port, other).inv("image.verify", "--stack", "embedded")
    assert code == 12, said
    assert "locked set embedded" in said


def test_down_leaves_nothing_and_a_refusal_ends_with_30_and_its_fix(served):
    assert "stopped" in served.good("down")
    assert served.inv("status")[0] == 24
    listed = ("ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project=sparkforge-verbs")
    assert served.engine.docker(*listed) == ""
    up = ("up", "--device", "docker-cpu", "--port", str(served.port))
    code, said = served.inv(*up, SPARKFORGE_MODEL="/models/that-is-not-there")
    assert code == 30, said
    assert "FAIL model-files" in said
    assert "./inv pull REPOSITORY" in said
    assert served.inv("status")[0] == 24
    assert served.engine.docker(*listed, "--filter", "status=running") == ""


def test_a_refused_container_is_restarted_thrice_and_then_stays_down(checkout):
    """The container is started by `docker compose up`, because `./inv` would stop it at the first refusal."""
    settings = {"PORT": str(checkout.port), "SPARKFORGE_MODEL": "/models/that-is-not-there"}
    files = ("--file=docker-compose.yml", "--file=tests/engine/ci.yml")

    def compose(*more):
        own = {**checkout.environment, **settings, "SPARKFORGE_STACK": "embedded"}
        return checkout.engine.docker("compose", "--project-name", "sparkforge-verbs", *files, *more, env=own)

    compose("down")
    compose("up", "--detach", "--no-build", "vllm")
    container = compose("ps", "--all", "--quiet", "vllm").strip()

    def state():
        inspection = checkout.engine.inspect(container)
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
        names = checkout.engine.docker("ps", "--all", "--format", "{{.Names}}").split()
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
    assert checkout.inv("status")[0] == 24
