"""Pushing an image to a registry that denies what is not there: a fake engine, a stand-in `docker` command."""

import json

import pytest

from sparkforge.core import errors
from sparkforge.image import inspect, provenance, registry, versions

REPOSITORY = "registry.example.com/new/vllm"
DIGEST = f"sha256:{'d' * 64}"


@pytest.fixture
def publish(fake_engine, docker_command, monkeypatch, tmp_path):
    """Return a function that publishes where a registry answers `status` and a push `text`, with an exit code."""
    monkeypatch.setattr(inspect, "require_ours", lambda *_: ({"stack": "embedded"}, None))
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
    monkeypatch.setitem(fake_engine.image, "Config", {"Labels": {provenance.REVISION_LABEL: label}})
    monkeypatch.setattr(inspect, "made_from", lambda *_args: source)
    assert (
        json.loads(publish(404).read_text())["predicate"]["buildDefinition"]["externalParameters"]["revision"]
        == recorded
    )


def test_the_record_is_a_statement_of_in_toto_that_pull_reads_and_holds_the_image_to(publish):
    file = publish(404)
    record = registry._read_record(file)
    assert (record["_type"], record["predicateType"]) == (provenance.STATEMENT, provenance.SLSA)
    assert record["subject"][0] == {"name": REPOSITORY, "digest": {"sha256": DIGEST[7:]}}
    predicate = record["predicate"]
    assert provenance.differences(predicate, predicate) == []
    changed = json.loads(json.dumps(predicate))
    changed["buildDefinition"]["externalParameters"]["platform"] = "linux/arm64"
    changed["buildDefinition"]["internalParameters"]["patches"] = {"q": "0" * 64}
    changed["buildDefinition"]["resolvedDependencies"] = [{"uri": "pkg:pypi/x@1"}]
    changed["runDetails"]["metadata"]["finishedOn"] = "2020"
    words = {line.partition(" ")[0] for line in provenance.differences(predicate, changed)}
    assert words == {"platform", "patches", "resolvedDependencies", "metadata"}


def test_every_pin_of_the_bill_is_a_resolved_dependency():
    patched = {"purl": "pkg:pypi/v@1+s", "hashes": [{"alg": "SHA-256", "content": "a" * 64}]}
    patched["pedigree"] = {"ancestors": [{"purl": "pkg:pypi/v@1", "hashes": [{"alg": "SHA-256", "content": "b" * 64}]}]}
    entries = list(provenance._components([patched, {"purl": "pkg:deb/debian/libc6@2"}, {"name": "a file"}]))
    assert [entry["uri"] for entry in entries] == ["pkg:pypi/v@1+s", "pkg:pypi/v@1", "pkg:deb/debian/libc6@2"]
    assert [entry.get("digest", {}).get("sha256", "")[:1] for entry in entries] == ["a", "b", ""]


@pytest.mark.parametrize(
    "change",
    [
        {"_type": "x"},
        {"subject": []},
        {"predicateType": "x"},
        {"predicate": {}},
        {"subject": [{"digest": {"sha256": "0"}}]},
    ],
)
def test_a_record_of_another_shape_is_refused(publish, change, tmp_path):
    document = {**json.loads(publish(404).read_text()), **change}
    (tmp_path / "record.json").write_text(json.dumps(document))
    with pytest.raises(errors.InputError) as caught:
        registry._read_record(tmp_path / "record.json")
    assert caught.value.code == "input.record"
