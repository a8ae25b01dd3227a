"""cluster.sync's image and model between a head here and a worker behind stand-ins for ssh, Docker and rsync."""

import json
import os

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from programs import write_program

from sparkforge.core.errors import (
    EngineError,
    InputError,
    IntegrityError,
    NetworkError,
    ProcessError,
    StorageError,
    UsageError,
)
from sparkforge.image import signing
from sparkforge.serve.cluster import sync
from sparkforge.serve.cluster.config import ClusterConfig

# A node's engine is a folder with a file for the image; `save` prints the file, `load` writes it.
STAND_IN_DOCKER = """#!/bin/sh
file="$ENGINE/image"
case "$*" in
"image ls"*) [ ! -f "$file" ] || cat "$file" ;;
save*) cat "$file" ;;
load) cat > "$file" ;;
esac
"""
# A shell with the other node's engine replaces ssh; the address selects the engine.
STAND_IN_SSH = """#!/bin/sh
case "$*" in *-G*) echo "hostname 10.0.0.2"; exit;; esac
echo "ssh $*" >> "$CALLS"
export ENGINE="$WORKER"
while [ "${1#-}" != "$1" ]; do [ "$1" = -- ] && { shift; break; }; shift 2; done
shift
exec sh -c "$*"
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    for name in ("head", "worker"):
        (tmp_path / name).mkdir()
    for name, path in {"ENGINE": "head", "WORKER": "worker", "CALLS": "calls"}.items():
        monkeypatch.setenv(name, str(tmp_path / path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    for name, script in (("docker", STAND_IN_DOCKER), ("ssh", STAND_IN_SSH)):
        write_program(tmp_path / "bin" / name, script)
    return tmp_path / "bin"


@pytest.fixture
def cluster(programs):
    nodes = [
        {"name": "head", "address": "192.168.100.10", "interface": "a"},
        {"name": "worker", "ssh": "nvidia@spark-2", "address": "192.168.100.11", "interface": "a"},
    ]
    return ClusterConfig.model_validate({"schema": 1, "nodes": nodes})


def test_an_image_goes_over_the_links_address_and_only_once(cluster, tmp_path):
    with pytest.raises(InputError, match="no image"):
        sync.send_image(cluster)
    with pytest.raises(UsageError, match="no image"):
        sync.send_image(cluster.model_copy(update={"device": "embedded"}))
    (tmp_path / "head/image").write_text("sha256:aaaa")
    sync.send_image(cluster, dry_run=True)
    assert not (tmp_path / "worker/image").exists()
    for _ in range(2):
        sync.send_image(cluster)
        assert (tmp_path / "worker/image").read_text() == "sha256:aaaa"
    calls = (tmp_path / "calls").read_text()
    assert "-o HostKeyAlias=10.0.0.2 -o HostName=192.168.100.11 nvidia@spark-2 docker load" in calls
    assert calls.count("docker load") == 1


def test_an_image_that_trust_toml_does_not_take_is_not_sent(cluster, trust_file, tmp_path):
    (tmp_path / "head/image").write_text("sha256:aaaa")
    public = json.dumps(signing.public_text(Ed25519PrivateKey.generate()))
    trust_file.write_text(f'schema = 1\nimages.demand = ["signature"]\nkeys.lab.public = {public}\n')
    with pytest.raises(EngineError):  # the signature is looked for, in an engine that does not run
        sync.send_image(cluster)
    assert not (tmp_path / "worker/image").exists()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('load) cat > "$file"', 'load) cat > /dev/null; echo sha256:bbbb > "$file"', IntegrityError),
        ('save*) cat "$file"', 'save*) cat "$file"; exit 1', NetworkError),
    ],
)
def test_an_image_that_arrives_changed_or_cut_off_is_an_error(cluster, programs, tmp_path, old, new, error):
    (tmp_path / "head/image").write_text("sha256:aaaa")
    write_program(programs / "docker", STAND_IN_DOCKER.replace(old, new))
    with pytest.raises(error, match="worker"):
        sync.send_image(cluster)


@pytest.mark.parametrize(
    ("folder", "message"), [("", "no model is named"), ("~/models/x", "absolute path"), ("/", "no such model")]
)
def test_a_folder_without_a_model_or_that_is_another_one_on_each_node_is_refused(cluster, folder, message):
    with pytest.raises((UsageError, InputError), match=message):
        sync.send_model(cluster.model_copy(update={"model": folder}))


@pytest.mark.parametrize(
    ("printed", "error", "message"),
    [
        ("rsync: write failed on x: No space left on device (28)\nrsync error: (code 11)", StorageError, "full"),
        ("bash: line 1: rsync: command not found\nrsync error: (code 12)", ProcessError, "missing"),
        ("nvidia@x: Permission denied (publickey).", NetworkError, "log in"),
        ('rsync: [Receiver] mkdir "/m" failed: Permission denied (13)', StorageError, "cannot write"),
        ("rsync: --mkpath: unknown option", ProcessError, "is older than 3.2.4"),
        ("rsync error: timeout in data send/receive (code 30)", NetworkError, "cut off"),
    ],
)
def test_an_error_of_rsync_is_named_with_the_next_command(cluster, programs, tmp_path, printed, error, message):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "m.safetensors"):
        (folder / name).write_text("x")
    write_program(programs / "rsync", f"echo '{printed}' >&2\nexit 12")
    with pytest.raises(error, match=message) as caught:
        sync.send_model(cluster, str(folder))
    assert type(caught.value) is error
    assert caught.value.fix
