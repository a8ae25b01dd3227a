"""cluster.setup's plan from recorded facts, and change.py on folders that stand for a machine's root."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from sparkforge.core.errors import RefusalError, UsageError
from sparkforge.serve.cluster import change, setup
from sparkforge.serve.cluster.config import ClusterNode
from sparkforge.serve.cluster.setup import NodeLook

PUBLIC = "ssh-ed25519 AAAA sparkforge_cluster"


def nodes(names):
    return [
        ClusterNode(name=name, ssh="" if not rank else name, address=f"0.0.0.{rank}", interface="eth9")
        for rank, name in enumerate(names)
    ]


def look(**more):
    base = {"user": "nvidia", "home": "/home/nvidia", "manager": "netplan", "host_key": "ssh-ed25519 HOST root@x"}
    return NodeLook.model_validate({**base, "public_key": PUBLIC, "recorded": False, **more})


def without_addresses(facts):
    """The facts of machines that just got their cable."""
    return {
        name: node.model_copy(
            update={
                "interfaces": tuple(
                    entry.model_copy(update={"addresses": ("169.254.7.7/16",)} if entry.port else {})
                    for entry in node.interfaces
                )
            }
        )
        for name, node in facts.items()
    }


def plan(facts, subnets=setup.SUBNETS, **looks):
    chosen = nodes(facts)
    sights = {name: looks.get(name.replace("-", "_"), look()) for name in facts}
    links = setup.addresses(chosen, facts, sights, subnets)
    return setup.wanted(chosen, sights, links)


def test_both_halves_of_a_new_link_get_addresses_on_subnets_of_their_own(sheet):
    first, second = plan(without_addresses(sheet("two-from-nvidia-playbook"))).values()
    written = [yaml.safe_load(wanted.files[0]["text"])["network"]["ethernets"] for wanted in (first, second)]
    assert [entry["addresses"] for entry in written[0].values()] == [["192.168.100.10/24"], ["192.168.101.10/24"]]
    assert [entry["addresses"] for entry in written[1].values()] == [["192.168.100.11/24"], ["192.168.101.11/24"]]
    assert {entry["mtu"] for ethernets in written for entry in ethernets.values()} == {9000}
    assert list(written[0]) == ["enp1s0f1np1", "enP2p1s0f1np1"]  # the half in the first PCI domain first
    assert first.kernel["net/ipv4/conf/enP2p1s0f1np1/arp_ignore"] == "1"
    assert first.key == "/home/nvidia/.ssh/sparkforge_cluster"
    hosts = next(file for file in first.files if file["path"].endswith("_hosts"))
    assert "192.168.101.11 ssh-ed25519 HOST\n" in hosts["text"]
    assert second.key == ""
    assert second.lines == [
        {
            "path": "/home/nvidia/.ssh/authorized_keys",
            "line": f'restrict,from="192.168.100.10,192.168.101.10" {PUBLIC}',
        }
    ]


def test_addresses_that_fit_stay_whatever_the_subnets_are(sheet):
    facts = sheet("two-from-nvidia-playbook")
    written = plan(facts, "10.9.0.0/24,10.9.1.0/24")
    for name, wanted in written.items():
        current = {
            entry.name: list(entry.addresses) for entry in facts[name].interfaces if entry.port and entry.carrier
        }
        assert {k: v["addresses"] for k, v in wanted.interfaces.items()} == current


@pytest.mark.parametrize("hosts", [(10, 20, 11, 21), (10, 10, 10, 10)])
def test_halves_on_one_subnet_and_one_address_twice_are_replaced(sheet, hosts):
    facts, numbers = without_addresses(sheet("two-from-nvidia-playbook")), iter(hosts)
    third = iter([0, 0, 0, 0] if hosts[1] != hosts[0] else [0, 1, 0, 1])
    for name, node in facts.items():
        entries = tuple(
            entry.model_copy(update={"addresses": (f"10.1.{next(third)}.{next(numbers)}/24",)})
            if entry.port and entry.carrier
            else entry
            for entry in node.interfaces
        )
        facts[name] = node.model_copy(update={"interfaces": entries})
    for wanted in plan(facts).values():
        assert [v["addresses"][0].rpartition(".")[0] for v in wanted.interfaces.values()] == [
            "192.168.100",
            "192.168.101",
        ]


def test_a_file_of_others_keeps_its_addresses_and_gets_the_mtu_beside(sheet):
    facts = sheet("two-from-nvidia-playbook")
    name = next(iter(facts))
    theirs = {"enp1s0f1np1": ["40-cx7.yaml"], "enP2p1s0f1np1": ["40-cx7.yaml"]}
    wanted = plan(facts, **{name.replace("-", "_"): look(elsewhere=theirs)})[name]
    written = yaml.safe_load(wanted.files[0]["text"])["network"]["ethernets"]
    assert written == {"enp1s0f1np1": {"mtu": 9000}, "enP2p1s0f1np1": {"mtu": 9000}}


def test_a_file_of_others_without_good_addresses_is_named_and_left(sheet):
    facts = without_addresses(sheet("two-from-nvidia-playbook"))
    name = next(iter(facts))
    with pytest.raises(RefusalError, match=r"40-cx7.yaml") as refused:
        plan(facts, **{name.replace("-", "_"): look(elsewhere={"enp1s0f1np1": ["40-cx7.yaml"]})})
    assert name in refused.value.fix


def test_a_subnet_that_is_used_already_is_refused(sheet):
    facts = without_addresses(sheet("two-from-nvidia-playbook"))
    name = next(iter(facts))
    wifi = (
        facts[name]
        .interfaces[0]
        .model_copy(update={"name": "wlan0", "driver": "", "pci": "", "addresses": ("192.168.101.77/24",)})
    )
    facts[name] = facts[name].model_copy(update={"interfaces": (*facts[name].interfaces, wifi)})
    with pytest.raises(RefusalError, match="wlan0"):
        plan(facts)


@pytest.mark.parametrize(
    "subnets",
    ["", "x", "10.0.0.0/24", "10.0.0.0/24,10.0.0.0/25", "8.8.8.0/24,8.8.9.0/24", "10.0.0.0/30,10.0.1.0/30"],
)
def test_subnets_that_cannot_serve_are_refused(sheet, subnets):
    with pytest.raises(UsageError, match="--subnets"):
        plan(without_addresses(sheet("two-from-nvidia-playbook")), subnets)


@pytest.mark.parametrize("name", ["mesh-from-eugr", "ring-from-eugr"])
def test_a_mesh_and_a_ring_are_refused(sheet, name):
    with pytest.raises(RefusalError, match="not plain to see"):
        plan(without_addresses(sheet(name)))


def test_networkmanager_gets_a_connection_for_each_half(sheet):
    facts = without_addresses(sheet("two-from-nvidia-playbook"))
    name = next(iter(facts))
    wanted = plan(facts, **{name.replace("-", "_"): look(manager="networkmanager")})[name]
    file = wanted.files[1]
    assert file["path"].endswith("/system-connections/sparkforge-cluster-enP2p1s0f1np1.nmconnection")
    assert file["mode"] == 0o600
    assert "address1=192.168.101.10/24\n" in file["text"]
    assert "mtu=9000\n" in file["text"]
    assert wanted.connections[1] == "sparkforge-cluster-enP2p1s0f1np1"


def test_a_network_that_nothing_configures_is_refused(sheet):
    facts = without_addresses(sheet("two-from-nvidia-playbook"))
    name = next(iter(facts))
    with pytest.raises(RefusalError, match="nothing configures"):
        plan(facts, **{name.replace("-", "_"): look(manager="")})


# change.py


@pytest.fixture
def root(tmp_path):
    """Stands for a machine's root: netplan's folder, one setting of the kernel, and a home with one key."""
    root = tmp_path / "root"
    for folder in ("etc/netplan", "proc/sys/net", "home/nvidia/.ssh"):
        (root / folder).mkdir(parents=True)
    (root / "proc/sys/net/arp_ignore").write_text("0\n")
    (root / "home/nvidia/.ssh/authorized_keys").write_bytes(b"ssh-rsa AAAA mine")  # without a last newline
    (root / "etc/netplan/01-others.yaml").write_text("network: {version: 2}\n")
    return root


def options(root, text="network: {version: 2}\n"):
    return {
        "root": str(root),
        "files": [
            {"path": "/etc/netplan/90-x.yaml", "text": text, "mode": 0o600},
            {"path": "/etc/sysctl.d/90-x.conf", "text": "a = 1\n", "mode": 0o644},
        ],
        "lines": [{"path": "/home/nvidia/.ssh/authorized_keys", "line": f"restrict {PUBLIC}"}],
        "kernel": {"net/arp_ignore": "1"},
        "key": "/home/nvidia/.ssh/sparkforge_cluster",
    }


def tree(root):
    """Every file's bytes and mode, and every folder; neither the record nor its lock."""
    return {
        str(path.relative_to(root)): (
            path.read_bytes().strip() if "proc" in path.parts else path.read_bytes(),
            path.stat().st_mode,
        )
        if path.is_file()
        else None
        for path in root.rglob("*")
        if "var" not in path.relative_to(root).parts
    }


needs_keygen = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen makes the key")


@needs_keygen
def test_a_second_time_changes_nothing_and_a_restore_gives_every_byte_back(root):
    before = tree(root)
    wanted = options(root)
    assert {item["kind"] for item in change.apply(wanted)["changes"]} == {"file", "line", "key", "kernel"}
    assert (root / "home/nvidia/.ssh/authorized_keys").read_text() == f"ssh-rsa AAAA mine\nrestrict {PUBLIC}\n"
    after = tree(root)
    assert change.apply(wanted) == {"changes": []}
    assert tree(root) == after
    change.apply(options(root, "network: {version: 2, renderer: networkd}\n"))  # another setup later
    assert change.restore({"root": str(root)})["kept"] == []
    assert tree(root) == before
    assert change.restore({"root": str(root)}) == {"undone": [], "kept": []}


@needs_keygen
def test_a_restore_that_keeps_a_file_still_knows_what_configures_the_network(root, monkeypatch):
    monkeypatch.setattr(change, "configure", lambda *_: None)
    change.apply({**options(root), "manager": "netplan"})
    ours = next(Path(entry["path"]) for entry in change.read_record(root)["entries"] if entry["kind"] == "file")
    ours.write_text("network: {}  # of somebody else\n")
    assert change.restore({"root": str(root)})["kept"] == [str(ours)]
    assert change.read_record(root)["manager"] == "netplan"


@pytest.mark.slow
@needs_keygen
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_setup_killed_at_any_rename_goes_on_or_is_undone(root, monkeypatch, goes_on):
    """A kill is stood for by an exception that nothing catches, before and after each rename in turn."""
    before, rename = tree(root), Path.replace
    kept = root.with_name("kept")
    shutil.copytree(root, kept)
    change.apply(options(root))
    after = {name: item for name, item in tree(root).items() if "sparkforge_cluster" not in name}
    for number in range(18):
        shutil.rmtree(root)
        shutil.copytree(kept, root)
        count = iter(range(99))

        def killed(path, target, count=count, number=number):
            at = next(count)
            if at * 2 == number:
                raise SystemExit
            result = rename(path, target)
            if at * 2 + 1 == number:
                raise SystemExit
            return result

        monkeypatch.setattr(Path, "replace", killed)
        with suppress(SystemExit):
            change.apply(options(root))
            assert next(count) * 2 <= number  # the setup has ended by itself: every rename was tried
        monkeypatch.setattr(Path, "replace", rename)
        if goes_on:
            change.apply(options(root))
            assert {name: item for name, item in tree(root).items() if "sparkforge_cluster" not in name} == after
        assert change.restore({"root": str(root)})["kept"] == []
        assert tree(root) == before, number


@needs_keygen
def test_a_second_setup_killed_before_its_first_file_is_undone_too(root, monkeypatch):
    before, rename = tree(root), Path.replace
    change.apply(options(root))

    def killed(path, target):
        rename(path, target)
        raise SystemExit  # after the record, before the file

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(SystemExit):
        change.apply(options(root, "network: {version: 2, renderer: networkd}\n"))
    monkeypatch.setattr(Path, "replace", rename)
    assert change.restore({"root": str(root)})["kept"] == []
    assert tree(root) == before


@pytest.mark.parametrize("gone", [True, False])
def test_an_address_that_another_program_takes_away_first_is_no_failure(tmp_path, monkeypatch, gone):
    """NetworkManager deactivates a deleted connection behind its command."""
    addresses = tmp_path / "addresses"
    addresses.write_text(json.dumps([{"family": "inet", "local": "192.168.100.10", "prefixlen": 24}]))
    ip = tmp_path / "ip"
    ip.write_text(f"""#!/bin/sh
if [ "$1" = -j ]; then
    echo "[{{\\"mtu\\": 1500, \\"addr_info\\": $(cat {addresses})}}]"
else
    {f"echo '[]' > {addresses}" if gone else ":"}
    echo 'Error: ipv4: Address not found.' >&2
    exit 2
fi
""")
    ip.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    saved = {"before": {"mtu": 1500}, "ours": ["192.168.100.10/24"]}
    if gone:
        change.put_interface_back("link0", saved)
        assert change.interface("link0")["addresses"] == []
    else:
        with pytest.raises(ValueError, match="Address not found"):
            change.put_interface_back("link0", saved)


def test_netplan_judges_the_file_before_anything_changes(root, tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "netplan").write_text('#!/bin/sh\necho "$@" > "$0.called"; ls "$3/etc/netplan"; echo bad >&2; exit 1\n')
    (programs / "netplan").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    before = tree(root)
    with pytest.raises(ValueError, match="bad"):
        change.apply(options(root))
    assert (programs / "netplan.called").read_text().startswith("generate --root-dir ")
    assert tree(root) == before
    assert not (root / change.RECORD).exists()


def test_a_record_that_is_none_is_an_answer_and_no_traceback(root):
    (root / change.RECORD).parent.mkdir(parents=True)
    (root / change.RECORD).write_text("[]")
    result = subprocess.run(
        [sys.executable, "-", json.dumps({"mode": "restore", "root": str(root)})],
        input=Path(change.__file__).read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no record of ours" in json.loads(result.stdout)["error"]
