"""Upgrade, rollback, publish, pull and a bake-off of profiles, on a real engine and a registry of Debian's.

The served images are the embedded image with a stand-in for vLLM (proving_server.py); the "next" image has one more
label. They have their own repositories, so that no other test's tag moves.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from engine.conftest import Verbs
from waiting import wait_for

from sparkforge.core.paths import ROOT
from sparkforge.image.build import expected

pytestmark = pytest.mark.engine

PROJECT, SHIPPED = "sparkforge-release", "spark-next"
FILES = {"manifest": "image", "audit": "audit"}
SECONDS = 300.0
ROOT_IN_IMAGE = "/opt/sparkforge"
KEY = "0123456789abcdef"  # of the newer image, from which a rollback starts


@dataclass(kw_only=True)
class Release(Verbs):
    """The verbs of this checkout with a separate state folder, port, repository and Compose project."""

    state: Path
    repository: str
    stack: str

    @property
    def name(self):
        return f"{self.repository}:{self.stack}"

    def up(self, *arguments, **more):
        return self.good("up", "--device", "docker-cpu", "--port", self.port, *arguments, **more)

    def compiled(self):
        """Return the servers' files in the volume: key of the image → profile of each start (proving_server.py)."""
        arguments = ("--rm", "--volume", f"{PROJECT}_cache:/cache:ro", "--entrypoint", "sh", self.name)
        text = self.engine.docker("run", *arguments, "-c", "cd /cache && grep -H '' */vllm/starts")
        starts = {}
        for line in text.splitlines():
            path, _, profile = line.partition(":")
            starts.setdefault(path.partition("/")[0], []).append(profile)
        return starts

    def id(self, name=""):
        return self.engine.inspect(name or self.name)["Id"]

    def known_good(self):
        return json.loads((self.state / "known-good.json").read_text())["starts"]

    def known_good_images(self):
        return [start["plan"]["image"] for start in self.known_good()]

    def key(self):
        """Return the key of the served image, the name of its folder of compiled code."""
        arguments = ("--rm", "--entrypoint", "cat", self.name, f"{ROOT_IN_IMAGE}/image.json")
        return json.loads(self.engine.docker("run", *arguments))["key"]

    def running(self):
        listed = self.engine.docker("ps", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
        details = [self.engine.docker("inspect", name, check=False) for name in listed]  # it may end in between
        return [container for text in details for container in json.loads(text or "[]")]

    def remove(self):
        """Remove the images of the repository; names in other repositories stay."""
        listed = self.engine.docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", self.repository).split()
        names = [name for name in listed if not name.endswith(":<none>")]
        digests = [digest for name in names for digest in self.engine.inspect(name)["RepoDigests"]]
        for name in (*names, *digests):
            self.engine.docker("image", "rm", name, check=False)


def derive(engine, folder, base, text):
    """Build an image on `base` with a small context."""
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(f"FROM {base}\n{text}\n")
    return engine.docker("build", "--quiet", folder).strip()


def upgraded(engine, folder, base, key=KEY):
    """Build an image on `base` with another key, and so another folder of compiled code."""
    folder.mkdir(exist_ok=True)
    manifest = json.loads(engine.docker("run", "--rm", "--entrypoint", "cat", base, f"{ROOT_IN_IMAGE}/image.json"))
    (folder / "image.json").write_text(json.dumps({**manifest, "key": key}))
    (folder / "key").write_text(f"{key}\n")
    return derive(engine, folder, base, f"COPY image.json key {ROOT_IN_IMAGE}/")


def release_of(engine, folder, port, repository, stack="embedded"):
    """The verbs with the image `repository`:`stack` in place of the stack's own."""
    (folder / "override.yml").write_text(f"services: {{vllm: {{image: '{repository}:{stack}'}}}}\n")
    files = f"tests/engine/ci.yml{os.pathsep}{folder / 'override.yml'}"
    settings = {"SPARKFORGE_STATE": str(folder / "state"), "SPARKFORGE_STACK": stack, "COMPOSE_PROJECT_NAME": PROJECT}
    environment = {**engine.environment, **settings, "SPARKFORGE_COMPOSE_FILES": files}
    state = folder / "state"
    return Release(engine=engine, environment=environment, port=port, state=state, repository=repository, stack=stack)


@pytest.fixture(scope="module")
def release(engine, tmp_path_factory, free_port):
    """A Release with the embedded image, its server replaced, and a health check that only connects to the port."""
    folder = tmp_path_factory.mktemp("release")
    release = release_of(engine, folder, free_port(), "sparkforge-release/vllm")
    base = "sparkforge/vllm:embedded"
    if not os.environ.get("ENGINE_BUILT"):  # for developers of these tests: the image is already built
        said = release.good("build", "--engine", "docker")
        assert f"{release.name} is {release.repository}:embedded-0.32.0-" in said
        base = release.name
    context = folder / "serving"
    context.mkdir()
    shutil.copy(ROOT / "tests/engine/proving_server.py", context / "server.py")
    shutil.copy(ROOT / "tests/fake_api.py", context)
    start = (ROOT / "deploy/start").read_text()  # the image's own, which chooses the folder of compiled code
    assert start.count("-m sparkforge.serve.entrypoint") == 1
    (context / "start").write_text(start.replace("-m sparkforge.serve.entrypoint", f"{ROOT_IN_IMAGE}/server.py"))
    (context / "start").chmod(0o755)
    copy = f"COPY server.py fake_api.py {ROOT_IN_IMAGE}/\nCOPY start {ROOT_IN_IMAGE}/deploy/start"
    engine.docker("tag", derive(engine, context, base, copy), release.name)
    probe = ["CMD", "/opt/venv/bin/python", "-S", "-c", "import socket; socket.create_connection(('127.0.0.1', 8000))"]
    health = {"test": probe, "interval": "1s", "timeout": "30s", "retries": 60, "start_period": "60s"}
    service = {"image": release.name, "healthcheck": health}
    (folder / "override.yml").write_text(json.dumps({"services": {"vllm": service}}))
    yield release
    release.inv("down")
    engine.docker("compose", "-p", PROJECT, "down", "--volumes", check=False)
    release.remove()


@pytest.fixture(scope="module")
def shipped(engine, tmp_path_factory, free_port):
    """A Release with an image that has only the metadata of this checkout's image, so that it is copied in a second.

    Its stack is one that no other test builds.
    """
    folder = tmp_path_factory.mktemp("shipped")
    release = release_of(engine, folder, free_port(), "sparkforge-shipped/vllm", SHIPPED)
    audit = json.dumps({"files": 3, "code": {}})
    machine = engine.docker("version", "--format", "{{.Server.Arch}}").strip()
    manifest = {
        **{key: dict(value) for key, value in expected(machine, stack=SHIPPED).items()}, "stack": SHIPPED, "key": "k",
        "kernels": {}, "packages": {"vllm": "0.32.0+cpu"},
        "audit": {"audit.json": hashlib.sha256(audit.encode()).hexdigest()},
    }  # fmt: skip
    context = tmp_path_factory.mktemp("context")
    (context / "image.json").write_text(json.dumps(manifest))
    (context / "audit.json").write_text(audit)
    labels = [f"org.sparkforge.{name}=/opt/sparkforge/{file}.json" for name, file in FILES.items()]
    text = f"COPY image.json audit.json /opt/sparkforge/\nLABEL org.sparkforge.stack={SHIPPED} {' '.join(labels)}"
    engine.docker("tag", derive(engine, context, "scratch", text), release.name)
    yield release
    release.remove()


@contextlib.contextmanager
def serving_registry(folder, address, tls=None, auth=None):
    """Run Debian's docker-registry on `address`, HOST:PORT; `tls` and `auth` are tables of its configuration."""
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}}
    http = {"addr": address, **({"tls": tls} if tls else {})}
    config = {"version": 0.1, "log": {"level": "error"}, "http": http, "storage": storage}
    (folder / "config.yml").write_text(json.dumps({**config, **({"auth": auth} if auth else {})}))
    host, _, port = address.partition(":")
    command = ["docker-registry", "serve", str(folder / "config.yml")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
                break
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def registry(tmp_path_factory, free_port):
    with serving_registry(tmp_path_factory.mktemp("registry"), f"127.0.0.1:{free_port()}") as address:
        yield address


# bcrypt hash of the password "sesame"; the registry reads no other kind.
HTPASSWD = "spark:$2b$05$J4.slEh6GAsoEbsfsPUWeOvETGcIQsbEBLZKOnDjXc2WAvSmljUZ2\n"


@pytest.fixture
def closed_registry(engine, tmp_path, free_port):
    """A registry with its own certificate and a login, on the engine's bridge: loopback needs no certificate."""
    bridge = json.loads(engine.docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]["Gateway"]
    request = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=registry -addext subjectAltName=IP:{bridge}"
    files = {"certificate": str(tmp_path / "ca.crt"), "key": str(tmp_path / "key.pem")}
    command = [*request.split(), "-out", files["certificate"], "-keyout", files["key"]]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    auth = {"htpasswd": {"realm": "tests", "path": str(tmp_path / "htpasswd")}}
    with serving_registry(tmp_path, f"{bridge}:{free_port()}", files, auth) as address:
        yield address, Path(files["certificate"])


@pytest.mark.needs("docker-registry", "openssl")
def test_a_registry_with_tls_and_a_login(shipped, closed_registry, tmp_path):
    """Each missing thing is named with the command that adds it; with all, an image can be pushed and pulled."""
    docker, original = shipped.engine.docker, shipped.id()
    address, certificate = closed_registry
    repository, trusted = f"{address}/sparkforge/vllm", Path("/etc/docker/certs.d", address)
    config = tmp_path / "config"
    config.mkdir()
    (config / "cli-plugins").symlink_to(Path(shipped.environment["DOCKER_CONFIG"], "cli-plugins"))
    env = {"DOCKER_CONFIG": str(config)}

    def refused(*arguments):
        code, said = shipped.inv(*arguments, **env)
        assert (code, "engine.registry" in said) == (62, True), said
        return said

    said = refused("image.publish", repository)
    assert "certificate is not trusted" in said
    assert "/etc/docker/certs.d/" in said
    trusted.mkdir(parents=True)
    try:
        shutil.copy(certificate, trusted / "ca.crt")
        assert f"docker login {address}" in refused("image.publish", repository)
        assert f"docker login {address}" in refused("image.pull", f"{repository}@sha256:{'0' * 64}")
        docker("login", "--username", "spark", "--password", "sesame", address, env=env)
        said = shipped.good("image.publish", repository, **env)
        (reference,) = re.findall(rf"^{re.escape(repository)}@sha256:[0-9a-f]{{64}}$", said, re.MULTILINE)
        docker("image", "rm", "--force", original)
        shipped.good("image.pull", reference, **env)
        assert shipped.id() == original
    finally:
        shutil.rmtree(trusted)


@pytest.mark.needs("docker-registry", "openssl")
def test_the_generated_workflow_step_builds_publishes_and_signs(release, registry, tmp_path):
    """The test uses the embedded stack instead of the Spark's, and this machine instead of GitHub's."""
    steps = yaml.safe_load((ROOT / ".github/workflows/image.yml").read_text())["jobs"]["image"]["steps"]
    (step,) = (step for step in steps if step.get("id") == "publish")
    assert set(step["env"]) == {"STACK", "SIGNING_KEY", "BUILDER"}
    genpkey = ["openssl", "genpkey", "-algorithm", "ed25519"]
    key = subprocess.run(genpkey, check=True, capture_output=True, text=True)
    output = tmp_path / "output"
    given = {"STACK": "embedded", "SIGNING_KEY": key.stdout, "BUILDER": "urn:example:workflow", "REGISTRY": registry}
    # The image of this checkout, not the one with a stand-in for vLLM that `release` serves.
    github = {"GITHUB_REPOSITORY": "Owner/Sparkforge", "GITHUB_OUTPUT": str(output)}
    env = {**release.environment, **given, **github, "SPARKFORGE_COMPOSE_FILES": "tests/engine/ci.yml"}
    run = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.partition("=")[::2] for line in output.read_text().splitlines())
    assert said["repository"] == f"{registry}/owner/sparkforge"
    assert json.loads((ROOT / "published/sbom.cdx.json").read_text())["specVersion"] == "1.6"
    with urllib.request.urlopen(f"http://{registry}/v2/owner/sparkforge/tags/list", timeout=30) as answer:
        tags = json.load(answer)["tags"]
    name = said["digest"].replace(":", "-")
    assert {f"{name}.sig", f"{name}.att"} < set(tags)


@pytest.mark.needs("docker-registry")
def test_an_image_goes_to_a_registry_and_comes_back_by_digest(shipped, registry, tmp_path):
    docker, original, name = shipped.engine.docker, shipped.id(), shipped.name
    repository = f"{registry}/sparkforge/vllm"
    said = shipped.good("image.publish", repository)
    (reference,) = re.findall(rf"^{re.escape(repository)}@sha256:[0-9a-f]{{64}}$", said, re.MULTILINE)
    (tag,) = [name for name in shipped.engine.inspect(original)["RepoTags"] if name.startswith(f"{repository}:")]
    version = tag.rpartition(":")[2].rpartition("-")[0]
    assert reference in shipped.good("image.publish", repository)  # again: the same digest

    # Somebody pushes another image to the same tag. It is not overwritten, and the digest still gives the first image.
    other = derive(shipped.engine, tmp_path / "other", name, "LABEL org.sparkforge.test=other")
    docker("tag", other, f"{shipped.repository}:{SHIPPED}-other")
    docker("tag", other, tag)
    docker("push", tag)
    docker("image", "rm", tag)
    code, said = shipped.inv("image.publish", repository)
    assert code == 12, said
    assert f"{tag} is there already" in said

    # A machine that lacks this image and serves another: the other image gets its own name.
    docker("tag", other, name)
    docker("image", "rm", "--force", original)
    said = shipped.good("image.pull", reference)
    assert shipped.id() == original
    assert f"{name} is {shipped.repository}:{version}" in said
    assert f"{version}-{shipped.id(other)[7:19]}" in docker("image", "inspect", other, "--format", "{{.RepoTags}}")
    shipped.good("image.pull", reference)
    assert shipped.id() == original


@pytest.mark.needs("docker-registry")
def test_a_wrong_image_is_refused_and_the_old_one_stays(shipped, registry, tmp_path):
    docker, original = shipped.engine.docker, shipped.id()
    derived = tmp_path / "foreign"
    derived.mkdir()
    (derived / "image.json").write_text(json.dumps({"lock": {"spark-next": "f" * 64}}))
    foreign = derive(shipped.engine, derived, shipped.name, "COPY image.json /opt/sparkforge/image.json")
    labelled = derive(shipped.engine, tmp_path / "labelled", shipped.name, "LABEL org.sparkforge.stack=spark")
    tag = f"{registry}/sparkforge/wrong:1"
    for image, why in ((foreign, "locked set spark-next"), (labelled, "its label says 'spark'")):
        docker("tag", image, tag)
        docker("push", tag)
        digests = shipped.engine.inspect(image)["RepoDigests"]
        reference = next(digest for digest in digests if "sparkforge/wrong@" in digest)
        docker("image", "rm", "--force", image)
        code, said = shipped.inv("image.pull", reference)
        assert code == 12, said
        assert why in said
        assert shipped.id() == original
        assert "no such" in docker("image", "inspect", reference, check=False, both=True).lower()
    code, said = shipped.inv("image.pull", tag)
    assert code == 2, said
    assert "names no digest" in said
    code, said = shipped.inv("image.pull", f"{registry}/sparkforge/wrong@sha256:{'0' * 64}")
    assert code == 62, said
    assert shipped.id() == original


def test_a_rollback_is_proved_survives_a_kill_and_verifies_first(release, tmp_path):
    engine, old, key = release.engine, release.id(), release.key()
    next_image = release.id(upgraded(engine, tmp_path / "next", release.name))
    release.up(MAX_MODEL_LEN="1024")
    (first,) = release.known_good()
    assert first["plan"]["image"] == old
    assert first["name"].startswith(f"{release.repository}:embedded-0.32.0-")
    assert release.compiled() == {key: ["embedded"]}
    assert "rollback" in release.inv("rollback")[1]  # the only one runs
    release.good("down")

    engine.docker("tag", next_image, release.name)  # the upgrade
    release.up("--profile", "embedded-dense-8", MAX_MODEL_LEN="2048")
    second = release.known_good()[0]
    assert release.known_good_images() == [next_image, old]
    assert (second["plan"]["profile"], first["plan"]["profile"]) == ("embedded-dense-8", "embedded")
    assert release.compiled() == {key: ["embedded"], KEY: ["embedded-dense-8"]}

    said = release.good("rollback", "--dry-run")
    assert f"will be {first['name']}" in said
    assert "variables: {'MAX_MODEL_LEN': '2048'}, will be {'MAX_MODEL_LEN': '1024'}" in said
    assert "profile: 'embedded-dense-8', will be 'embedded'" in said
    assert [container["Image"] for container in release.running()] == [next_image]

    # Killed while the old image starts: tag and record are unchanged.
    process = release.start("rollback")
    wait_for(lambda: [container["Image"] for container in release.running()] == [old], SECONDS)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert release.id() == next_image
    assert release.known_good_images() == [next_image, old]

    begun = time.monotonic()
    said = release.good("rollback")
    print(f"rollback: {time.monotonic() - begun:.1f} s")
    assert "a rollback was interrupted" in said
    assert release.id() == old
    assert release.known_good_images() == [old, next_image]
    (container,) = release.running()
    assert container["Image"] == old
    assert {"SPARKFORGE_MAX_MODEL_LEN=1024", "SPARKFORGE_SERVE_PROFILE=embedded"} <= {*container["Config"]["Env"]}
    compiled = release.compiled()  # the old image's own folder again, with its files; the other's unchanged
    assert compiled[KEY] == ["embedded-dense-8"]
    assert {*compiled[key]} == {"embedded"}
    assert len(compiled[key]) > 1
    assert "healthy" in release.good("status")
    assert "1  " in release.good("rollback", "--list")

    # Without the image of the other start, the rollback is refused and the server continues.
    engine.docker("image", "rm", "--force", next_image)
    code, said = release.inv("rollback")
    assert code == 24, said
    assert "there is no image" in said
    assert "nothing was changed" in said
    assert "healthy" in release.good("status")


def test_a_rollback_whose_start_fails_leaves_record_and_tag(release):
    before, served = release.known_good(), release.id()
    document = {"schema": 2, "starts": json.loads(json.dumps(before))}
    document["starts"][0]["plan"]["flags"] = ["--no-such-flag"]
    (release.state / "known-good.json").write_text(json.dumps(document))
    code, said = release.inv("rollback", "--to", "1")
    if "goes on" in said:  # the running server is already that start
        release.good("down")
        code, said = release.inv("rollback", "--to", "1")
    assert code == 24, said
    assert "the record of known good starts and the tag of the image are as they were" in said
    assert json.loads((release.state / "known-good.json").read_text()) == document
    assert release.id() == served
    assert release.running() == []


def test_figures_of_a_rollback_with_vllm(engine, project, figures, first_token, tmp_path_factory, free_port):
    """Both images are of the embedded stack and run vLLM; each has its own settings and compiled code."""
    folder = tmp_path_factory.mktemp("real")
    release = release_of(engine, folder, free_port(), "sparkforge-real/vllm")
    release.environment["SPARKFORGE_COMPOSE_FILES"] = str(folder / "override.yml")  # the product's own health check
    base = "sparkforge/vllm:embedded"
    images = [release.id(base), upgraded(engine, folder / "next", base)]
    try:
        for image, length in zip(images, ("1024", "2048"), strict=True):
            release.inv("down")
            engine.docker("tag", image, release.name)
            release.up(MAX_MODEL_LEN=length)
        for number in range(figures.repeats):
            with figures.measured("rollback to the first answers"):
                said = release.good("rollback")
            assert "first answers received, proved: " in said
            (container,) = release.running()
            assert container["Image"] == release.id() == images[number % 2]
            assert f"SPARKFORGE_MAX_MODEL_LEN={1024 * (1 + number % 2)}" in container["Config"]["Env"]
            assert first_token(release.port, "tiny-gpt-oss")
    finally:
        release.inv("down")
        engine.docker("compose", "-p", PROJECT, "down", "--volumes", check=False)
        release.remove()
