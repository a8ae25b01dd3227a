"""Pushing an image to a registry that denies what is not there: a fake engine, a stand-in `docker` command."""

import json

import pytest

from sparkforge.core import errors
from sparkforge.image import inspect, registry, versions

REPOSITORY = "registry.example.com/new/vllm"
DIGEST = f"sha256:{'d' * 64}"


@pytest.fixture
def publish(fake_engine, docker_command, monkeypatch, tmp_path):
    """Return a function that publishes where a registry answers `status` and a push `text`, with an exit code."""
    monkeypatch.setattr(inspect, "require_ours", lambda *_: ({}, None))
    monkeypatch.setattr(versions, "version", lambda _: "v")
    fake_engine.routes[r"POST /images/.+/tag"] = lambda query: (201, {})

    def publish(status, text="", code=0):
        fake_engine.routes[r"GET /distribution/.+/json"] = lambda query: (status, {"message": "denied: no access"})
        fake_engine.image["RepoDigests"] = [f"{REPOSITORY}@{DIGEST}"]
        docker_command.answers("push", err=text, code=code)
        return registry.publish("embedded", "x", REPOSITORY, None, tmp_path / "record.json")

    return publish


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_repository_that_is_made_by_the_first_push_is_pushed_to(publish, status, capsys):
    assert publish(status).is_file()
    assert f"{REPOSITORY}@{DIGEST}" in capsys.readouterr().out


@pytest.mark.parametrize("status", [401, 403])
def test_a_push_that_is_denied_too_names_the_login(publish, status):
    with pytest.raises(errors.EngineError) as caught:
        publish(status, "denied: permission_denied: write_package\n", 1)
    assert caught.value.code == "engine.registry"
    assert "write_package" in caught.value.why
    assert caught.value.fix.startswith("docker login registry.example.com,")


def test_another_answer_of_the_registry_is_no_missing_tag(publish):
    with pytest.raises(errors.EngineError, match="denied"):
        publish(500)


@pytest.mark.parametrize(
    ("label", "source", "recorded"),
    [
        ("abc-changed", {"revision": "def"}, "abc-changed"),
        ("unknown; how to name it", {"revision": "def"}, "def"),
        ("unknown; how to name it", {"revision": ""}, ""),
        ("unknown", {}, ""),
    ],
)
def test_the_record_names_the_commit_also_of_an_image_that_plain_compose_built(
    publish, fake_engine, monkeypatch, label, source, recorded
):
    monkeypatch.setitem(fake_engine.image, "Config", {"Labels": {registry.REVISION_LABEL: label}})
    monkeypatch.setattr(inspect, "made_from", lambda *_args: source)
    assert json.loads(publish(404).read_text())["revision"] == recorded
