"""A cluster of two network namespaces, queried over a real sshd, with faults on the link."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import cluster_nodes as namespaces
import pytest
from waiting import wait_for

from sparkforge.serve.cluster import config, node, watch

pytestmark = [pytest.mark.integration, pytest.mark.needs(*namespaces.PROGRAMS, "iptables")]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    yield from namespaces.made(tmp_path_factory.mktemp("nodes"))


def findings(nodes, **settings):
    result = nodes.inv("cluster.check", "--config", str(nodes.config(**settings)), "--json")
    assert result.stdout, result.stderr
    return result.returncode, {finding["check"]: finding for finding in json.loads(result.stdout)}


def test_two_nodes_are_discovered_over_ssh_and_pass_the_checks(nodes, tmp_path):
    file = tmp_path / "cluster.toml"
    result = nodes.inv("cluster.discover", "--nodes", f"local,root@{namespaces.WORKER}", "--device", "embedded")
    assert result.returncode == 0, result.stderr
    file.write_text(result.stdout)
    proposed = config.read(file)
    proposed = [(node.address, node.interface) for node in proposed.nodes]
    assert proposed == [(namespaces.HEAD, "cable0"), (namespaces.WORKER, "cable1")]
    assert nodes.inv("cluster.check", "--config", str(file)).returncode == 0
    code, checks = findings(nodes)
    assert {name: item["evidence"] for name, item in checks.items() if item["status"] == "fail"} == {}
    assert code == 0
    assert checks["firewall"]["evidence"] == "2 connections between nodes"


def test_a_smaller_mtu_at_the_other_end_is_named(nodes):
    nodes.link(1, "mtu", "1500")
    try:
        code, checks = findings(nodes)
    finally:
        nodes.link(1, "mtu", "9000")
    assert code == 30
    assert "worker cable1 1500" in checks["mtu"]["evidence"]
    assert checks["packets"]["status"] == "fail"


def test_a_blocked_port_and_lost_packets_are_named(nodes):
    lost = ["INPUT", "-p", "udp", "-m", "statistic", "--mode", "random", "--probability", "0.2", "-j", "DROP"]
    rules = [(0, ["INPUT", "-p", "tcp", "--dport", "29500", "-j", "DROP"]), (1, lost)]
    with ExitStack() as stack:
        for index, rule in rules:
            subprocess.run(nodes.inside(index, "iptables", "-A", *rule), check=True)
            stack.callback(subprocess.run, nodes.inside(index, "iptables", "-D", *rule), check=True)
        code, shown = findings(nodes)
    assert code == 30
    assert shown["firewall"]["status"] == "fail"
    assert "port 29500" in shown["firewall"]["evidence"]
    assert "29501" not in shown["firewall"]["evidence"]
    assert re.search(r"[1-9]\d* of 50 packets are lost", shown["round-trip"]["evidence"])


def test_other_weights_on_one_node_refuse_the_start(nodes, random_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(random_model, other)
    weights = max(other.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    with weights.open("r+b") as opened:
        opened.seek(-1, 2)
        last = opened.read(1)
        opened.seek(-1, 2)
        opened.write(bytes([last[0] ^ 1]))
    with nodes.mounted(other, random_model):
        file = nodes.config(model=json.dumps(str(random_model)))
        result = nodes.inv("cluster.up", "--config", str(file))
    assert result.returncode == 30
    assert "models: the model differs: head has " in result.stderr
    assert {node["state"] for node in nodes.status(file)[1]["nodes"].values()} == {"stopped"}


def test_a_link_that_goes_down_ends_both_nodes_by_the_others_name(nodes, tmp_path):
    """Stand-ins replace vLLM, which test_cluster_serve.py tests; this test is about the link."""
    forever, logs = [sys.executable, "-c", "import signal; signal.pause()"], [tmp_path / "a.log", tmp_path / "b.log"]
    with ExitStack() as stack:
        parts = []
        for index, (name, other) in enumerate((("head", "worker"), ("worker", "head"))):
            options = watch.options(name, namespaces.HEAD, 29601, (other,), listen=not index)
            command = nodes.inside(index, *watch.watched(forever, options))
            environment = {**os.environ, watch.TOKEN: "token-of-this-start"}
            log = stack.enter_context(logs[index].open("w"))
            parts.append(stack.enter_context(subprocess.Popen(command, env=environment, stdout=log)))
            stack.callback(parts[-1].kill)
        established = nodes.inside(0, "ss", "--no-header", "--tcp", "state", "established", "sport", "=", ":29601")
        wait_for(lambda: subprocess.run(established, capture_output=True, check=True).stdout)
        nodes.link(1, "down")
        stack.callback(nodes.link, 1, "up")
        began = time.monotonic()
        assert [part.wait(30) for part in parts] == [24, 24]
        assert time.monotonic() - began < 30
    why = "it sent nothing for 10 s"
    assert [node.loss(log.read_text()) for log in logs] == [("worker", why), ("head", why)]


def test_a_link_that_is_down_ends_with_the_node_that_is_not_reached(nodes):
    nodes.link(1, "down")
    try:
        result = nodes.inv("cluster.check", "--config", str(nodes.config()))
    finally:
        nodes.link(1, "up")
    assert result.returncode == 30
    assert "FAIL nodes" in result.stdout
    assert "worker: ssh: connect to host" in result.stdout
    assert "next: ssh root@10.77.0.2 true" in result.stdout


def test_an_unknown_host_is_an_error_without_a_prompt(nodes):
    known = nodes.work / "keys/known"
    kept = known.read_text()
    known.write_text("")
    try:
        result = nodes.inv("cluster.discover", "--nodes", f"local,root@{namespaces.WORKER}")
    finally:
        known.write_text(kept)
    assert result.returncode == 11
    assert "Host key verification failed" in result.stderr
    assert socket.gethostname() not in result.stdout
