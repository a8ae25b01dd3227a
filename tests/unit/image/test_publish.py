"""Pushing an image, its tag and its provenance: a fake engine, a fake `docker` command."""

import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from expected import refused
from oci_layout import Writer, layer
from programs import write_program

from sparkforge.core.paths import ROOT
from sparkforge.image import build, oci, provenance, registry, versions

REPOSITORY = "registry.example.com/new/vllm"
DIGEST = f"sha256:{'d' * 64}"


@pytest.fixture
def publish(fake_engine, docker_command, holding):
    """Return a publishing function: the registry answers `status`; `docker push` prints `text`, exits with `code`."""
    holding()
    fake_engine.routes[r"POST /images/.+/tag"] = lambda query: (201, {})

    def publish(status, text="", code=0):
        fake_engine.routes[r"GET /distribution/.+/json"] = lambda query: (status, {"message": "denied: no access"})
        fake_engine.image["RepoDigests"] = [f"{REPOSITORY}@{DIGEST}"]
        docker_command.answers("push", err=text, code=code)
        registry.publish("embedded", "x", REPOSITORY, partial(build.expected, stack="embedded"))

    return publish


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_repository_that_the_first_push_creates_is_pushed_to(publish, status, capsys):
    publish(status)
    assert f"{REPOSITORY}@{DIGEST}" in capsys.readouterr().out


@pytest.mark.parametrize("status", [401, 403])
def test_a_push_that_is_denied_too_names_the_login(publish, status):
    with refused("engine.registry", "write_package.* · docker login registry.example.com "):
        publish(status, "denied: permission_denied: write_package\n", 1)


def test_an_image_for_another_machine_is_refused_after_the_pull(fake_engine, docker_command):
    fake_engine.image["Architecture"] = "arm64"
    docker_command.answers("pull")
    with refused("integrity.image", "another platform.*it is linux/arm64, the engine is linux/amd64"):
        registry.pull("embedded", f"{REPOSITORY}@{DIGEST}", None)


def test_status_500_of_the_registry_does_not_count_as_a_missing_tag(publish):
    with refused("engine.failed", "denied"):
        publish(500)


def predicate_of(folder, label="", source="{}"):
    labels = {provenance.REVISION_LABEL: label, "org.sparkforge.source": "/source.json"}
    Writer(folder).image([layer([("source.json", source.encode())])], labels)
    return provenance.predicate(oci.LayoutImage(folder), "embedded", {"stack": "embedded"})


def test_provenance_names_the_commit_also_of_an_image_that_plain_compose_built(tmp_path):
    for number, (label, source, recorded) in enumerate([
        ("abc-changed", '{"revision": "def"}', "abc-changed"),
        ("unknown; how", '{"revision": "def"}', "def"),
        ("unknown", "{}", ""),
    ]):  # fmt: skip
        predicate = predicate_of(tmp_path / str(number), label, source)
        assert predicate["buildDefinition"]["externalParameters"]["revision"] == recorded


def test_provenance_differs_by_name(tmp_path):
    predicate = predicate_of(tmp_path / "image")
    assert provenance.differences(predicate, predicate) == []
    changed = json.loads(json.dumps(predicate))
    changed["buildDefinition"]["externalParameters"]["platform"] = "linux/arm64"
    changed["buildDefinition"]["internalParameters"]["patches"] = {"q": "0" * 64}
    changed["buildDefinition"]["resolvedDependencies"] = [{"uri": "pkg:pypi/x@1"}]
    changed["runDetails"]["metadata"]["finishedOn"] = "2020"
    words = {line.partition(" ")[0] for line in provenance.differences(predicate, changed)}
    assert words == {"platform", "patches", "resolvedDependencies", "metadata"}


def test_upstreams_wheel_behind_a_patched_one_is_a_resolved_dependency_too():
    patched = {"purl": "pkg:pypi/v@1+s", "pedigree": {"ancestors": [{"purl": "pkg:pypi/v@1"}]}}
    uris = [entry["uri"] for entry in provenance._components([patched, {"name": "a file"}])]
    assert uris == ["pkg:pypi/v@1+s", "pkg:pypi/v@1"]


@pytest.mark.parametrize(("stack", "has_kernels"), [("spark", True), ("embedded", False)])
def test_the_workflows_step_publishes_signed_packs_before_the_image_that_takes_them(tmp_path, stack, has_kernels):
    """Fake `inv` and `docker` record their arguments; tests/engine runs the real commands."""
    write_program(tmp_path / ".ci/publish", (ROOT / ".ci/publish").read_text())
    write_program(tmp_path / ".venv/bin/python", f'PYTHONPATH={ROOT} exec {sys.executable} "$@"')
    answer = f'case "$*" in image.publish*--stack*) echo {REPOSITORY}@{DIGEST};; esac'
    for name in ("inv", "docker"):
        write_program(tmp_path / name, f'echo "{name} $*" >> {tmp_path}/calls\n{answer}')
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SIGNING_KEY": "PEM"}
    subprocess.run([tmp_path / ".ci/publish", REPOSITORY, stack, "out"], env=env, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    made = [call for call in calls if "--target kernel-packs" in call and "--secret id=signing-key,src=" in call]
    sent = [call for call in calls if call.startswith(f"inv image.publish {REPOSITORY} --packs ")]
    built = [call for call in calls if call.startswith("inv build")]
    assert (len(made), len(sent), len(built)) == (has_kernels, has_kernels, 1)
    assert sorted(calls.index(call) for call in (*made, *sent, *built)) == [
        calls.index(call) for call in (*made, *sent, *built)
    ]
    assert (tmp_path / "out/digest").read_text().strip() == DIGEST


def manifest(**changes):
    held = build.expected("arm64", stack="spark")
    return {"stack": "spark", "packages": {"vllm": "0.32.0+sparkforge.2"}, **held, **changes}


def test_the_version_is_made_of_vllm_the_lock_and_the_patches_alone():
    version = versions.version(manifest())
    assert version.startswith("spark-0.32.0-")
    assert len(version.rpartition("-")[2]) == 12
    assert versions.version({**manifest(), "kernels": {"xqa": "f" * 64}, "key": "other"}) == version
    reordered = {key: dict(reversed(value.items())) for key, value in build.expected("arm64", stack="spark").items()}
    assert versions.version(manifest(**reordered)) == version
    assert versions.version(manifest(lock={"spark": "0" * 64})) != version
    assert versions.version(manifest(patches={})) != version


def test_a_registrys_port_is_no_tag_and_the_engines_name_of_a_repository_is_known():
    assert versions.split("sparkforge/vllm:spark") == ("sparkforge/vllm", "spark")
    assert versions.split("127.0.0.1:5000/a/b:c") == ("127.0.0.1:5000/a/b", "c")
    assert versions.split("127.0.0.1:5000/a/b") == ("127.0.0.1:5000/a/b", "latest")
    for repository, named in (
        ("127.0.0.1:5000/a/b", "127.0.0.1:5000/a/b"), ("docker.io/me/vllm", "me/vllm"),
        ("docker.io/library/vllm", "vllm"),
    ):  # fmt: skip
        image = SimpleNamespace(attrs={"RepoDigests": ["other/vllm@sha256:0", f"{named}@sha256:1"]})
        assert registry._digest(image, repository) == "sha256:1"
