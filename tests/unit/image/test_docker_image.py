"""An image's metadata, read through a fake engine and compared with this checkout."""

import base64
import hashlib
import io
import json
import tarfile
import time
from functools import partial

import pytest

from sparkforge.core import errors
from sparkforge.image import build as builder
from sparkforge.image import engine
from sparkforge.image import inspect as docker_image

PATH = "/opt/sparkforge/image.json"
AUDIT = "/opt/sparkforge/audit.json"
CLEAN = {"files": 3, "code": {}}
LABELS = {"org.sparkforge.manifest": PATH, "org.sparkforge.audit": AUDIT, "a": "b"}


@pytest.fixture
def manifest():
    wanted = builder.expected("amd64", stack="embedded")
    queues_and_locks = {key: dict(value) for key, value in wanted.items()}
    return {**queues_and_locks, "device": "cpu", "kernels": {}, "key": "k", "audit": named(CLEAN)}


def named(report):
    return {"audit.json": hashlib.sha256(json.dumps(report).encode()).hexdigest()}


@pytest.fixture
def holding(fake_engine):
    def packed(content):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            entry = tarfile.TarInfo("some.json")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
        return data.getvalue()

    def holding(content, labels=LABELS, report=CLEAN):
        fake_engine.image["Config"]["Labels"] = labels
        files = {PATH: packed(content), AUDIT: packed(report)}
        stat = base64.b64encode(b'{"name": "some.json"}').decode()
        headers = {"X-Docker-Container-Path-Stat": stat}
        routes = {
            r"POST /containers/create": lambda query: (201, {"Id": "abc", "Warnings": []}),
            r"GET /containers/abc/archive": lambda query: (200, files[query["path"]], headers),
            r"DELETE /containers/abc": lambda query: (204, b""),
        }
        fake_engine.routes = {**routes, **fake_engine.routes}

    return holding


def verify(name="sparkforge/vllm:embedded"):
    docker_image.verify("embedded", name, partial(builder.expected, stack="embedded"))


def test_an_image_of_this_checkout_is_accepted_and_nothing_is_left(fake_engine, holding, manifest, capsys):
    holding(manifest)
    verify()
    out, err = capsys.readouterr()
    assert "platform   linux/amd64 · user root" in out
    assert "patches    vllm-0.32.0 " in out
    assert "vllm-0.32.0" in err
    assert "claims, by its own manifest" in err
    called = [(path, query) for path, query in fake_engine.asked if "abc" in path]
    assert called[-1][0] == "DELETE /containers/abc"
    assert called[-1][1]["v"] in {"True", "1", "true"}  # with the anonymous volume that the image declares


def test_an_engine_may_unpack_an_image_before_its_first_container(fake_engine, holding, manifest, monkeypatch):
    def unpacked(_query):
        time.sleep(0.6)
        return 201, {"Id": "abc", "Warnings": []}

    monkeypatch.setattr(engine, "SECONDS", 0.2)
    fake_engine.routes["POST /containers/create"] = unpacked
    holding(manifest)
    verify()


def test_other_patches_and_another_lock_are_named(fake_engine, holding, manifest):
    queue = next(iter(manifest["patches"]))
    manifest["patches"][queue] = "f" * 64
    manifest["lock"] = {"embedded-old": "e" * 64}
    holding(manifest)
    with pytest.raises(errors.IntegrityError) as caught:
        verify("x")
    assert f"patch queue {queue}: the image has ffffffffffff" in caught.value.why
    assert "locked set embedded: the image has none" in caught.value.why
    assert caught.value.fix == "./inv build --engine docker --stack embedded"


MODULE = {"path": "/opt/venv/aot/xqa/xqa.so"}
DIRTY = [{"rule": "trap-stub", "file": "xqa.so", "detail": "", "fix": ""}]


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"files": 3, "code": {"violations": [], "files": []}}, "xqa was not audited"),
        ({"files": 3, "code": {"violations": DIRTY, "files": [MODULE]}}, "its audit found trap-stub: xqa.so"),
        ({"files": 3, "code": {"violations": [], "files": [MODULE]}}, ""),
        ({"files": 4, "code": {}}, "its audit report is not the one that its manifest names"),
    ],
)
def test_the_audit_in_the_image_must_match_it(holding, manifest, report, message):
    audit = named(CLEAN if report["files"] == 4 else report)
    holding({**manifest, "kernels": {"xqa": "f" * 64}, "audit": audit}, report=report)
    if not message:
        verify()
        return
    with pytest.raises(errors.IntegrityError) as caught:
        verify()
    assert caught.value.why == message


def test_an_image_that_is_not_there_names_the_build(fake_engine):
    fake_engine.routes[r"GET /images/.+/json"] = lambda query: (404, {"message": "No such image: x"})
    with pytest.raises(errors.EngineError, match=r"\./inv build --engine docker --stack embedded"):
        verify()


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"7", b"[" * 100_000, b'{"patches": []}', b'{"lock": {"a": 1}}', b'{"packages": "x"}',
     b'{"audit": [1]}', b'{"stack": {}}', b"\xff"],
    ids=lambda content: content[:12].decode(errors="replace"),
)  # fmt: skip
def test_a_broken_manifest_is_a_named_error_and_nothing_is_left(fake_engine, holding, content):
    holding(content)
    with pytest.raises(errors.EngineError, match="cannot read the image's own manifest"):
        verify()
    assert fake_engine.asked[-1][0] == "DELETE /containers/abc"


@pytest.fixture
def buildable(fake_engine, docker_command, monkeypatch, tmp_path):
    """An engine with its plugins, whose folder is on this disk, and no image yet."""
    fake_engine.info["DockerRootDir"] = str(tmp_path)
    fake_engine.routes["GET /images/json"] = lambda query: (200, [])
    docker_command.answers("buildx version", out="github.com/docker/buildx 0.13.1\n")
    docker_command.answers("compose version", out="Docker Compose version 2.26.1\n")
    service = {"image": "sparkforge/vllm:embedded", "ports": [{"published": "8000"}]}
    service["environment"] = {"SPARKFORGE_STACK": "embedded"}
    docker_command.answers("config --format json", out=json.dumps({"services": {"vllm": service}}))
    monkeypatch.setattr(docker_image.docker_compose, "files", list)
    monkeypatch.setattr(docker_image, "CPU_BYTES", 1000)


def test_a_first_build_without_room_or_buildx_is_refused(buildable, fake_engine, docker_command, monkeypatch):
    monkeypatch.setattr(docker_image, "CPU_BYTES", 10**18)
    with pytest.raises(errors.StorageError, match="docker builder prune"):
        docker_image.ready_to_build("embedded")
    fake_engine.routes["GET /images/json"] = lambda query: (200, [{"Id": fake_engine.image["Id"]}])
    command = docker_image.ready_to_build("embedded")
    assert (command[0], command[-1]) == ("compose", "build")
    (docker_command.folder / "rules" / "000" / "pattern").write_text("nothing")
    docker_command.answers("buildx version", err="docker: 'buildx' is not a docker command.", code=1)
    with pytest.raises(errors.EngineError):
        docker_image.ready_to_build("embedded")


@pytest.mark.parametrize(
    "report", [[], None, 5, {"code": 1, "files": 3}, {"files": 3, "code": {"files": [1]}}, {"code": {}}]
)
def test_a_broken_audit_is_a_named_error(holding, manifest, report):
    holding({**manifest, "audit": named(report)}, report=report)
    with pytest.raises(errors.EngineError, match="cannot read the image's own manifest"):
        verify()


@pytest.mark.parametrize("configuration", [None, [], {"Labels": None}, {"Labels": [1]}, {"Labels": {PATH: 5}}])
def test_malformed_labels_are_not_ours(fake_engine, configuration):
    fake_engine.image["Config"] = configuration
    with pytest.raises(errors.IntegrityError, match="not an image of this Sparkforge"):
        verify()
