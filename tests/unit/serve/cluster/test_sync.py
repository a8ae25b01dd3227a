"""cluster.sync's image by a stand-in docker, its errors, and what is refused before anything is sent."""

import json
import os

import pytest

from sparkforge.core.errors import InputError, IntegrityError, NetworkError, ProcessError, StorageError, UsageError
from sparkforge.serve.cluster import remote, sync
from sparkforge.serve.cluster.config import ClusterConfig

NAME = "sparkforge/vllm:spark"
# A node's engine is a folder with a file for each image; `save` prints it, `load` writes it down.
STAND_IN_DOCKER = """#!/bin/sh
echo "$ENGINE $*" >> "$CALLS"
file="$ENGINE/$(echo sparkforge/vllm:spark | tr / _)"
case "$*" in
"image ls"*) [ ! -f "$file" ] || printf '"%s"\\n' "$(cat "$file")" ;;
save*) cat "$file" ;;
load) cat > "$file" ;;
esac
"""
# ssh's place is taken by a shell that has the other node's engine: the address says which.
STAND_IN_SSH = """#!/bin/sh
case "$*" in *-G*) echo "hostname 10.0.0.2"; exit;; esac
echo "ssh $*" >> "$CALLS"
export ENGINE="$WORKER"
while [ "${1#-}" != "$1" ]; do [ "$1" = -- ] && { shift; break; }; shift 2; done
shift
exec sh -c "$*"
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster with a head here and a worker behind a stand-in for ssh, each with a stand-in for Docker's engine."""
    for name, text in (("docker", STAND_IN_DOCKER), ("ssh", STAND_IN_SSH)):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    variables = {"ENGINE": tmp_path / "head", "WORKER": tmp_path / "worker", "CALLS": tmp_path / "calls"}
    for name, path in variables.items():
        monkeypatch.setenv(name, str(path))
        if name != "CALLS":
            path.mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    nodes = [
        {"name": "head", "address": "192.168.100.10", "interface": "a"},
        {"name": "worker", "ssh": "nvidia@spark-2", "address": "192.168.100.11", "interface": "a"},
    ]
    return ClusterConfig.model_validate({"schema": 1, "nodes": nodes})


def image(tmp_path, node):
    file = tmp_path / node / "sparkforge_vllm:spark"
    return file.read_text() if file.exists() else ""


def test_an_image_goes_over_the_links_address_and_only_once(cluster, tmp_path):
    (tmp_path / "head/sparkforge_vllm:spark").write_text("sha256:aaaa")
    sync.send_image(cluster, dry_run=True)
    assert image(tmp_path, "worker") == ""
    sync.send_image(cluster)
    assert image(tmp_path, "worker") == "sha256:aaaa"
    calls = (tmp_path / "calls").read_text()
    assert "-o HostKeyAlias=10.0.0.2 -o HostName=192.168.100.11 nvidia@spark-2 docker load" in calls
    assert calls.count("docker load") == 1
    sync.send_image(cluster)
    assert (tmp_path / "calls").read_text().count("docker load") == 1


def test_an_image_that_arrives_as_another_one_is_an_error(cluster, tmp_path, monkeypatch):
    (tmp_path / "head/sparkforge_vllm:spark").write_text("sha256:aaaa")
    docker = tmp_path / "bin/docker"
    docker.write_text(
        docker.read_text().replace('load) cat > "$file"', 'load) cat > /dev/null; echo sha256:bbbb > "$file"')
    )
    with pytest.raises(IntegrityError, match="worker"):
        sync.send_image(cluster)


def test_a_save_that_fails_in_the_midst_is_no_success(cluster, tmp_path):
    (tmp_path / "head/sparkforge_vllm:spark").write_text("sha256:aaaa")
    docker = tmp_path / "bin/docker"
    docker.write_text(docker.read_text().replace('save*) cat "$file"', 'save*) cat "$file"; exit 1'))
    with pytest.raises(NetworkError, match="cut off"):
        sync.send_image(cluster)


def test_an_image_that_the_head_lacks_or_cannot_have_is_refused(cluster):
    with pytest.raises(InputError, match="no image"):
        sync.send_image(cluster)
    with pytest.raises(UsageError, match="no image"):
        sync.send_image(cluster.model_copy(update={"device": "embedded"}))


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (
            "rsync: write failed on x: No space left on device (28)\nrsync error: in file IO (code 11)",
            StorageError,
            "full",
        ),
        ("bash: line 1: rsync: command not found\nrsync error: (code 12)", ProcessError, "missing"),
        ("Host key verification failed.\nrsync error: unexplained error (code 255)", NetworkError, "log in"),
        ("nvidia@x: Permission denied (publickey).", NetworkError, "log in"),
        ("rsync error: timeout in data send/receive (code 30)", NetworkError, "cut off"),
    ],
)
def test_what_rsync_says_is_named_with_the_next_command(cluster, said, error, message):
    reported = sync.sending_error(ProcessError("rsync failed", said, "x"), cluster.workers[0])
    assert type(reported) is error
    assert message in reported.what
    assert reported.fix


@pytest.fixture
def listed(cluster, monkeypatch):
    """Return what each node has, which a test changes, and what rsync was called for."""
    whole = {"config.json": {"size": 9, "sha256": "a"}, "m.safetensors": {"size": 10**9, "sha256": "b"}}
    base = {"path": "/models/x", "whole": True, "free": 10**12}
    have, sent = {"head": {**base, "files": whole}, "worker": {**base, "files": {}, "whole": False}}, []

    def program(node, _source, options, **_):
        return have[node.name] if options["mode"] == "list" else {}

    def output(node, argv, **more):
        if argv[0] == "rsync":
            sent.append((argv, more["stdin"]))
        return ""

    monkeypatch.setattr(remote, "program", program)
    monkeypatch.setattr(remote, "output", output)
    return have, sent


def test_too_little_room_is_named_before_a_byte_is_sent(cluster, listed):
    have, sent = listed
    have["worker"]["free"] = 10**8
    with pytest.raises(StorageError, match="worker"):
        sync.send_model(cluster, "/models/x")
    assert sent == []


def test_files_that_stay_different_are_sent_again_once_and_then_an_error(cluster, listed):
    have, sent = listed
    have["worker"]["files"] = {"config.json": {"size": 9, "sha256": "c"}}
    with pytest.raises(IntegrityError, match="worker"):
        sync.send_model(cluster, "/models/x")
    assert [(("--append-verify" in argv), names) for argv, names in sent] == [
        (True, "m.safetensors\n"),
        (False, "config.json\n"),
        (False, "config.json\nm.safetensors\n"),
    ]
    shell = next(word for word in sent[0][0] if word.startswith("--rsh="))
    assert "HostName=192.168.100.11" in shell
    assert sent[0][0][-1] == "nvidia@spark-2:/models/x/"


def test_a_folder_without_a_model_is_refused(cluster, listed):
    have, _ = listed
    have["head"]["files"] = {"config.json": {"size": 9, "sha256": "a"}}
    with pytest.raises(InputError, match="no such model"):
        sync.send_model(cluster, "/models/x")
    with pytest.raises(UsageError, match="no model is named"):
        sync.send_model(cluster)


@pytest.mark.parametrize("folder", ["models/x", "~/models/x"])
def test_a_model_that_is_another_folder_on_each_node_is_refused(cluster, listed, folder):
    with pytest.raises(UsageError, match="no absolute path") as caught:
        sync.send_model(cluster.model_copy(update={"model": folder}))
    assert caught.value.fix.startswith('model = "/')


def test_a_file_that_the_head_lacks_is_named(cluster, listed):
    have, sent = listed
    whole = have["head"]["files"]
    have["worker"] = {**have["head"], "files": {**whole, "README.txt": {"size": 1, "sha256": "c"}}}
    sync.send_model(cluster, "/models/x")  # which nothing compares
    have["worker"]["files"] = {**whole, "old.json": {"size": 1, "sha256": "c"}}
    with pytest.raises(InputError, match="worker") as caught:
        sync.send_model(cluster, "/models/x")
    assert "rm old.json" in caught.value.fix
    assert sent == []


def test_sums_of_a_fetched_model_are_read_and_not_computed(cluster, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "m.safetensors"):
        (folder / name).write_text("x")
    note = {"source": "x", "revision": "y", "files": {"m.safetensors": {"size": 1, "sha256": "noted"}}}
    (folder / sync.NOTE).write_text(json.dumps(note))
    files = sync._head_files(cluster.head, str(folder)).files
    assert files["m.safetensors"].sha256 == "noted"
    assert len(files["config.json"].sha256) == 64
    assert set(files) == {"config.json", "m.safetensors", sync.NOTE}
