"""cluster.sync and the start of containers between two network namespaces with an sshd."""

import os
import shutil

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

    for host in hosts:
        host.stand_in("rsync", f'#!/bin/sh\nexec {shutil.which("rsync")} "$@" --an-option-of-tomorrow\n')
        assert "rsync of head or of worker is older than" in head.inv(*sync).stderr
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
    assert "worker: would get model-1.safetensors" in head.inv(*sync, "--dry-run").stderr
    result = head.inv(*sync)
    assert result.returncode == 0, result.stderr
    assert sent(head) - before < 1 << 20
    assert (theirs / "model-1.safetensors").read_bytes() == (folder / "model-1.safetensors").read_bytes()
    assert "worker: has every file already" in head.inv(*sync).stderr


def sent(host):
    """Bytes that went over the head's end of the link."""
    return int(host.run("cat", f"/sys/class/net/{cluster_hosts.LINKS[0]}/statistics/tx_bytes").stdout)
