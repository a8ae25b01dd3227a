"""A node's facts from a file tree like a Spark's /sys, and malformed answers."""

import json

import pytest
from programs import write_program

from sparkforge.core.errors import ServerError, SparkforgeError
from sparkforge.serve.cluster import node, probe, remote, start
from sparkforge.serve.cluster.remote import NodeFacts

ADDRESSES = [
    {"ifname": "enp1s0f1np1", "addr_info": [{"family": "inet", "local": "192.168.100.10", "prefixlen": 24}]},
    {"ifname": "wlP9s9", "addr_info": [{"family": "inet6", "local": "fe80::1", "prefixlen": 64}]},
]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A file tree with one half of a port, its RDMA device, and WiFi; `ip` prints ADDRESSES, other programs fail."""
    pci = tmp_path / "sys/devices/pci0000:00/0000:01:00.1"
    rdma, mlx5 = pci / "infiniband/rocep1s0f1", tmp_path / "sys/bus/drivers/mlx5_core"
    for folder in (pci / "net", rdma / "ports/1", mlx5, tmp_path / "sys/class/net", tmp_path / "sys/class/infiniband"):
        folder.mkdir(parents=True)
    (pci / "driver").symlink_to(mlx5)
    (rdma / "ports/1/state").write_text("4: ACTIVE\n")
    (rdma / "device").symlink_to(pci)
    (tmp_path / "sys/class/infiniband/rocep1s0f1").symlink_to(rdma)
    for name, mtu in (("enp1s0f1np1", 9000), ("wlP9s9", 1500), ("lo", 65536)):
        interface = (pci if name.startswith("en") else tmp_path / "sys/devices/virtual") / "net" / name
        interface.mkdir(parents=True)
        for file, text in (("mtu", mtu), ("operstate", "up"), ("carrier", 1)):
            (interface / file).write_text(f"{text}\n")
        (tmp_path / "sys/class/net" / name).symlink_to(interface)
    (pci / "net/enp1s0f1np1/device").symlink_to(pci)
    (tmp_path / "sys/devices/virtual/net/wlP9s9/wireless").mkdir()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemFree: 7 kB\nMemAvailable: 50 kB\n")
    write_program(tmp_path / "bin/ip", f"echo '{json.dumps(ADDRESSES)}'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    return tmp_path


def test_a_half_of_a_port_is_read_with_its_device_and_address(root):
    node = NodeFacts.model_validate(probe.facts({}, root))
    half, radio = node.interfaces
    assert (half.name, half.addresses, half.mtu, half.port) == ("enp1s0f1np1", ("192.168.100.10/24",), 9000, "1")
    assert (half.up, half.carrier, half.pci) == (True, True, "0000:01:00.1")
    assert (radio.name, radio.wireless, radio.addresses, radio.port) == ("wlP9s9", True, (), "")
    assert [(d.name, d.interface, d.state) for d in node.rdma] == [("rocep1s0f1", "enp1s0f1np1", "ACTIVE")]
    assert node.memory["MemFree"] == 7 * 1024


def test_a_fact_that_cannot_be_read_has_its_reason(root):
    (root / "proc/meminfo").write_text("nothing\n")
    node = NodeFacts.model_validate(probe.facts({"image": "x", "model": str(root / "none")}, root))
    assert (node.driver, node.image, node.model, node.memory) == (None, None, None, None)
    assert {"driver", "image", "model", "memory", "infiniband"} <= node.errors.keys()
    assert "No such file" in node.errors["driver"]


def test_the_fingerprint_sees_names_sizes_and_both_ends(tmp_path):
    weights, prints = tmp_path / "model.safetensors", []
    for content in (b"a" * (3 << 20), b"a" * ((3 << 20) + 1), b"a" * ((3 << 20) - 1) + b"b", b"a" * (3 << 20)):
        weights.write_bytes(content)
        prints.append(probe.fingerprint(tmp_path))
    weights.rename(tmp_path / "other.safetensors")
    assert prints[0] == prints.pop()
    assert len({*prints, probe.fingerprint(tmp_path)}) == 4


def test_an_error_of_a_node_is_raised_with_the_nodes_name(answering):
    error = {"what": "it does not start", "why": "no memory", "fix": "./inv down", "code": "server.start"}
    config = answering(json.dumps({"error": error}))
    with pytest.raises(ServerError, match="spark: it does not start · no memory"):
        start.ask(config, config.head, "status")


ASKING = {
    "facts": lambda config: remote.ask(config.head),
    "status": lambda config: start.ask(config, config.head, "status"),
    "begin": lambda config: start.ask(config, config.head, "begin"),
    "docker ps": lambda config: node.ContainerNode.state(),
    "docker config": lambda config: node.ContainerNode(config, config.head).start(),
    "container": lambda config: node.ContainerNode(config, config.head).validate(),
}
ANSWERS = ["x", "[]", "{}", '{"a": ', "[" * 100_000, '{"state": 1, "files": 1, "services": 1}', "1" * 5000, "\xff"]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda text: text[:12])
@pytest.mark.parametrize("name", ASKING)
def test_an_answer_that_is_no_such_json_is_an_error_of_three_lines(answering, name, answer):
    config = answering(answer, "docker" if "c" in name else "embedded")
    with pytest.raises(SparkforgeError) as caught:
        ASKING[name](config)
    lines = (caught.value.what, caught.value.why, caught.value.fix)
    assert all(line and "\n" not in line and len(line) < 500 for line in lines)
