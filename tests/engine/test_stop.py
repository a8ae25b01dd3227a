"""How the embedded container ends: on SIGTERM, and when its validation fails. After the tests that need it running."""

import json
import threading
import time
import urllib.error
import urllib.request

URL = "http://127.0.0.1:18000"
MODEL = "tiny-gpt-oss"


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
