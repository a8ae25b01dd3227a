"""From facts to cluster.toml: documented examples of two Sparks, machines that form no cluster, malformed files."""

import re
import subprocess

import pytest
import yaml
from expected import refused

from sparkforge.core.errors import InputError, UsageError
from sparkforge.serve.cluster import config, discover


def propose(facts, **options):
    return discover.propose(facts, {name: f"nvidia@{name}" for name in facts}, **options)


def changed(node, change):
    interfaces = tuple(entry.model_copy(update=change(entry)) for entry in node.interfaces)
    return node.model_copy(update={"interfaces": interfaces})


def readdressed(old, new):
    return lambda entry: {"addresses": tuple(address.replace(old, new) for address in entry.addresses)}


@pytest.mark.parametrize(
    ("name", "first"), [("two-from-nvidia-playbook", "192.168.100.10"), ("two-from-eugr", "192.168.177.11")]
)
def test_two_sparks_with_one_cable_are_proposed_and_shown(sheet, name, first, tmp_path):
    proposed = propose(sheet(name), folder="/home/nvidia/spark forge")
    assert (proposed.tensor, proposed.head.address) == (2, first)
    for node in proposed.nodes:
        assert (node.interface, node.hcas) == ("enp1s0f1np1", ("rocep1s0f1", "roceP2p1s0f1"))  # both halves
    file = tmp_path / config.FILE
    file.write_text(config.text(proposed))
    assert config.read(file) == proposed
    assert "  port 0: enp1s0f0np0 (rocep1s0f0), no cable, MTU 1500, no address" in discover.describe(sheet(name))


def test_three_nodes_on_one_subnet_have_a_switch(sheet):
    two = sheet("two-from-eugr")
    proposed = propose({**two, "spark3": changed(two["spark2"], readdressed(".12/", ".13/"))})
    assert (proposed.tensor, proposed.pipeline, proposed.nodes[2].address) == (1, 3, "192.168.177.13")


def bridge(entry):
    """Make the wired LAN interface a container's bridge, and remove the addresses of all others."""
    is_bridge = {"addresses": ("172.17.0.1/16",), "up": True, "carrier": True, "bridge": True}
    return is_bridge if entry.name == "enP7s7" else {"addresses": ()}


@pytest.mark.parametrize("change", [lambda entry: {"carrier": False} if entry.port else {}, bridge], ids=["dark", "br"])
def test_without_a_cable_neither_wifi_nor_a_bridge_is_taken(sheet, change):
    nodes = {name: changed(node, change) for name, node in sheet("two-from-eugr").items()}
    with refused("validation.cluster", "spark and spark2"):
        propose(nodes)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "two nodes or more"),
        (["u@h", "root@h"], "h twice"),
        (["-oProxyCommand=x", "b"], "takes ssh destinations"),
        (["a", "b"], "two nodes have the same address"),  # two names of one machine
    ],
)
def test_names_that_are_invalid_or_of_one_machine_are_refused(sheet, answering, names, message):
    answering(sheet("two-from-eugr")["spark"].model_dump_json())
    with pytest.raises(UsageError) as caught:
        discover.find_nodes(names, "docker", "")
    assert message in caught.value.why


def test_a_port_whose_halves_share_a_subnet_gets_the_commands_that_configure_it(sheet):
    nodes = sheet("two-from-nvidia-playbook")
    assert list(discover.link_commands(nodes)) == []
    bare = {name: changed(node, lambda _: {"addresses": ()}) for name, node in nodes.items()}
    script = "\n".join(line for line in discover.link_commands(bare) if not line.endswith("Run there:"))
    files = re.findall(r"sudo tee /etc/(\S+) <<'EOF'\n(.*?)EOF\n", script, re.DOTALL)
    links = [yaml.safe_load(text)["network"]["ethernets"] for path, text in files if path.startswith("netplan")]
    assert [[entry["addresses"] for entry in link.values()] for link in links] == [
        [["192.168.100.10/24"], ["192.168.101.10/24"]], [["192.168.100.11/24"], ["192.168.101.11/24"]],
    ]  # fmt: skip
    assert subprocess.run(["/bin/sh", "-n"], input=script, text=True, check=False).returncode == 0


GOOD = """
schema = 1
nodes = [
  {name = "a", address = "10.0.0.1", interface = "eth0"},
  {name = "b", ssh = "b", address = "10.0.0.2", interface = "eth0"},
]
"""
TOP = "schema = 1"
BAD = [
    (TOP, "schema = 2", "schema"),
    (TOP, "schema = 1\ntensor = 3", "not the number of nodes"),
    (TOP, "schema = 1\nmaster_port = 8000", "must differ"),
    ('name = "b", ', 'name = "a", ', "same name"),
    ("10.0.0.2", "10.0.0.1", "same address"),
    *(("10.0.0.2", address, "address") for address in ("spark-2", "::1")),
    *(("10.0.0.2", bad, "not the address of one") for bad in ("0.0.0.0", "224.0.0.1")),  # noqa: S104
    ("10.0.0.2", "127.0.0.1", "loopback"),
    ('ssh = "b"', 'ssh = "-oProxyCommand=x"', "ssh"),
    ('ssh = "b"', 'ssh = "me@-l"', "ssh"),
    ('ssh = "b"', 'ssh = "b", folder = "sparkforge"', "folder"),
    ('ssh = "b", ', "", "no ssh"),
    ('interface = "eth0"}', 'interface = "eth0; reboot"}', "interface"),
    ('interface = "eth0"}', f'interface = "{"e" * 16}"}}', "interface"),
    (TOP, 'schema = 1\nmodel = "--help"', "pattern"),
    (TOP, 'schema = 1\nmodel = "a\\nb"', "pattern"),
    (TOP, 'schema = 1\nflags = ["serve"]', "is not a flag"),
    (TOP, 'schema = 1\nflags = ["--seed=\\u001b[2J"]', "pattern"),
    (TOP, 'schema = 1\nflags = ["--api_key"]', "cannot be passed to vLLM"),
    (TOP, 'schema = 1\nflags = ["--node-rank=1"]', "cluster.up sets it for each node"),
    (TOP, 'schema = 1\nflags = ["-r1"]', "cluster.up sets it for each node"),
    *(
        (TOP, f'schema = 1\nflags = ["{flag}"]', "set from `tensor`, `pipeline` and the nodes")
        for flag in ("--tensor_parallel_size=3", "-tp=3", "-tp", "-t=3", "-pp=2")
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD)
def test_a_file_that_makes_no_sense_is_refused_with_the_key(tmp_path, old, new, message):
    file = tmp_path / config.FILE
    with pytest.raises(UsageError, match="there is no"):
        config.read(file)
    for good in (GOOD, GOOD.replace(TOP, f'{TOP}\nflags = ["--max-num-seqs", "4"]')):
        file.write_text(good)
        assert config.read(file).head.name == "a"
    assert old in GOOD
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError) as caught:
        config.read(file)
    assert message in str(caught.value)
