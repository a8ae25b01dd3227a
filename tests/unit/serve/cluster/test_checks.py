"""Each check of a cluster: no finding on healthy nodes, and a finding with a fix on a broken node."""

import re
from dataclasses import replace

import pytest

from sparkforge.core.errors import NetworkError
from sparkforge.pins.locks import LOCKS
from sparkforge.serve.cluster import checks
from sparkforge.serve.cluster.remote import Reach
from validate.checks.finding import Status

SECOND = "spark2"


def node(situation, **changes):
    facts = situation.facts[SECOND].model_copy(update=changes)
    return replace(situation, facts={**situation.facts, SECOND: facts})


def interface(situation, name, **changes):
    entries = situation.facts[SECOND].interfaces
    changed = tuple(entry.model_copy(update=changes) if entry.name == name else entry for entry in entries)
    return node(situation, interfaces=changed)


def device(situation, name, **changes):
    entries = situation.facts[SECOND].rdma
    return node(situation, rdma=tuple(e.model_copy(update=changes) if e.name == name else e for e in entries))


def config(situation, **changes):
    return replace(situation, config=situation.config.model_copy(update=changes))


def nodes(situation, **changes):
    first, second = situation.config.nodes
    return config(situation, nodes=(first, second.model_copy(update=changes)))


def reach(situation, answer):
    return replace(situation, reaches={**situation.reaches, ("spark", SECOND): answer})


SILENT = NetworkError("spark2 cannot be reached by ssh", "Permission denied (publickey).", "ssh spark2 true")
CONTROL, HALF = "enp1s0f1np1", "enP2p1s0f1np1"
MEMORY = {"MemTotal": 1 << 37, "MemFree": 1 << 30, "MemAvailable": 1 << 36}


def silent(situation):
    return replace(situation, facts={"spark": situation.facts["spark"]}, errors={SECOND: SILENT})


def slow(facts):
    interfaces = tuple(entry.model_copy(update={"mtu": 1500}) for entry in facts.interfaces)
    return facts.model_copy(update={"interfaces": interfaces})


BROKEN = [
    ("nodes", silent, "Permission denied"),
    ("machines", lambda s: node(s, machine="x86_64"), "spark2 has x86_64"),
    ("drivers", lambda s: node(s, driver="590.10"), "spark2 has 590.10"),
    ("drivers", lambda s: node(s, driver=None, errors={"driver": "no nvidia-smi"}), "spark2: no nvidia-smi"),
    ("images", lambda s: node(s, image="sha256:" + "9" * 64), "the image differs"),
    ("images", lambda s: node(s, image=None, errors={"image": "No such image"}), "No such image"),
    ("models", lambda s: node(s, model="3" * 64), "the model differs"),
    ("link", lambda s: interface(s, CONTROL, carrier=False), "enp1s0f1np1 of spark2 is down"),
    ("link", lambda s: nodes(s, interface="enp9"), "spark2 has no interface enp9"),
    ("link", lambda s: nodes(s, address="192.168.177.99"), "not 192.168.177.99"),
    ("control-network", lambda s: nodes(s, interface="wlP9s9", address="192.168.0.32"), "WiFi carries"),
    ("control-network", lambda s: nodes(s, interface=HALF, address="192.168.178.12"), "2 subnets"),
    ("rdma", lambda s: nodes(s, hcas=()), "NCCL uses TCP"),
    ("rdma", lambda s: nodes(s, hcas=("mlx5_0",)), "spark2 has no mlx5_0"),
    ("rdma", lambda s: device(s, "rocep1s0f1", state="DOWN"), "rocep1s0f1 of spark2 is DOWN"),
    ("rdma", lambda s: node(s, infiniband=None), "no /dev/infiniband"),
    ("port-halves", lambda s: nodes(s, hcas=("rocep1s0f1",)), "does not use enP2p1s0f1np1"),
    ("port-halves", lambda s: interface(s, HALF, addresses=("192.168.177.22/24",)), "not on two subnets"),
    ("mtu", lambda s: interface(s, HALF, mtu=1500), "they differ"),
    ("packets", lambda s: reach(s, Reach(packet="Message too long")), "from spark to spark2: a full packet"),
    ("round-trip", lambda s: reach(s, Reach(sent=50, lost=3, fastest=5e-5)), "spark2: 3 of 50 packets are lost"),
    ("round-trip", lambda s: reach(s, Reach(sent=50, fastest=0.004)), "spark2: the fastest packet took 4.0 ms"),
    ("round-trip", lambda s: reach(s, Reach()), "0 of 0 packets"),
    ("ports", lambda s: node(s, ports_taken=(29500,)), "spark2: 29500"),
    ("firewall", lambda s: reach(s, Reach(blocked={"29500": "timed out"})), "port 29500: timed out"),
    ("firewall", lambda s: reach(s, SILENT), "Permission denied"),
    ("firewall", lambda s: replace(s, reaches={}), "not tried"),
    ("free-memory", lambda s: node(s, memory=MEMORY), "spark2 1.0 GiB"),
    ("split", lambda s: replace(s, model=None), "not known"),
    ("split", lambda s: config(s, tensor=3), "64 heads are not a multiple of 3"),
    ("split", lambda s: config(s, tensor=3, expert=True), "128 experts are not a multiple of 3"),
    ("split", lambda s: replace(s, head="mxfp4"), "100544 columns"),
]
WARNED = [
    ("mtu", lambda s: replace(s, facts={name: slow(facts) for name, facts in s.facts.items()}), "smaller than 9000"),
]


def finding(situation, name):
    return next(result for result in checks.evaluate_all(situation) if result.check == name)


@pytest.mark.parametrize(
    ("status", "name", "broken", "evidence"),
    [(Status.FAIL, *row) for row in BROKEN] + [(Status.WARN, *row) for row in WARNED],
)
def test_a_broken_fact_is_named_by_its_check_with_a_fix(healthy, status, name, broken, evidence):
    assert finding(healthy, name).status is Status.PASS
    result = finding(broken(healthy), name)
    assert result.status is status
    assert evidence in result.evidence
    assert result.fix


@pytest.mark.parametrize(("device", "images"), [("embedded", Status.SKIPPED), ("docker-cpu", Status.FAIL)])
def test_a_device_without_gpus_is_not_asked_for_them(healthy, device, images):
    situation = config(node(healthy, driver=None, image=None, infiniband=None), device=device)
    statuses = [finding(situation, name).status for name in ("drivers", "images", "rdma")]
    assert statuses == [Status.SKIPPED, images, Status.SKIPPED]


def test_the_size_of_an_expert_is_split_by_all_nodes_of_both_ways(healthy):
    def split(intermediate, **changes):
        model = replace(healthy.model, intermediate=intermediate)
        settings = {"pipeline": 2, "nodes": healthy.config.nodes * 2, **changes}
        return finding(config(replace(healthy, model=model), **settings), "split")

    assert split(2880).status is Status.PASS
    assert "size of 2882 is not a multiple of 4" in split(2882).evidence
    assert "not support a pipeline" in split(2880, device="embedded", tensor=1).evidence


def test_no_lock_has_the_nccl_that_hangs_between_two_sparks():
    """NVIDIA/nccl issue 2167."""
    nccl = [re.search(r"^nvidia-nccl-cu\d+==(\S+)", lock.read_text(), re.MULTILINE) for lock in LOCKS.glob("*.txt")]
    versions = {match[1] for match in nccl if match}
    assert versions
    assert "2.30.4" not in versions
