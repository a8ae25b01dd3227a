"""How the GPU's serving benchmark splits a model: names, flags, variables, what the logs must say, the second host."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab.served import random_weights, ranks, second_host, serve_gpu
from lab.served.ranks import Split
from sparkforge.core.errors import ServerError, UsageError

ON_TWO = """(Worker_TP0_EP0 pid=11) INFO Using 'SPARK_HOPPER' Mxfp4 MoE backend (packed).
(Worker_TP1_EP1 pid=12) INFO Using 'SPARK_HOPPER' Mxfp4 MoE backend (packed).
"""
SOCKETS = """gpu:11:90 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
gpu:11:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
HOST = second_host.SecondHost(("sfa", "sfb"), ("10.79.0.1", "10.79.0.2"), ("nsenter", "--target", "9"), "namespaces")


@pytest.mark.parametrize(
    ("word", "split"),
    [
        ("", Split(4)),
        ("1", Split()),
        ("tp2", Split(2)),
        ("ep2", Split(2, expert=True)),
        ("hosts", Split(2, hosts=True)),
    ],
)
def test_a_backends_name_may_say_how_it_is_split(word, split):
    assert Split(4).named(word) == split


@pytest.mark.parametrize("word", ["2", "tp", "tp0", "pp2", "host"])
def test_another_split_is_refused(word):
    with pytest.raises(UsageError, match="there is no split"):
        Split().named(word)


@pytest.mark.parametrize(("tensor", "expert", "hosts"), [(4, False, True), (1, True, False)])
def test_a_split_that_cannot_be_is_refused(tensor, expert, hosts):
    with pytest.raises(UsageError):
        ranks.default_split(tensor, expert=expert, hosts=hosts)


def test_one_gpu_changes_nothing_and_several_never_use_multicast():
    assert (Split().arguments(), Split().environment()) == ((), {})
    arguments, environment = Split(2, expert=True).arguments(), Split(2).environment()
    assert arguments == (
        "--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", "--enable-expert-parallel",
    )  # fmt: skip
    assert {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}.items() < environment.items()


def test_the_custom_all_reduce_is_off_unless_torch_says_that_it_has_no_multicast(monkeypatch):
    for answer, flags in (("False", ()), ("True", ("--disable-custom-all-reduce",))):
        ranks.all_reduce_flags.cache_clear()
        monkeypatch.setattr(ranks, "MULTICAST", f"print({answer!r})")
        assert ranks.all_reduce_flags(sys.executable) == flags
    ranks.all_reduce_flags.cache_clear()
    assert ranks.all_reduce_flags("/bin/false") == ("--disable-custom-all-reduce",)
    ranks.all_reduce_flags.cache_clear()


def test_two_hosts_have_a_gpu_each_and_only_sockets():
    head, worker = ranks.parts(Split(2, hosts=True), HOST, 8123, 9123)
    assert (head.prefix, worker.prefix) == ((), HOST.inside)
    assert {"--nnodes=2", "--node-rank=0", "--master-addr=10.79.0.1", "--master-port=9123"} < set(head.arguments)
    assert {"--node-rank=1", "--headless", "--tensor-parallel-size=2"} < set(worker.arguments)
    assert [part.environment["CUDA_VISIBLE_DEVICES"] for part in (head, worker)] == ["0", "1"]
    for name in ("NCCL_HOSTID", "VLLM_CACHE_ROOT"):
        assert head.environment[name] != worker.environment[name]
    assert worker.environment["NCCL_SOCKET_IFNAME"] == "=sfb"
    assert {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}.items() < head.environment.items()


def started(split, two_hosts=""):
    return serve_gpu.Started("http://127.0.0.1:1", (), 0.0, split, two_hosts)


def test_what_is_seen_names_ranks_channels_and_the_all_reduce(tmp_path):
    log = tmp_path / "spark.log"
    first, second = ON_TWO.splitlines(keepends=True)
    log.write_text(first + SOCKETS)
    ranks.worker_log(log).write_text(second)
    seen = serve_gpu._seen("spark@hosts", started(Split(2, hosts=True), "namespaces"), log)
    assert seen["ranks"] == ("Worker_TP0_EP0", "Worker_TP1_EP1")
    assert seen["nccl_channels"] == {"NET/Socket": 2}
    assert (seen["carried"], seen["over_rdma"]) == ("TCP carries 2 of 2 channels", 0)
    log.write_text(ON_TWO + "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\ndisable_custom_all_reduce=True")
    seen = serve_gpu._seen("spark@ep2", started(Split(2, expert=True)), log)
    assert (seen["nccl_channels"], seen["custom_all_reduce"]) == ({"P2P/CUMEM": 1}, "off by flag")
    assert "two_hosts" not in seen


def test_a_rank_without_our_backend_is_refused(tmp_path):
    log = tmp_path / "log"
    log.write_text(ON_TWO.splitlines()[0])
    with pytest.raises(ServerError, match="not take spark@tp2 on every rank"):
        serve_gpu._seen("spark@tp2", started(Split(2)), log)
    assert serve_gpu._seen("spark", started(Split()), log) == {
        "backend_line": "Using 'SPARK_HOPPER' Mxfp4 MoE backend (packed)."
    }


def test_ranks_have_other_experts_and_the_same_router():
    def filled(shard):
        tensors = {"w13_weight": torch.zeros(64, 64, dtype=torch.uint8), "router.weight": torch.zeros(64, 64)}
        random_weights.fill([(n, torch.nn.Parameter(t, requires_grad=False)) for n, t in tensors.items()], shard)
        return tensors

    first, again, second = filled(0), filled(0), filled(1)
    assert torch.equal(first["w13_weight"], again["w13_weight"])
    assert not torch.equal(first["w13_weight"], second["w13_weight"])
    assert torch.equal(first["router.weight"], second["router.weight"])


STAND_IN = """
import json, os, signal, sys
arguments = sys.argv[1:]
with open(os.environ["SEEN"], "a") as seen:
    seen.write(json.dumps([arguments, os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "")]) + "\\n")
signal.pause()
"""


def test_servers_that_start_together_have_ports_of_their_own_and_end_together(tmp_path, monkeypatch):
    stand_in, seen = tmp_path / "stand_in.py", tmp_path / "seen"
    stand_in.write_text(STAND_IN)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nSEEN={seen} exec {sys.executable} {stand_in} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(serve_gpu.sys, "executable", str(interpreter))
    monkeypatch.setattr(ranks, "all_reduce_flags", lambda _: ())
    options = serve_gpu._parser().parse_args(
        ["--out", "x", "--work", str(tmp_path), "--together", "--backends", "spark@tp2", "marlin"]
    )
    plan = serve_gpu.ServingPlan(10, 8, (1,), 1, 60.0, 8600, kv_cache_bytes=1 << 30)
    with serve_gpu._all_started(options, plan, tmp_path) as servers:
        while not seen.exists() or len(seen.read_text().splitlines()) < 2:
            assert all(serve_gpu.started_at(pid) for _, server in servers.values() for pid in server.pids)
    assert not any(serve_gpu.started_at(pid) for _, server in servers.values() for pid in server.pids)
    calls = dict(sorted((argv[argv.index("--port") + 1], (argv, env)) for argv, env in map(json.loads, seen.open())))
    assert list(calls) == ["8600", "8601"]
    (split, multicast), (alone, _) = calls.values()
    assert multicast == "1"
    assert split[-4:] == list(Split(2).arguments())
    assert "--tensor-parallel-size" not in alone
    assert all(argv[argv.index("--kv-cache-memory-bytes") + 1] == str(1 << 30) for argv in (split, alone))


def test_the_second_host_is_reached_over_the_cable_and_leaves_nothing():
    if os.geteuid():
        pytest.skip("needs root")
    try:
        with second_host.second_host() as host:
            ours, theirs = (f"/sys/class/net/{name}" for name in host.interfaces)
            assert Path(ours).exists()
            assert not Path(theirs).exists()
            server = (
                "import socket as s; a = s.create_server(('{}', 7)); print(1, flush=True); a.accept()[0].send(b'yes')"
            )
            command = [*host.inside, sys.executable, "-c", server.format(host.addresses[1])]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
                assert other.stdout.readline() == "1\n"
                client = f"import socket as s; print(s.create_connection(('{host.addresses[1]}', 7), 10).recv(9))"
                answer = subprocess.run(
                    [sys.executable, "-c", client], check=True, capture_output=True, text=True, timeout=20
                )
            assert answer.stdout == "b'yes'\n", answer.stderr
            shared = subprocess.run(
                [*host.inside, "stat", "-c", "%d", "/dev/shm"], check=True, capture_output=True, text=True
            )
            assert int(shared.stdout) != Path("/dev/shm").stat().st_dev
    except OSError as error:
        pytest.skip(f"no namespaces here: {error}")
    assert not Path(ours).exists()


@contextlib.contextmanager
def refused(*, own_network):
    if own_network:
        raise OSError(95, "no veth pair")
    yield HOST


def test_without_a_veth_pair_both_hosts_are_on_loopback_and_without_namespaces_there_is_none(monkeypatch):
    monkeypatch.setattr(serve_gpu, "second_host", refused)
    with serve_gpu._second_host() as host:
        assert host == HOST
    monkeypatch.setattr(serve_gpu, "second_host", lambda own_network: refused(own_network=True))
    with pytest.raises(ServerError, match="no second host", check=lambda error: "no veth" in error.why):
        serve_gpu._second_host()
