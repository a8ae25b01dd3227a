"""Signatures of an image: signed documents, where they are stored, and refused keys. The image is an OCI layout."""

import base64
import contextlib
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from expected import refused
from invoke.exceptions import Exit
from oci_layout import Writer, ours

from sparkforge.cli import build as commands
from sparkforge.core.errors import StorageError
from sparkforge.image import attached, build, provenance, signing
from sparkforge.image.attached import Attached, Folder, Repository

pytestmark = pytest.mark.needs("openssl")
DIGEST = f"sha256:{'d' * 64}"


def make_key(path, algorithm="ed25519"):
    command = ["openssl", "genpkey", "-algorithm", algorithm, "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    path.chmod(0o600)
    return path


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path / "key.pem")


@pytest.fixture
def image(tmp_path):
    writer = Writer(tmp_path / "image")
    manifest = ours(writer, build.expected("amd64", stack="embedded"))
    return writer.folder, manifest["digest"]


def sign(image, key, **options):
    commands.image_sign.body(None, key=str(key), image=str(image), stack="embedded", **options)


def test_an_image_its_provenance_and_its_bill_are_signed_as_other_programs_read_them(image, key, tmp_path, capsys):
    folder, digest = image
    sign(folder, key, builder="urn:lab", folder=str(tmp_path / "signatures"))
    (tmp_path / "key.pub").write_text(capsys.readouterr().out)
    place = Folder(tmp_path / "signatures")
    (simple,) = place.read(attached.tag_of(digest, "sig"))
    assert json.loads(simple.data)["critical"]["image"] == {"docker-manifest-digest": digest}
    provenance_envelope, bill_envelope = place.read(attached.tag_of(digest, "att"))
    envelope = json.loads(provenance_envelope.data)
    payload = base64.b64decode(envelope["payload"])
    kind = b"application/vnd.in-toto+json"
    signed = {
        simple.annotations["dev.cosignproject.cosign/signature"]: simple.data,
        envelope["signatures"][0]["sig"]: b"DSSEv1 28 " + kind + b" %d " % len(payload) + payload,
    }
    for signature, data in signed.items():
        (tmp_path / "data").write_bytes(data)
        (tmp_path / "signature").write_bytes(base64.b64decode(signature))
        command = "openssl pkeyutl -verify -pubin -inkey key.pub -rawin -in data -sigfile signature"
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    statement = json.loads(payload)
    assert (statement["_type"], statement["predicateType"]) == (provenance.STATEMENT, provenance.SLSA)
    assert digest[7:] in [subject["digest"]["sha256"] for subject in statement["subject"]]
    assert statement["predicate"]["runDetails"]["builder"] == {"id": "urn:lab"}
    uris = [entry["uri"] for entry in statement["predicate"]["buildDefinition"]["resolvedDependencies"]]
    assert {"git+file:.", "file:locks/embedded.txt", "file:patches/vllm-0.32.0", "pkg:pypi/vllm@1"} <= set(uris)
    bill = json.loads(base64.b64decode(json.loads(bill_envelope.data)["payload"]))
    assert (bill["predicateType"], bill["predicate"]["bomFormat"]) == (provenance.CYCLONEDX, "CycloneDX")


def test_signing_again_changes_nothing_and_another_key_adds(image, key, tmp_path):
    folder, digest = image
    place, tag = Folder(folder), attached.tag_of(digest, "sig")
    sign(folder, key, folder=str(folder))  # into the layout of the image itself
    first = (folder / "index.json").read_bytes()
    sign(folder, key, folder=str(folder))
    assert ((folder / "index.json").read_bytes(), len(place.read(tag))) == (first, 1)
    sign(folder, make_key(tmp_path / "other.pem"), folder=str(folder))
    assert len(place.read(tag)) == 2
    commands.image_sbom.body(None, image=str(folder), stack="embedded")  # the layout still finds its image


def test_an_image_of_another_checkout_is_not_signed(tmp_path, key, capsys):
    writer = Writer(tmp_path / "image")
    ours(writer, {"lock": {"embedded": "f" * 64}, "patches": {}})
    with pytest.raises(Exit):
        sign(writer.folder, key, folder=str(tmp_path / "signatures"))
    assert "not made from this checkout [integrity.image]" in capsys.readouterr().err
    assert not (tmp_path / "signatures").exists()


def test_a_key_that_others_can_read_or_own_is_refused_with_the_fix(key):
    for mode in (0o640, 0o604, 0o700):
        key.chmod(mode)
        with refused("storage.access", f"chmod 600 {key}"):
            signing.private_key(key)
    key.chmod(0o600)
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(key, 12345, -1)
        with refused("storage.access", "its owner is uid 12345"):
            signing.private_key(key)


def test_invalid_keys_are_refused(tmp_path):
    make_key(tmp_path / "rsa.pem", "RSA")
    (tmp_path / "large").write_bytes(b"\0" * 20_000)
    (tmp_path / "cut").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("rsa.pem", "large", "cut", "pipe", "none", "."):
        if (tmp_path / name).is_file():
            (tmp_path / name).chmod(0o644 if name == "large" else 0o600)
        with pytest.raises(StorageError, match="cannot sign with") as caught:
            signing.private_key(tmp_path / name)
        advice = caught.value.fix.partition(")")[0]
        assert advice.startswith("ls ") or not Path(advice.split()[-1]).exists()  # the advised path does not exist yet


# Registries


@pytest.fixture(scope="module")
def registry(tmp_path_factory, free_port):
    folder, port = tmp_path_factory.mktemp("registry"), free_port()
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}}
    config = {"version": 0.1, "log": {"level": "error"}, "http": {"addr": f"127.0.0.1:{port}"}, "storage": storage}
    (folder / "config.yml").write_text(json.dumps(config))
    process = subprocess.Popen(["docker-registry", "serve", str(folder / "config.yml")])  # noqa: S607
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            break
        time.sleep(0.1)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


@pytest.mark.needs("docker-registry")
def test_a_registry_keeps_what_is_attached(registry, key):
    place, secret = Repository(f"{registry}/a/b"), signing.private_key(key)
    tag = attached.tag_of(DIGEST, "sig")
    assert place.read(tag) == []
    first, second = (signing.signature(name, DIGEST, secret) for name in ("a/b", "c"))
    signing.attach(place, DIGEST, "sig", [first])
    signing.attach(place, DIGEST, "sig", [second, first])
    assert Repository(f"{registry}/a/b").read(tag) == [first, second]
    place.write("kernels-0.pack", [Attached(b"tar", "application/vnd.oci.image.layer.v1.tar"), first])
    assert [entry.data for entry in place.read("kernels-0.pack")] == [b"tar", first.data]
    folder = key.with_name("packs")
    Folder(folder).write("kernels-1.pack", [Attached(b"other", "application/octet-stream")])
    commands.image_publish.body(None, f"{registry}/a/b", packs=str(folder))
    assert [entry.data for entry in place.read("kernels-1.pack")] == [b"other"]
    with pytest.raises(Exit):
        commands.image_publish.body(None, f"{registry}/a/b", packs=str(key.parent / "none"))


@pytest.fixture
def hostile(serve):
    def hostile(answers):
        server = serve(lambda handler: answers.get(handler.path.partition("?")[0].rpartition("/v2/a/b/")[2], (404,)))
        return server.url.removeprefix("http://"), server.asked

    return hostile


TAG = attached.tag_of(DIGEST, "sig")
BLOB = attached._described(b"payload", signing.SIMPLE_TYPE)
BLOB_PATH = f"blobs/{BLOB['digest']}"


def manifest(*layers):
    return json.dumps({"schemaVersion": 2, "layers": list(layers)}).encode()


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ({f"manifests/{TAG}": (200, manifest(BLOB)), BLOB_PATH: (200, b"another")}, "integrity.hash"),
        ({f"manifests/{TAG}": (200, manifest(BLOB)), BLOB_PATH: (200, b"longer than said")}, "engine.registry"),
        ({f"manifests/{TAG}": (200, manifest(*[BLOB] * 1000))}, "integrity.image"),
        ({f"manifests/{TAG}": (200, b" " * (5 << 20))}, "engine.registry"),
        ({f"manifests/{TAG}": (200, b"[" * 100_000)}, "integrity.image"),
        ({f"manifests/{TAG}": (200, b"\xff")}, "integrity.image"),
        ({f"manifests/{TAG}": (302, b"", {"Location": f"/v2/a/b/manifests/{TAG}"})}, "engine.registry"),
        ({f"manifests/{TAG}": (302, b"", {"Location": "ftp://[x"})}, "engine.registry"),
        ({f"manifests/{TAG}": (500, b"")}, "engine.registry"),
        ({f"manifests/{TAG}": (401, b"", {"WWW-Authenticate": "Bearer realm=x"})}, "engine.registry"),
    ],
)  # fmt: skip
def test_a_registry_that_lies_or_floods_is_refused(hostile, answers, code):
    address, _ = hostile(answers)
    with refused(code):
        Repository(f"{address}/a/b").read(TAG)


def test_a_login_stays_with_its_host(hostile, monkeypatch, tmp_path):
    other, overheard = hostile({f"manifests/{TAG}": (200, manifest())})
    away = {"Location": f"http://{other}/v2/a/b/manifests/{TAG}"}
    address, asked = hostile({f"manifests/{TAG}": (401, b"", {"WWW-Authenticate": "Basic"})})
    login = {"auths": {address: {"auth": base64.b64encode(b"me:secret").decode()}}}
    (tmp_path / "config.json").write_text(json.dumps(login))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    place = Repository(f"{address}/a/b")
    with refused("engine.registry", "answers 401"):
        place.read(TAG)
    assert asked[-1][1] == f"Basic {base64.b64encode(b'me:secret').decode()}"
    redirecting, _ = hostile({f"manifests/{TAG}": (302, b"", away)})
    place.url = place.url.replace(address, redirecting)
    assert place.read(TAG) == []
    assert overheard == [(f"/v2/a/b/manifests/{TAG}", None)]


def test_a_token_is_fetched_with_the_login_and_used(hostile, monkeypatch, tmp_path):
    answers = {"token": (200, b'{"token": "t"}')}
    address, asked = hostile(answers)
    challenge = f'Bearer realm="http://{address}/v2/a/b/token",service="s"'
    answers[f"manifests/{TAG}"] = (401, b"", {"WWW-Authenticate": challenge})
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def refuses(text, token=b'{"token": "t"}'):
        (tmp_path / "config.json").write_text(text)
        answers["token"] = (200, token)
        with refused("engine.registry"):
            Repository(f"{address}/a/b").read(TAG)

    login = json.dumps({"auths": {address: {"auth": base64.b64encode(b"a:b").decode()}}})
    refuses(login)
    assert [authorization for _, authorization in asked] == [None, "Basic YTpi", "Bearer t"]
    for body in (b"[]", b"{", b" " * (5 << 20)):
        refuses(login, body)
    for text in ("{", '{"credsStore": "no-such-helper"}', '{"auths": 3}', login.replace("YTpi", "!")):
        refuses(text)
