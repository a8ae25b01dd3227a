"""What a node says about itself: from a file tree as a Spark's /sys has it, and from one that has nothing."""

import json
import subprocess

import pytest

from sparkforge.core.errors import InputError
from sparkforge.serve.cluster import facts as cluster_facts
from sparkforge.serve.cluster import probe

ADDRESSES = [
    {"ifname": "enp1s0f1np1", "addr_info": [{"family": "inet", "local": "192.168.100.10", "prefixlen": 24}]},
    {"ifname": "wlP9s9", "addr_info": [{"family": "inet6", "local": "fe80::1", "prefixlen": 64}]},
]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A file tree with one half of a port, its RDMA device, and WiFi; `ip` prints ADDRESSES, other programs fail."""
    pci = tmp_path / "sys/devices/pci0000:00/0000:01:00.1"
    for folder in ("net", "infiniband/rocep1s0f1/ports/1"):
        (pci / folder).mkdir(parents=True)
    (tmp_path / "sys/bus/drivers/mlx5_core").mkdir(parents=True)
    (pci / "driver").symlink_to(tmp_path / "sys/bus/drivers/mlx5_core")
    (pci / "infiniband/rocep1s0f1/ports/1/state").write_text("4: ACTIVE\n")
    (pci / "infiniband/rocep1s0f1/device").symlink_to(pci)
    for name, mtu in (("enp1s0f1np1", 9000), ("wlP9s9", 1500), ("lo", 65536)):
        interface = (pci if name.startswith("en") else tmp_path / "sys/devices/virtual") / "net" / name
        interface.mkdir(parents=True)
        for file, text in (("mtu", mtu), ("operstate", "up"), ("carrier", 1), ("address", "3c:6d:66:cc:b3:b7")):
            (interface / file).write_text(f"{text}\n")
        (tmp_path / "sys/class/net").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/class/net" / name).symlink_to(interface)
    (pci / "net/enp1s0f1np1/device").symlink_to(pci)
    (tmp_path / "sys/devices/virtual/net/wlP9s9/wireless").mkdir()
    (tmp_path / "sys/class/infiniband").mkdir()
    (tmp_path / "sys/class/infiniband/rocep1s0f1").symlink_to(pci / "infiniband/rocep1s0f1")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemFree: 7 kB\nMemAvailable: 50 kB\n")

    def program(*argv):
        if argv[0] == "ip":
            return json.dumps(ADDRESSES)
        raise FileNotFoundError(2, "No such file or directory", argv[0])

    monkeypatch.setattr(probe, "program", program)
    return tmp_path


def test_a_half_of_a_port_is_read_with_its_device_and_address(root):
    node = cluster_facts.parse(probe.facts({}, root), "a test")
    half, radio = node.interfaces
    assert (half.name, half.addresses, half.mtu, half.port) == ("enp1s0f1np1", ("192.168.100.10/24",), 9000, "1")
    assert (half.up, half.carrier, half.pci) == (True, True, "0000:01:00.1")
    assert (radio.name, radio.wireless, radio.addresses, radio.port) == ("wlP9s9", True, (), "")
    assert [(d.name, d.interface, d.state) for d in node.rdma] == [("rocep1s0f1", "enp1s0f1np1", "ACTIVE")]
    assert node.memory["MemFree"] == 7 * 1024


def test_a_fact_that_cannot_be_read_has_its_reason(root):
    (root / "proc/meminfo").write_text("nothing\n")
    node = cluster_facts.parse(probe.facts({"image": "x", "model": str(root / "none")}, root), "a test")
    assert (node.driver, node.image, node.model, node.memory) == (None, None, None, None)
    assert {"driver", "gpu", "image", "model", "memory", "infiniband"} <= node.errors.keys()
    assert "No such file" in node.errors["driver"]


def test_the_fingerprint_sees_names_sizes_and_both_ends(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * (3 << 20))
    first = probe.fingerprint(tmp_path)
    weights.write_bytes(b"a" * (3 << 20) + b"a")
    assert probe.fingerprint(tmp_path) != first
    weights.write_bytes(b"a" * ((3 << 20) - 1) + b"b")
    assert probe.fingerprint(tmp_path) != first
    weights.write_bytes(b"a" * (3 << 20))
    assert probe.fingerprint(tmp_path) == first
    weights.rename(tmp_path / "other.safetensors")
    assert probe.fingerprint(tmp_path) != first


def test_the_probe_runs_alone_from_stdin(tmp_path):
    command = ["python3", "-I", "-", json.dumps({"mode": "facts"})]
    result = subprocess.run(
        command, input=cluster_facts.source(), capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert cluster_facts.parse(json.loads(result.stdout), "here").hostname


def test_facts_of_another_shape_and_sheets_that_are_none_are_refused(tmp_path):
    with pytest.raises(InputError, match="spark"):
        cluster_facts.parse({"hostname": 1}, "spark")
    sheet = tmp_path / "sheet.json"
    for text in ("", "[]", '{"nodes": 1}', '{"nodes": {"a": {}}}'):
        sheet.write_text(text)
        with pytest.raises(InputError, match="sheet"):
            cluster_facts.load_sheet(sheet)


def test_recorded_facts_are_read_again_as_they_were(healthy, tmp_path):
    sheet = tmp_path / "sheet.json"
    sheet.write_text(cluster_facts.as_sheet(healthy.facts))
    assert cluster_facts.load_sheet(sheet) == healthy.facts
