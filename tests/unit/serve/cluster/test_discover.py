"""cluster.toml from facts: the documents' own examples of two Sparks, and what is no cluster."""

import re
import subprocess

import pytest
import yaml

from sparkforge.core.errors import InputError, RefusalError, UsageError
from sparkforge.serve.cluster import check, config, discover, facts


def propose(facts, **options):
    return discover.propose(facts, {name: f"nvidia@{name}" for name in facts}, **options)


@pytest.mark.parametrize(
    ("name", "first"),
    [("two-from-nvidia-playbook", "192.168.100.10"), ("two-from-eugr", "192.168.177.11")],
)
def test_two_sparks_with_one_cable(sheet, name, first):
    proposed = propose(sheet(name))
    assert (proposed.tensor, proposed.head.address) == (2, first)
    for node in proposed.nodes:
        assert node.interface == "enp1s0f1np1"
        assert node.hcas == ("rocep1s0f1", "roceP2p1s0f1")  # both halves


def test_three_nodes_on_one_subnet_have_a_switch(sheet):
    two = sheet("two-from-eugr")
    third = two["spark2"].model_copy(
        update={
            "interfaces": tuple(
                entry.model_copy(update={"addresses": tuple(a.replace(".12/", ".13/") for a in entry.addresses)})
                for entry in two["spark2"].interfaces
            )
        }
    )
    proposed = propose({**two, "spark3": third})
    assert (proposed.tensor, proposed.pipeline, proposed.nodes[2].address) == (1, 3, "192.168.177.13")


def test_a_cable_that_is_out_is_refused_and_wifi_is_no_way_out(sheet):
    facts = sheet("two-from-eugr")
    dark = tuple(e.model_copy(update={"carrier": False}) if e.port else e for e in facts["spark2"].interfaces)
    with pytest.raises(RefusalError, match="spark and spark2") as refused:
        propose({**facts, "spark2": facts["spark2"].model_copy(update={"interfaces": dark})})
    assert refused.value.code == "validation.cluster"


def test_of_two_halves_on_one_subnet_the_first_ones_address_is_proposed(sheet):
    facts = {
        name: node.model_copy(
            update={
                "interfaces": tuple(
                    entry.model_copy(update={"addresses": tuple(a.replace(".178.", ".177.1") for a in entry.addresses)})
                    for entry in node.interfaces
                )
            }
        )
        for name, node in sheet("two-from-eugr").items()
    }
    assert {node.interface for node in propose(facts).nodes} == {"enp1s0f1np1"}


def test_a_containers_bridge_is_no_network_between_nodes(sheet):
    facts = sheet("two-from-eugr")
    only = [entry for entry in facts["spark"].interfaces if entry.name == "enP7s7"]
    bridge = only[0].model_copy(update={"addresses": ("172.17.0.1/16",), "up": True, "carrier": True, "bridge": True})
    with pytest.raises(RefusalError):
        propose({name: node.model_copy(update={"interfaces": (bridge,)}) for name, node in facts.items()})


def test_what_is_proposed_is_read_again_as_it_was(sheet, tmp_path):
    proposed = propose(sheet("two-from-eugr"), folder="/home/nvidia/spark forge")
    file = tmp_path / config.FILE
    config.write(file, proposed)
    assert config.read(file) == proposed
    assert "torch.distributed's, on the head" in file.read_text()


@pytest.mark.parametrize("names", [["a", "a"], ["u@h", "root@h"], ["local", "local"]])
def test_one_machine_named_twice_is_refused_before_it_is_asked(monkeypatch, names):
    monkeypatch.setattr(facts, "ask", lambda *_: pytest.fail("it asked"))
    with pytest.raises(UsageError, match="twice"):
        check.find_nodes(names, "docker", "")


def test_two_names_of_one_machine_are_refused(sheet, monkeypatch):
    spark = sheet("two-from-eugr")["spark"]
    monkeypatch.setattr(facts, "ask", lambda *_: spark)
    with pytest.raises(UsageError, match="two nodes have the same address"):
        check.find_nodes(["a", "b"], "docker", "")


def test_people_see_each_half_of_each_port(sheet):
    lines = list(discover.describe(sheet("two-from-nvidia-playbook")))
    assert "  port 1: enp1s0f1np1 (rocep1s0f1), up, MTU 1500, 192.168.100.10/24" in lines
    assert "  port 0: enp1s0f0np0 (rocep1s0f0), no cable, MTU 1500, no address" in lines


GOOD = """
schema = 1
nodes = [
  {name = "a", address = "10.0.0.1", interface = "eth0"},
  {name = "b", ssh = "b", address = "10.0.0.2", interface = "eth0"},
]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ("schema = 1", 'schema = 1\nmode = "mpi"', "split"),
        ("schema = 1", "schema = 1\ntensor = 3", "not the number of nodes"),
        ("schema = 1", "schema = 1\nmaster_port = 8000", "must differ"),
        ("schema = 1", "schema = 1\nport = 80", "1024"),
        ('name = "b", ', 'name = "a", ', "same name"),
        ("10.0.0.2", "10.0.0.1", "same address"),
        ("10.0.0.2", "spark-2", "address"),
        ('ssh = "b"', 'ssh = "-oProxyCommand=x"', "ssh"),
        ('ssh = "b"', 'ssh = "me@-l"', "ssh"),
        ('ssh = "b"', 'ssh = "b", folder = "sparkforge"', "folder"),
        ('ssh = "b", ', "", "no ssh"),
        ('interface = "eth0"}', 'interface = "eth0; reboot"}', "interface"),
        ("schema = 1", "schema = 1\nnode = 1", "node"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_key(tmp_path, old, new, message):
    file = tmp_path / config.FILE
    file.write_text(GOOD)
    assert config.read(file).head.name == "a"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError) as refused:
        config.read(file)
    assert message in str(refused.value)
    with pytest.raises(UsageError, match="there is no"):
        config.read(tmp_path / "none.toml")


def test_a_port_whose_halves_share_a_subnet_gets_the_commands_that_configure_it(sheet, tmp_path):
    facts = sheet("two-from-nvidia-playbook")
    assert list(discover.link_commands(facts)) == []
    bare = {
        name: node.model_copy(
            update={"interfaces": tuple(e.model_copy(update={"addresses": ()}) for e in node.interfaces)}
        )
        for name, node in facts.items()
    }
    script = "\n".join(line for line in discover.link_commands(bare) if not line.endswith("Run there:"))
    files = re.findall(r"sudo tee /etc/(\S+) <<'EOF'\n(.*?)EOF\n", script, re.DOTALL)
    links = [yaml.safe_load(text)["network"]["ethernets"] for path, text in files if path.startswith("netplan")]
    assert [[entry["addresses"] for entry in link.values()] for link in links] == [
        [["192.168.100.10/24"], ["192.168.101.10/24"]], [["192.168.100.11/24"], ["192.168.101.11/24"]],
    ]  # fmt: skip
    assert subprocess.run(["/bin/sh", "-n"], input=script, text=True, check=False).returncode == 0
