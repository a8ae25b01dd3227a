"""A cluster of two network namespaces: asked over a real sshd, with faults on the real link."""

import json
import socket
import subprocess

import cluster_nodes as namespaces
import pytest

from sparkforge.serve.cluster import config, facts

pytestmark = [pytest.mark.integration, pytest.mark.needs("ip", "iptables", "ssh", "sshd")]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    yield from namespaces.made(tmp_path_factory.mktemp("nodes"))


def findings(nodes, **settings):
    """Return the exit code and the findings, by the check's name."""
    done = nodes.inv("cluster.check", "--config", str(nodes.config(**settings)), "--json")
    assert done.stdout, done.stderr
    return done.returncode, {found["check"]: found for found in json.loads(done.stdout)}


def test_two_nodes_are_discovered_over_ssh_and_pass_the_checks(nodes, tmp_path):
    file = tmp_path / "cluster.toml"
    done = nodes.inv(
        "cluster.discover", "--nodes", f"local,root@{namespaces.WORKER}", "--device", "embedded", "--file", str(file)
    )
    assert done.returncode == 0, done.stderr
    proposed = config.read(file)
    assert [(node.address, node.interface) for node in proposed.nodes] == [
        (namespaces.HEAD, "cable0"),
        (namespaces.WORKER, "cable1"),
    ]
    recorded = tmp_path / "facts.json"
    assert nodes.inv("cluster.check", "--config", str(file), "--record", str(recorded)).returncode == 0
    assert set(facts.load_sheet(recorded)) == {"local", namespaces.WORKER}
    code, found = findings(nodes)
    assert {name: item["evidence"] for name, item in found.items() if item["status"] == "fail"} == {}
    assert code == 0
    assert found["firewall"]["evidence"] == "2 ways between nodes"


def test_an_all_reduce_runs_over_the_link(nodes):
    done = nodes.inv("cluster.measure", "--config", str(nodes.config()), "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["backend"] == "gloo"
    assert [row["bytes"] for row in measured["sizes"]] == [8192, 65536, 1 << 20, 16 << 20]
    assert all(row["microseconds"] > 0 and row["gigabytes_a_second"] > 0 for row in measured["sizes"])
    show = nodes.inside(1, "cat", f"/sys/class/net/{namespaces.CABLES[1]}/statistics/tx_bytes")
    sent = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    assert int(sent) > 20 * (16 << 20)  # the worker sent its part of each round over the cable


def test_a_smaller_mtu_at_the_other_end_is_named(nodes):
    nodes.link(1, "mtu", "1500")
    try:
        code, found = findings(nodes)
    finally:
        nodes.link(1, "mtu", "9000")
    assert code == 30
    assert "worker cable1 1500" in found["mtu"]["evidence"]
    assert found["packets"]["status"] == "fail"


def test_a_blocked_port_is_named(nodes):
    rule = ["INPUT", "-p", "tcp", "--dport", "29500", "-j", "DROP"]
    subprocess.run(nodes.inside(0, "iptables", "-A", *rule), check=True)
    try:
        _, found = findings(nodes)
    finally:
        subprocess.run(nodes.inside(0, "iptables", "-D", *rule), check=True)
    assert found["firewall"]["status"] == "fail"
    assert "port 29500" in found["firewall"]["evidence"]
    assert "29501" not in found["firewall"]["evidence"]


def test_a_port_that_another_program_has_is_named(nodes):
    program = (
        "import socket,sys; s=socket.socket(); s.bind(('',29501)); s.listen(); print(1,flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(nodes.inside(0, "python3", "-c", program), stdin=pipe, stdout=pipe) as taking:
        taking.stdout.readline()
        _, found = findings(nodes)
        taking.stdin.close()
    assert found["ports"]["evidence"] == "head: 29501"


def test_a_link_that_is_down_ends_with_the_node_that_is_not_reached(nodes):
    nodes.link(1, "down")
    try:
        done = nodes.inv("cluster.check", "--config", str(nodes.config()))
    finally:
        nodes.link(1, "up")
    assert done.returncode == 30
    assert "FAIL nodes" in done.stdout
    assert "worker: ssh: connect to host" in done.stdout
    assert "next: ssh root@10.77.0.2 true" in done.stdout


def test_a_host_that_is_not_known_is_an_error_and_no_question(nodes):
    known = nodes.work / "keys/known"
    kept = known.read_text()
    known.write_text("")
    try:
        done = nodes.inv("cluster.discover", "--nodes", f"local,root@{namespaces.WORKER}")
    finally:
        known.write_text(kept)
    assert done.returncode == 11
    assert "Host key verification failed" in done.stderr
    assert socket.gethostname() not in done.stdout
