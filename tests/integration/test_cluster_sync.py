"""cluster.sync between two network namespaces with an sshd: send a model, resume after a cut, repair damage."""

import os
import shutil
import subprocess

import cluster_nodes as namespaces
import pytest
from programs import write_program

pytestmark = [pytest.mark.integration, pytest.mark.needs(*namespaces.PROGRAMS, "rsync")]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two machines; the worker sees its own folder in place of the head's models."""
    for nodes in namespaces.made(tmp_path_factory.mktemp("nodes")):
        for name in ("models", "theirs"):
            (nodes.work / name).mkdir()
        with nodes.mounted(nodes.work / "theirs", nodes.work / "models"):
            yield nodes


def test_a_model_is_sent_resumed_and_mended_over_the_link(nodes):
    models = nodes.work / "models"
    folder, theirs = models / "tiny", nodes.work / "theirs/tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    (folder / "model-1.safetensors").write_bytes(os.urandom(6 << 20))
    (folder / "notes.txt").write_text("not of the model")
    sync = ("cluster.sync", "--config", str(nodes.config()), "--model", str(folder))

    for programs in (nodes.ours, nodes.theirs):
        write_program(programs / "rsync", f'exec {shutil.which("rsync")} "$@" --an-option-of-tomorrow')
        assert "rsync of head or of worker is older than" in nodes.inv(*sync).stderr
        (programs / "rsync").unlink()

    staged = theirs.with_name(".tiny.sparkforge-sync")
    write_program(nodes.theirs / "rsync", f'ulimit -f 4096\nexec {shutil.which("rsync")} "$@"')  # 2 MiB a file
    cut = nodes.inv(*sync)
    (nodes.theirs / "rsync").unlink()
    assert cut.returncode == 11, cut.stderr
    assert "sending to worker was cut off" in cut.stderr
    assert not theirs.exists()
    assert (staged / "model-1.safetensors").stat().st_size == 2 << 20

    write_program(nodes.theirs / "sync", "echo 'sync: Input/output error' >&2\nexit 1")
    before = sent(nodes)
    result = nodes.inv(*sync)
    assert "Input/output error" in result.stderr
    assert 4 << 20 <= sent(nodes) - before < 5 << 20  # only the missing part was sent over the link
    assert not theirs.exists()  # complete, but not yet synced to the disk
    flushed = nodes.work / "flushed"
    write_program(nodes.theirs / "sync", f'echo "$*" $(ls -A {models}) >> {flushed}\nexec {shutil.which("sync")} "$@"')
    result = nodes.inv(*sync)
    (nodes.theirs / "sync").unlink()
    assert result.returncode == 0, result.stderr
    assert flushed.read_text().splitlines() == [f"-f -- {models}/{staged.name} {staged.name}", f"-- {models} tiny"]
    assert sorted(file.name for file in theirs.iterdir()) == ["config.json", "model-1.safetensors"]
    assert (theirs / "model-1.safetensors").read_bytes() == (folder / "model-1.safetensors").read_bytes()
    assert not staged.exists()

    with (theirs / "model-1.safetensors").open("r+b") as opened:
        opened.seek(3 << 20)
        opened.write(b"damaged")
    shutil.copystat(folder / "model-1.safetensors", theirs / "model-1.safetensors")  # only the checksum differs
    before = sent(nodes)
    assert "worker: would get model-1.safetensors" in nodes.inv(*sync, "--dry-run").stderr
    result = nodes.inv(*sync)
    assert result.returncode == 0, result.stderr
    assert sent(nodes) - before < 1 << 20
    assert (theirs / "model-1.safetensors").read_bytes() == (folder / "model-1.safetensors").read_bytes()
    assert "worker: has every file already" in nodes.inv(*sync).stderr


def sent(nodes):
    command = nodes.inside(0, "cat", f"/sys/class/net/{namespaces.CABLES[0]}/statistics/tx_bytes")
    return int(subprocess.run(command, check=True, capture_output=True).stdout)
