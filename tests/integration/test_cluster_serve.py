"""One model over two network namespaces by vLLM's own multi-node engine on CPU: answers, and the end of a node."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cluster_nodes as namespaces
import psutil
import pytest

from sparkforge.core.process import spawn, started_at, terminate_session
from sparkforge.models import tiny
from sparkforge.serve import client, embedded, record

pytestmark = [pytest.mark.integration, pytest.mark.needs("ip", "ssh", "sshd"), pytest.mark.timeout(1500)]
FLAGS = ("--dtype=float32", "--max-num-seqs=4")
PROMPTS = ("It is a truth universally", "Emma was")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    yield from namespaces.made(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def model(nodes):
    return tiny.write_tiny(nodes.work / "models" / "tiny")


@pytest.fixture(scope="module")
def file(nodes, model, free_port):
    return nodes.config(model=json.dumps(str(model)), flags=json.dumps(FLAGS), port=free_port())


@pytest.fixture(scope="module")
def up(nodes, file):
    done = nodes.inv("cluster.up", "--config", str(file), seconds=900)
    logs = "".join(log.read_text()[-3000:] for log in nodes.work.glob("?/logs/server.log"))
    assert done.returncode == 0, done.stderr + logs
    yield done.stdout.strip()
    nodes.inv("cluster.down", "--config", str(file))


def states(nodes, file):
    done = nodes.inv("cluster.status", "--config", str(file), "--json")
    return done.returncode, json.loads(done.stdout)


def complete(url, prompt, *inside):
    """Return the tokens of an answer and their logprobs."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    script = "import sys, urllib.request as r; print(r.urlopen(r.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json'})).read().decode())"  # noqa: E501
    command = [*inside, sys.executable, "-c", script, f"{url}/completions", json.dumps(body)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    logprobs = answer["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


@pytest.fixture(scope="module")
def answers(nodes, up):
    """What both nodes answer together; they are asked before one of them is killed."""
    return [complete(up, prompt, *nodes.inside(0)) for prompt in PROMPTS]


def test_the_answers_of_two_nodes_are_those_of_one(answers, nodes, model, forking, free_port):
    port = free_port()
    launch = forking(embedded.describe(Path(sys.executable), model, "tiny", port, arguments=FLAGS))
    environment = {**os.environ, **launch.environment, "PYTHONPATH": str(namespaces.ROOT)}
    pid = spawn(launch.command, log=nodes.work / "one.log", env=environment, cwd=nodes.work)
    started, url = started_at(pid), f"http://127.0.0.1:{port}"
    try:
        assert client.wait_until_serving(url, "tiny", time.monotonic() + 600, lambda: started_at(pid) == started)
        for (tokens, logprobs), prompt in zip(answers, PROMPTS, strict=True):
            expected, expected_logprobs = complete(f"{url}/v1", prompt)
            assert tokens == expected
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
    finally:
        terminate_session(pid)


def test_status_and_logs_name_both_nodes(answers, nodes, file):
    code, found = states(nodes, file)
    assert (code, {name: state["state"] for name, state in found.items()}) == (
        0,
        {"head": "running", "worker": "running"},
    )
    lines = nodes.inv("cluster.logs", "--config", str(file), "--lines", "400").stdout.splitlines()
    assert any(line.startswith("head   | ") and "nnodes" in line for line in lines)
    assert any(line.startswith("worker | ") and "headless" in line for line in lines)


def test_a_killed_worker_ends_the_head_within_30_s_by_its_name_and_leaves_nothing(answers, nodes, file):
    mark = record.mark(nodes.work / "b")
    victims = [process for process in psutil.process_iter() if marked(process, mark) and is_worker(process)]
    assert victims
    began = time.monotonic()
    victims[0].send_signal(signal.SIGKILL)
    while states(nodes, file)[1]["head"]["state"] == "running":
        assert time.monotonic() - began < 30
    code, found = states(nodes, file)
    assert code == 24
    assert found["head"]["state"] == "ended"
    assert found["head"]["why"].startswith("node worker: ")
    while left := [
        p.pid for folder in "ab" for p in psutil.process_iter() if marked(p, record.mark(nodes.work / folder))
    ]:
        assert time.monotonic() - began < 45, left
    assert nodes.inv("cluster.down", "--config", str(file)).returncode == 0


def is_worker(process):
    try:
        return "VLLM::Worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def marked(process, mark):
    try:
        return process.environ().get(record.MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
