"""cluster.sync and the start of containers between two network namespaces with an sshd."""

import os
import re
import shutil
import sys

import cluster_hosts
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.needs("ip", "ssh", "sshd", "unshare", "rsync")]
ADDRESSES = ("192.168.100.10", "192.168.100.11")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    yield from cluster_hosts.running_hosts(tmp_path_factory.mktemp("hosts"))


def test_a_model_is_sent_resumed_and_mended_over_the_link(hosts):
    head, worker = hosts
    for host, link, address in zip(hosts, cluster_hosts.LINKS, ADDRESSES, strict=True):
        assert host.run("ip", "addr", "add", f"{address}/24", "dev", link).returncode == 0
    config = cluster_hosts.config(hosts, ADDRESSES)
    # Both hosts see one file system; the worker's /var/lib is its own.
    folder, theirs = head.files / "lib/models/tiny", worker.files / "lib/models/tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    (folder / "model-1.safetensors").write_bytes(os.urandom(6 << 20))
    (folder / "notes.txt").write_text("not of the model")
    sync = ("cluster.sync", "--config", config, "--model", "/var/lib/models/tiny")

    for host, name in zip(hosts, ("head", "worker"), strict=True):
        host.stand_in("rsync", f'#!/bin/sh\nexec {shutil.which("rsync")} "$@" --an-option-of-tomorrow\n')
        assert f"rsync of {name} is older than" in head.inv(*sync).stderr
        (host.programs / "rsync").unlink()

    staged = theirs.with_name(".tiny.sparkforge-sync")
    worker.stand_in("rsync", f'#!/bin/sh\nulimit -f 4096\nexec {shutil.which("rsync")} "$@"\n')  # 2 MiB a file
    cut = head.inv(*sync)
    (worker.programs / "rsync").unlink()
    assert cut.returncode == 11, cut.stderr
    assert "sending to worker was cut off" in cut.stderr
    assert not theirs.exists()
    assert (staged / "model-1.safetensors").stat().st_size == 2 << 20

    worker.stand_in("sync", "#!/bin/sh\necho 'sync: Input/output error' >&2\nexit 1\n")
    before = sent(head)
    result = head.inv(*sync)
    assert "Input/output error" in result.stderr
    assert 4 << 20 <= sent(head) - before < 5 << 20  # over the link, without what was there
    assert not theirs.exists()  # it is complete, but not on the disk
    flushed = worker.files / "flushed"
    worker.stand_in(
        "sync", f'#!/bin/sh\necho "$*" $(ls -A /var/lib/models) >> {flushed}\nexec {shutil.which("sync")} "$@"\n'
    )
    result = head.inv(*sync)
    (worker.programs / "sync").unlink()
    assert result.returncode == 0, result.stderr
    parent, collected = "/var/lib/models", ".tiny.sparkforge-sync"
    assert flushed.read_text().splitlines() == [f"-f -- {parent}/{collected} {collected}", f"-- {parent} tiny"]
    assert sorted(file.name for file in theirs.iterdir()) == ["config.json", "model-1.safetensors"]
    assert (theirs / "model-1.safetensors").read_bytes() == (folder / "model-1.safetensors").read_bytes()
    assert not staged.exists()

    with (theirs / "model-1.safetensors").open("r+b") as opened:
        opened.seek(3 << 20)
        opened.write(b"damaged")
    before = sent(head)
    assert "worker: 1 files differ" in head.inv(*sync, "--dry-run").stderr
    result = head.inv(*sync)
    assert result.returncode == 0, result.stderr
    assert sent(head) - before < 1 << 20
    assert (theirs / "model-1.safetensors").read_bytes() == (folder / "model-1.safetensors").read_bytes()
    assert "worker: has every file already" in head.inv(*sync).stderr


def sent(host):
    """Bytes that went over the head's end of the link."""
    return int(host.run("cat", f"/sys/class/net/{cluster_hosts.LINKS[0]}/statistics/tx_bytes").stdout)


# Stands for docker: writes down its words with the variables that Compose would read, and has no engine.
STAND_IN_DOCKER = """#!/bin/sh
{ printf '%s | ' "$*"; env | grep -E '^(VLLM_|NCCL_|GLOO_|SPARKFORGE_CLUSTER)' | tr '\\n' ' '; echo; } >> CALLS
case "$*" in
*--entrypoint*) echo '{"devices": ["uverbs0"], "open": ["uverbs0"], "memlock": MEMLOCK}' ;;
*"ps --all --quiet"*) echo 0123456789abcdef ;;
*"config --format json"*) echo '{"services": {"vllm": {"image": "x", "environment": {"SPARKFORGE_STACK": "spark"}}}}' ;;
esac
"""
UP = """
import sys
from pathlib import Path
from sparkforge.core.errors import SparkforgeError
from sparkforge.serve.cluster import checks, config, start
checks.look = lambda cluster: None
checks.evaluate_all = lambda facts: []  # these hosts have no GPU
try:
    start.up(config.read(Path(sys.argv[1])))
except SparkforgeError as error:
    sys.exit(str(error))
"""


def containers_up(hosts, memlock="-1"):
    """Start containers on both hosts by a stand-in docker, which cannot; return the error and each host's calls."""
    for host in hosts:
        cluster_hosts.checkout(host)
        calls = host.files / "calls"
        calls.unlink(missing_ok=True)
        limit = memlock if host is hosts[1] else "-1"
        host.stand_in("docker", STAND_IN_DOCKER.replace("CALLS", str(calls)).replace("MEMLOCK", limit))
        host.environment["DOCKER_HOST"] = f"unix://{host.files}/no.sock"
    file = cluster_hosts.config(hosts, profile='"safe"')
    result = hosts[0].run(sys.executable, "-c", UP, file)
    return result.stderr, [(host.files / "calls").read_text().splitlines() for host in hosts]


def test_containers_are_validated_on_every_node_before_one_starts_the_workers_first(hosts):
    error, (head, worker) = containers_up(hosts)
    assert "Docker engine" in error  # the head's start, which asks the engine itself
    compose_calls = [
        [line.partition(" | ")[0].partition("docker-compose.cluster.yml ")[2] for line in calls]
        for calls in (head, worker)
    ]
    once = "run --rm --no-deps --no-TTY"
    for calls in compose_calls:
        assert calls[0].startswith(f"{once} --entrypoint /opt/venv/bin/python vllm -c")
        assert calls[1] == f"{once} vllm validate"
        assert "up --detach --no-build vllm" in calls
        assert calls[-1] == "down"  # nothing is left on either
    variables = [next(line for line in calls if " up --detach" in line).partition(" | ")[2] for calls in (head, worker)]
    for rank, (text, address) in enumerate(zip(variables, cluster_hosts.MANAGEMENT, strict=True)):
        assert f"--node-rank={rank} --master-addr={cluster_hosts.MANAGEMENT[0]}" in text
        assert f"VLLM_HOST_IP={address} " in text
        assert f"GLOO_SOCKET_IFNAME={cluster_hosts.LINKS[rank]} " in text
        assert "NCCL_IB_HCA==rocep1s0f1 " in text
    assert ("--headless" in variables[0], "--headless" in variables[1]) == (False, True)
    tokens = {re.search(r"SPARKFORGE_CLUSTER_TOKEN=([0-9a-f]{32}) ", text)[1] for text in variables}
    assert len(tokens) == 1


def test_a_container_without_locked_memory_on_one_node_starts_none(hosts):
    error, calls = containers_up(hosts, memlock="8388608")
    assert "the container of worker has no RDMA" in error
    assert "8388608 bytes" in error
    assert not any(" up --detach" in line for lines in calls for line in lines)
