"""Three network namespaces at a switch: discovery, checks, and a server on each.

vLLM's CPU build serves no pipeline (docs/hardware.md, Two machines), and nothing else splits a gpt-oss in three.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import cluster_nodes as namespaces
import pytest

from sparkforge.core.process import session_members, with_variable
from sparkforge.serve import record
from sparkforge.serve.cluster import config

pytestmark = [
    *(pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(300)),
    pytest.mark.needs("ip", "iptables", "ssh", "sshd"),
]
NODES = ",".join(f"root@{address}" for address in namespaces.ADDRESSES)
KEY = "key-of-the-replicas"
ASK = """
import http.client, sys
for _ in range(int(sys.argv[1])):
    client = http.client.HTTPConnection("127.0.0.1", int(sys.argv[2]), timeout=30)
    headers = {"Authorization": "Bearer " + sys.argv[3], "Content-Type": "application/json"}
    client.request("POST", "/v1/completions", "{}", headers)
    answer = client.getresponse()
    answer.read()
    print(answer.getheader("X-Served-By"))
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    yield from namespaces.made(tmp_path_factory.mktemp("nodes"), 3)


def discover(nodes, file):
    return nodes.inv("cluster.discover", "--nodes", NODES, "--device", "embedded", "--file", str(file), "--replace")


def findings(nodes, file):
    result = nodes.inv("cluster.check", "--config", str(file), "--json")
    assert result.stdout, result.stderr
    return result.returncode, {finding["check"]: finding for finding in json.loads(result.stdout)}


def test_three_machines_at_a_switch_are_proposed_as_a_pipeline(nodes, tmp_path):
    file = tmp_path / "cluster.toml"
    result = discover(nodes, file)
    assert result.returncode == 0, result.stderr
    proposed = config.read(file)
    assert (proposed.tensor, proposed.pipeline) == (1, 3)
    assert tuple(node.address for node in proposed.nodes) == namespaces.ADDRESSES
    code, checks = findings(nodes, file)
    failed = {name: item["evidence"] for name, item in checks.items() if item["status"] == "fail"}
    assert failed.keys() == {"split"}  # of vLLM's CPU build: everything else is as it must be
    assert "CPU build serves no pipeline" in failed["split"]
    assert code == 30
    assert checks["firewall"]["evidence"] == "4 ways between nodes"  # both ways to the head


@pytest.fixture(scope="module")
def replicas(nodes, random_model, free_port):
    """A configuration of a server on each, by stand-ins for vLLM (replica.py), and its port."""
    key, stand_in = nodes.work / "key", nodes.work / "stand-in/bin/python"
    key.write_text(KEY)
    key.chmod(0o600)
    stand_in.parent.mkdir(parents=True)
    script = Path(__file__).with_name("replica.py")
    stand_in.write_text(f"""#!/bin/sh
[ "$2" = validate ] && exec echo a stand-in validates nothing
PYTHONPATH={namespaces.ROOT}:{namespaces.ROOT}/tests exec {sys.executable} {script} "$@"
""")
    stand_in.chmod(0o755)
    settings = {"mode": "replicas", "key_file": str(key), "model": str(random_model)}
    quoted = {name: json.dumps(value) for name, value in settings.items()}
    port = free_port()
    return nodes.config(python=stand_in, tensor=1, port=port, **quoted), port


def ask(nodes, port, times):
    """Return which servers answered."""
    command = nodes.inside(0, sys.executable, "-c", ASK, str(times), str(port), KEY)
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.needs("haproxy")
def test_three_replicas_answer_behind_one_endpoint_and_two_when_one_is_dead(nodes, replicas):
    file, port = replicas
    result = nodes.inv("cluster.up", "--config", str(file), "--no-restart")
    assert result.returncode == 0, result.stderr
    try:
        assert ask(nodes, port, 9) == set(namespaces.ADDRESSES)
        shown = json.loads(nodes.inv("cluster.status", "--config", str(file), "--json").stdout)["nodes"]
        assert {node["state"] for node in shown.values()} == {"running"}
        for pid in session_members(shown["third"]["pid"]):
            os.kill(pid, signal.SIGKILL)
        assert ask(nodes, port, 6) == {namespaces.HEAD, namespaces.WORKER}
    finally:
        assert nodes.inv("cluster.down", "--config", str(file)).returncode == 0
    assert [with_variable(record.MARK, record.mark(nodes.folder(index))) for index in range(3)] == [[], [], []]
