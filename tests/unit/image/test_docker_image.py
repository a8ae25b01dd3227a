"""An image's metadata, read through a fake engine and compared with this checkout."""

import contextlib
import json
import time
from functools import partial

import pytest
from expected import refused

from sparkforge.core import errors
from sparkforge.image import build as builder
from sparkforge.image import engine
from sparkforge.image import inspect as docker_image


def verify(name="sparkforge/vllm:embedded"):
    docker_image.verify("embedded", name, partial(builder.expected, stack="embedded"))


def test_an_image_of_this_checkout_is_accepted_and_nothing_is_left(fake_engine, holding, capsys):
    holding()
    verify()
    out, err = capsys.readouterr()
    assert "platform   linux/amd64 · user root" in out
    assert "patches    vllm-0.32.0 " in out
    assert "vllm-0.32.0" in err
    assert "claims, by its own manifest" in err
    called = [(path, query) for path, query in fake_engine.asked if "abc" in path]
    assert called[-1][0] == "DELETE /containers/abc"
    assert called[-1][1]["v"] in {"True", "1", "true"}  # with the anonymous volume that the image declares


def test_an_engine_may_unpack_an_image_before_its_first_container(fake_engine, holding, monkeypatch):
    def unpacked(_query):
        time.sleep(0.6)
        return 201, {"Id": "abc", "Warnings": []}

    monkeypatch.setattr(engine, "SECONDS", 0.2)
    holding()
    fake_engine.routes["POST /containers/create"] = unpacked
    verify()


def test_other_patches_and_another_lock_are_named(holding):
    queue = next(iter(builder.expected("amd64", stack="embedded")["patches"]))
    holding(patches={queue: "f" * 64}, lock={"embedded-old": "e" * 64})
    reason = f"patch queue {queue}: the image has ffffffffffff.*locked set embedded: the image has none"
    with refused("integrity.image", rf"{reason}.* · \./inv build --engine docker --stack embedded$"):
        verify("x")


MODULE = {"path": "/opt/venv/aot/xqa/xqa.so"}
DIRTY = [{"rule": "trap-stub", "file": "xqa.so", "detail": "", "fix": ""}]


@pytest.mark.parametrize(
    ("code", "changes", "message"),
    [
        ({"violations": [], "files": []}, {}, "xqa was not audited"),
        ({"violations": DIRTY, "files": [MODULE]}, {}, "its audit found trap-stub: xqa.so"),
        ({"violations": [], "files": [MODULE]}, {}, ""),
        ({}, {"audit": {"audit.json": "0" * 64}}, "its audit report is not the one that its manifest names"),
    ],
)
def test_the_audit_in_the_image_must_match_it(holding, code, changes, message):
    holding(report={"files": 3, "code": code}, kernels={"xqa": "f" * 64}, **changes)
    with refused("integrity.image", message) if message else contextlib.nullcontext():
        verify()


def test_an_image_that_is_not_ours_or_not_there_is_named(fake_engine):
    for configuration in (None, [], {"Labels": None}, {"Labels": [1]}, {"Labels": {"/opt": 5}}):
        fake_engine.image["Config"] = configuration
        with refused("integrity.image", "not an image of this Sparkforge"):
            verify()
    fake_engine.routes[r"GET /images/.+/json"] = lambda query: (404, {"message": "No such image: x"})
    with refused("engine.image", r"\./inv build --engine docker --stack embedded"):
        verify()


def test_a_broken_manifest_or_audit_is_a_named_error_and_nothing_is_left(fake_engine, holding):
    for content in (b"{", b"", b"7", b"[" * 100_000, b'{"patches": []}', b'{"lock": {"a": 1}}', b'{"packages": "x"}',
                    b'{"audit": [1]}', b'{"stack": {}}', b"\xff"):  # fmt: skip
        holding(content)
        with refused("engine.failed", "cannot read the image's own manifest"):
            verify()
        assert fake_engine.asked[-1][0] == "DELETE /containers/abc"
    for report in ([], None, 5, {"code": 1, "files": 3}, {"files": 3, "code": {"files": [1]}}, {"code": {}}):
        holding(report=report)
        with refused("engine.failed", "cannot read the image's own manifest"):
            verify()


def test_a_first_build_without_room_or_buildx_is_refused(fake_engine, docker_command):
    fake_engine.info["DockerRootDir"] = "/proc"  # has no room at all
    images = []
    fake_engine.routes["GET /images/json"] = lambda query: (200, images)
    docker_command.answers("buildx version", out="github.com/docker/buildx 0.13.1\n")
    docker_command.answers("compose version", out="Docker Compose version 2.26.1\n")
    service = {"image": "sparkforge/vllm:embedded", "ports": [{"published": "8000"}]}
    service["environment"] = {"SPARKFORGE_STACK": "embedded"}
    docker_command.answers("config --format json", out=json.dumps({"services": {"vllm": service}}))
    with refused("storage.full", "docker builder prune"):
        docker_image.ready_to_build("embedded")
    images.append({"Id": fake_engine.image["Id"]})
    command = docker_image.ready_to_build("embedded")
    assert (command[0], command[-1]) == ("compose", "build")
    (docker_command.folder / "rules" / "000" / "pattern").write_text("nothing")
    docker_command.answers("buildx version", err="docker: 'buildx' is not a docker command.", code=1)
    with pytest.raises(errors.EngineError):
        docker_image.ready_to_build("embedded")
