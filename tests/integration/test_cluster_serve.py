"""One model over two network namespaces by vLLM's own multi-node engine on CPU: answers, and nodes that die.

The tests share two starts of vLLM over both nodes and one on a single node, so they must run in order.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import cluster_nodes as namespaces
import psutil
import pytest
from programs import write_program
from serving import serving
from waiting import wait_for

from sparkforge.core.process import session_members, started_at, with_variable
from sparkforge.image.devices import EMBEDDED
from sparkforge.models import tiny
from sparkforge.serve import command_line, record
from sparkforge.serve.cluster import node
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan

pytestmark = [
    *(pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1500)),
    pytest.mark.needs(*namespaces.PROGRAMS),
]
FLAGS = ("--dtype=float32", "--max-num-seqs=4")
PROMPTS = ("It is a truth universally", "Emma was")
END_SECONDS, START_SECONDS = 30, 600
ASK = """
import sys, urllib.request as r
request = r.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(r.urlopen(request, timeout=120).read().decode())
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    yield from namespaces.made(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def model(nodes):
    return tiny.write_tiny(nodes.work / "models" / "tiny")


@pytest.fixture(scope="module")
def file(nodes, model, free_port):
    """The configuration file. Its `python` is a script that starts servers as forks of a process with vLLM imported."""
    python = nodes.work / "forking"
    cache = os.environ["VLLM_CACHE_ROOT"]
    write_program(
        python,
        f"""
[ "$2" = validate ] && exec {sys.executable} "$@"
shift
VLLM_CACHE_ROOT={cache} exec {sys.executable} -m {command_line.FORKED} "$@"
""",
    )
    return nodes.config(python=python, model=json.dumps(str(model)), flags=json.dumps(FLAGS), port=free_port())


@pytest.fixture(scope="module")
def up(nodes, file):
    result = nodes.inv("cluster.up", "--config", str(file), seconds=900)
    logs = "".join(log.read_text()[-3000:] for log in nodes.work.glob("?/logs/server.log"))
    assert result.returncode == 0, result.stderr + logs
    yield result.stdout.strip()
    if any(nodes.work.glob("?/server.json")):  # else the last test ended the server
        down = nodes.inv("cluster.down", "--config", str(file), seconds=300)
        assert (down.returncode, left(nodes, "a"), left(nodes, "b")) == (0, [], []), down.stderr


@pytest.fixture(scope="module")
def answers(nodes, up):
    """The completions of the two-node server, before any of its processes is killed."""
    return [complete(up, prompt, *nodes.inside(0)) for prompt in PROMPTS]


def complete(url, prompt, *inside):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    command = [*inside, sys.executable, "-c", ASK, f"{url}/completions", json.dumps(body)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    logprobs = answer["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


def left(nodes, name):
    pids = with_variable(record.MARK, record.mark(nodes.work / name))
    return [pid for pid in pids if started_at(pid) is not None]


def test_the_answers_of_two_nodes_are_those_of_one(answers, nodes, model, forking, free_port):
    plan = StartPlan(EMBEDDED, model_id="tiny", port=free_port(), flags=tuple(FLAGS))
    launch = forking(in_environment.Embedded(plan, Path(sys.executable), model).launch())
    with serving(launch, "tiny", nodes.work) as endpoint:
        for (tokens, logprobs), prompt in zip(answers, PROMPTS, strict=True):
            expected, expected_logprobs = complete(f"{endpoint.url}/v1", prompt)
            assert len(tokens) == 12
            assert tokens == expected
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_status_and_logs_name_both_nodes(answers, nodes, file):
    code, shown = nodes.status(file)
    assert code == 0
    assert {name: node["state"] for name, node in shown["nodes"].items()} == {"head": "running", "worker": "running"}
    assert (shown["restarts"]["state"], shown["restarts"]["failures"]) == ("watching", 0)
    lines = nodes.inv("cluster.logs", "--config", str(file), "--lines", "400").stdout.splitlines()
    assert any(line.startswith("head   | ") and "nnodes" in line for line in lines)
    assert any(line.startswith("worker | ") and "headless" in line for line in lines)


def test_a_killed_worker_ends_the_head_by_its_name_and_both_start_again_in_order(answers, up, nodes, file):
    former = {name: node["pid"] for name, node in nodes.status(file)[1]["nodes"].items()}
    everything = [pid for leader in former.values() for pid in session_members(leader)]
    victims = [pid for pid in left(nodes, "b") if "VLLM::Worker" in " ".join(psutil.Process(pid).cmdline())]
    assert victims
    os.kill(victims[0], signal.SIGKILL)
    wait_for(lambda: not any(map(started_at, everything)), END_SECONDS)
    note = nodes.work / "a/cluster.keep.json"
    log = nodes.work / "a/logs/cluster.log"
    wait_for(lambda: json.loads(note.read_text())["why"].startswith("started again"), START_SECONDS, log.read_text)
    assert "node worker ended this node's part" in (nodes.work / "a/logs/server.previous.log").read_text()
    code, shown = nodes.status(file)
    assert code == 0
    assert {node["state"] for node in shown["nodes"].values()} == {"running"}
    assert shown["restarts"]["failures"] == 1
    assert shown["restarts"]["why"].startswith("started again after: node worker: ")
    kept = log.read_text()
    order = [kept.index(step) for step in ("pausing: node worker: ", "] validation", "] workers", "] head")]
    assert order == sorted(order)
    for (tokens, logprobs), prompt in zip(answers, PROMPTS, strict=True):
        again, logprobs_again = complete(up, prompt, *nodes.inside(0))
        assert again == tokens
        assert logprobs_again == pytest.approx(logprobs, abs=1e-4)


def test_a_killed_head_ends_the_worker_by_its_name_and_down_leaves_no_process(up, nodes, file):
    """Kill all processes of the head at once, as a power loss does, so that none can notify the worker."""
    victims = left(nodes, "a")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in reversed(victims):  # children first, because the kernel signals them when a parent ends
            os.kill(pid, number)
    wait_for(lambda: not left(nodes, "b"), END_SECONDS)
    ended_by, why = node.loss((nodes.work / "b/logs/server.log").read_text())
    assert ended_by == "head"
    assert why.startswith("its connection broke")
    assert nodes.inv("cluster.down", "--config", str(file), seconds=300).returncode == 0
    assert [left(nodes, name) for name in "ab"] == [[], []]
    code, shown = nodes.status(file)
    assert code == 24
    assert {node["state"] for node in shown["nodes"].values()} == {"stopped"}
    assert shown["restarts"]["state"] == "off"
