"""Three network namespaces at a switch: discovery and checks.

vLLM's CPU build serves no pipeline (docs/hardware.md, Two machines), and nothing else splits a gpt-oss in three.
"""

import json

import cluster_nodes as namespaces
import pytest

from sparkforge.serve.cluster import config

pytestmark = [
    *(pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(300)),
    pytest.mark.needs("ip", "iptables", "ssh", "sshd"),
]
NODES = ",".join(f"root@{address}" for address in namespaces.ADDRESSES)


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
