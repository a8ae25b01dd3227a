"""Independent servers of two network namespaces behind HAProxy: `cluster.up` and all that follows, over real sshds.

The commands ask the head over ssh, too, as from a third machine. The servers are stand-ins (replica.py), which the
file's `python` starts in place of vLLM.
"""

import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cluster_nodes as namespaces
import pytest

from sparkforge.core.process import session_members, with_variable
from sparkforge.serve import record

pytestmark = [pytest.mark.integration, pytest.mark.needs("haproxy", "ip", "ssh", "sshd"), pytest.mark.timeout(300)]
KEY = "key-of-the-replicas"
SERVERS = {namespaces.HEAD, namespaces.WORKER}
# Sends the same request several times and prints status and server of each answer.
ASK = """
import http.client, json, sys
times, port, headers = json.loads(sys.argv[1])
for number in range(times):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    own = {name: value.format(number) for name, value in headers.items()}
    client.request("POST", "/v1/completions", json.dumps({"prompt": "x"}), own)
    answer = client.getresponse()
    answer.read()
    print(answer.status, answer.getheader("X-Served-By"))
"""
# Opens a stream, prints its server and its first event, waits for a line, and prints the rest.
STREAM = """
import http.client, json, sys
client = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
client.request("POST", "/v1/completions", "{}", json.loads(sys.argv[2]))
answer = client.getresponse()
print(answer.getheader("X-Served-By"), answer.fp.readline(), flush=True)
sys.stdin.readline()
print(answer.read(), flush=True)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    yield from namespaces.made(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def port(free_port):
    return free_port()


@pytest.fixture(scope="module")
def file(nodes, port, random_model):
    (nodes.work / "key").write_text(KEY)
    (nodes.work / "key").chmod(0o600)
    stand_in = nodes.work / "stand-in/bin/python"
    stand_in.parent.mkdir(parents=True)
    script = Path(__file__).with_name("replica.py")
    stand_in.write_text(f"""#!/bin/sh
[ "$2" = validate ] && exec echo a stand-in validates nothing
PYTHONPATH={namespaces.ROOT}:{namespaces.ROOT}/tests exec {sys.executable} {script} "$@"
""")
    stand_in.chmod(0o755)
    settings = {"mode": "replicas", "key_file": str(nodes.work / "key"), "model": str(random_model)}
    quoted = {name: json.dumps(value) for name, value in settings.items()}
    ssh = [f"root@{address}" for address in (namespaces.HEAD, namespaces.WORKER)]
    return nodes.config(ssh=ssh, python=stand_in, tensor=1, port=port, **quoted)


@pytest.fixture(scope="module")
def up(nodes, file):
    result = nodes.inv("cluster.up", "--config", str(file))
    assert result.returncode == 0, result.stderr + "".join(
        log.read_text()[-2000:] for log in nodes.work.glob("?/logs/*")
    )
    yield result.stdout.strip()
    if any(nodes.work.glob("?/server.json")):  # else the last test ended it
        nodes.inv("cluster.down", "--config", str(file))


def headers(**more):
    return {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **more}


def ask(nodes, port, times, sent):
    """Return how many answers of each status each server gave."""
    command = nodes.inside(0, sys.executable, "-c", ASK, json.dumps([times, port, sent]))
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return collections.Counter(tuple(line.split()) for line in result.stdout.splitlines())


def test_the_endpoint_is_printed_and_every_part_is_shown(up, nodes, file, port):
    assert up == f"http://127.0.0.1:{port}/v1"
    result = nodes.inv("cluster.status", "--config", str(file), "--json")
    shown = json.loads(result.stdout)
    assert {name: node["state"] for name, node in shown["nodes"].items()} == dict.fromkeys(
        ("head", "worker", "balancer"), "running"
    )
    assert shown["restarts"]["state"] == "watching"


def test_requests_are_balanced_and_the_key_passes(up, nodes, port):
    assert set(ask(nodes, port, 6, headers())) == {("200", server) for server in SERVERS}
    assert {status for status, _ in ask(nodes, port, 2, headers(Authorization="Bearer other"))} == {"401"}


def test_one_session_stays_on_one_server_and_many_use_both(up, nodes, port):
    assert len(ask(nodes, port, 6, headers(**{"X-Session-Id": "one"}))) == 1
    assert set(ask(nodes, port, 20, headers(**{"X-Session-Id": "{}"}))) == {("200", server) for server in SERVERS}


def test_a_stream_comes_unbuffered_and_others_go_to_the_idle_server_meanwhile(up, nodes, port):
    command = nodes.inside(0, sys.executable, "-c", STREAM, str(port), json.dumps(headers(**{"X-Wait": "1"})))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as stream:
        server, event = stream.stdout.readline().split(maxsplit=1)
        assert event.strip() == "b'data: first\\n'"  # and the server has not sent the rest yet
        assert set(ask(nodes, port, 4, headers())) == {("200", *(SERVERS - {server}))}
        subprocess.run(nodes.inside(0, "python3", "-c", GO, f"http://{server}:8001/go"), check=True)
        stream.stdin.write("\n")
        stream.stdin.flush()
        assert stream.stdout.readline().strip() == "b'\\ndata: last\\n\\n'"


GO = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=20)"


def test_the_other_server_answers_for_a_dead_one_which_alone_is_started_again(up, nodes, file, port):
    before = json.loads(nodes.inv("cluster.status", "--config", str(file), "--json").stdout)["nodes"]
    for pid in session_members(before["worker"]["pid"]):
        os.kill(pid, signal.SIGKILL)
    assert set(ask(nodes, port, 6, headers())) == {("200", namespaces.HEAD)}
    note = nodes.work / "a/cluster.keep.json"
    deadline = time.monotonic() + 200
    while not json.loads(note.read_text())["why"].startswith("started again after: "):
        assert time.monotonic() < deadline, (nodes.work / "a/logs/cluster.log").read_text()
        time.sleep(0.2)
    while set(ask(nodes, port, 6, headers())) != {("200", server) for server in SERVERS}:
        assert time.monotonic() < deadline
    after = json.loads(nodes.inv("cluster.status", "--config", str(file), "--json").stdout)["nodes"]
    assert {name: after[name]["pid"] == before[name]["pid"] for name in after} == {
        "head": True, "worker": False, "balancer": True,
    }  # fmt: skip


def test_down_ends_the_servers_and_the_balancer(up, nodes, file):
    assert nodes.inv("cluster.down", "--config", str(file)).returncode == 0
    states = [nodes.work / name for name in ("a", "b", "a/balancer")]
    assert [with_variable(record.MARK, record.mark(state)) for state in states] == [[], [], []]
