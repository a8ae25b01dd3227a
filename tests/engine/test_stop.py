"""How the embedded container ends: when its engine dies, and on SIGTERM. Runs after the tests that need it."""

import http.client
import json
import os
import signal
import threading
import time
import urllib.request

from waiting import wait_for

URL = "http://127.0.0.1:18000"
MODEL = "tiny-gpt-oss"


def test_a_dead_engine_ends_the_container_with_a_code_and_docker_starts_it_again(served):
    """vLLM's API server exits with success when its engine dies, but `on-failure` must see a failure."""
    container = served.container()
    before = served.engine.inspect(container)["RestartCount"]
    rows = served.engine.docker("top", container, "-eo", "pid,args").splitlines()
    (engine_core,) = [int(row.split()[0]) for row in rows if "EngineCore" in row]
    os.kill(engine_core, signal.SIGKILL)
    wait_for(lambda: served.engine.inspect(container)["RestartCount"] > before, 300, pause=0.5)
    assert served.engine.inspect(container)["RestartCount"] == before + 1
    assert "the server ended by itself; exit code 24" in served.logs()
    served.wait_healthy()


def test_sigterm_lets_a_running_answer_end_and_leaves_no_orphan(served):
    answer, answering = [], threading.Event()
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}

    def ask():
        request = urllib.request.Request(
            f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                for line in reply:
                    answering.set()
                    if line.startswith(b"data: {") and (usage := json.loads(line[6:]).get("usage")):
                        answer.append(usage["completion_tokens"])
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer.append(repr(error))

    asking = threading.Thread(target=ask)
    asking.start()
    assert answering.wait(120), answer
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
