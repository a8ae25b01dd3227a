"""Keyless signatures of a workflow, by a fake Sigstore: accepted by identity, and every attack is refused."""

import copy
import datetime as dt
import json

import pytest
import sigstore_instance
from expected import refused
from oci_layout import Writer, ours
from sigstore_instance import Instance

from sparkforge.cli import build as commands
from sparkforge.image import attached, build, inspect, oci, provenance, signing, trust
from sparkforge.image.attached import Attached, Folder, Repository

STACK, ALL = "embedded", ("signature", "provenance", "sbom")
WORKFLOW = "https://github.com/owner/name/.github/workflows/image.yml@refs/tags/1.0.0"
ISSUER, BUILDER = "https://token.actions.githubusercontent.com", "https://github.com/actions/runner/github-hosted"
KIND = f"{trust.BUNDLE}.v0.3+json"
FORGES = {"buildDefinition": {"buildType": "https://actions.github.io/buildtypes/workflow/v1",
                              "externalParameters": {"workflow": {"path": "image.yml"}}},
          "runDetails": {"builder": {"id": BUILDER}, "metadata": {"invocationId": "1"}}}  # fmt: skip


@pytest.fixture(scope="module")
def sigstore():
    return Instance()


@pytest.fixture
def demand(tmp_path, trust_file, sigstore):
    def demand(root=None, identity=WORKFLOW, issuer=ISSUER, **images):
        (tmp_path / "root.json").write_text(sigstore.trusted_root() if root is None else root)
        lines = {"identity": identity, "issuer": issuer, "trusted_root": "root.json"}
        rows = ["schema = 1", "[identities.release]", *(f"{key} = {json.dumps(text)}" for key, text in lines.items())]
        rows += ["[images]", *(f"{key} = {json.dumps(value)}" for key, value in {"demand": ALL, **images}.items())]
        trust_file.write_text("\n".join(rows))
        trust_file.chmod(0o600)

    return demand


@pytest.fixture
def image(tmp_path):
    ours(Writer(tmp_path / "image"), build.expected("amd64", stack=STACK))
    return oci.LayoutImage(tmp_path / "image")


def bundles(image, sigstore, **options):
    contents = {provenance.SLSA: FORGES, provenance.CYCLONEDX: json.loads(inspect.bill(image, STACK))}
    options = {"identity": WORKFLOW, "issuer": ISSUER, **options}
    subject = options.pop("subject", [("ghcr.io/owner/name", image.digests[0])])
    return [
        sigstore.bundle(provenance.statement(subject, kind, content), **options) for kind, content in contents.items()
    ]


def attach(image, documents):
    entries = [Attached(json.dumps(document).encode(), KIND) for document in documents]
    signing.attach(Folder(image.layout.path), image.digests[0], "att", entries)


def test_the_workflow_that_is_named_vouches_for_its_image(image, sigstore, demand, capsys):
    attach(image, bundles(image, sigstore))
    demand(builders=[BUILDER], stacks=[STACK])
    commands.image_verify.body(None, image=str(image.layout.path), stack=STACK)
    said = capsys.readouterr().err
    for line in ("signature by release", f"provenance by release, built by {BUILDER}", "sbom by release"):
        assert line in said


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"identity": WORKFLOW.replace("owner", "other")}, "not by release"),
        ({"issuer": "https://other.example"}, "not by release"),
        ({"builders": ["urn:mine"]}, f"it was built by {BUILDER}, which trust.toml does not name"),
        ({"root": Instance().trusted_root()}, "not by release"),
    ],
)
def test_another_workflow_issuer_builder_or_sigstore_is_refused(image, sigstore, demand, policy, reason):
    attach(image, bundles(image, sigstore))
    demand(**policy)
    with refused("integrity.signature", reason):
        trust.require(image, STACK)


def put(path, value):
    """Return a change of a bundle: the entry at a path becomes `value`, or the result of the function `value`."""

    def change(document):
        *folders, last = path
        for name in folders:
            document = document[name]
        document[last] = value(document[last]) if callable(value) else value

    return change


MATERIAL = "verificationMaterial"
ENTRY = (MATERIAL, "tlogEntries", 0)
PROOF = (*ENTRY, "inclusionProof")
ATTACKS = {
    "payload changed": put(("dsseEnvelope", "payload"), lambda text: text.replace(text[40:44], "AAAA")),
    "type changed": put(("dsseEnvelope", "payloadType"), "application/json"),
    "signature of rubbish": put(("dsseEnvelope", "signatures", 0, "sig"), "AAAA"),
    "no signature": put(("dsseEnvelope", "signatures"), []),
    "no envelope": put(("dsseEnvelope",), None),
    "not logged": put((MATERIAL, "tlogEntries"), []),
    "another log entry": put((*ENTRY, "canonicalizedBody"), sigstore_instance.text(b"{}")),
    "no promise": put((*ENTRY, "inclusionPromise"), None),
    "a later time": put((*ENTRY, "integratedTime"), lambda time: str(int(time) + 10**6)),
    "a time beyond all": put((*ENTRY, "integratedTime"), str((1 << 63) - 1)),
    "another root hash": put((*PROOF, "rootHash"), sigstore_instance.text(b"0" * 32)),
    "an unsigned checkpoint": put((*PROOF, "checkpoint", "envelope"), "log - 1\n1\nAAAA\n\n"),
    "a checkpoint of rubbish": put((*PROOF, "checkpoint", "envelope"), "x"),
    "a proof that is too long": put((*PROOF, "hashes"), [sigstore_instance.text(b"0" * 32)] * 999),
    "a certificate of rubbish": put((MATERIAL, "certificate", "rawBytes"), "AAAA"),
    "another media type": put(("mediaType",), "x"),
    "no material": put((MATERIAL,), {}),
    "a number": put(("dsseEnvelope",), 1),
}


@pytest.mark.parametrize("change", ATTACKS.values(), ids=ATTACKS)
def test_a_bundle_that_was_changed_is_refused(image, sigstore, demand, change):
    documents = copy.deepcopy(bundles(image, sigstore))
    for document in documents:
        change(document)
    attach(image, documents)
    demand()
    with refused("integrity.signature", "demands signature, provenance, sbom by release: no accepted identity signed"):
        trust.require(image, STACK)


def test_another_kind_another_image_and_a_signature_after_the_certificate_ended_are_refused(image, sigstore, demand):
    demand()
    attach(image, bundles(image, sigstore, kind="application/json"))
    with refused("integrity.signature", "release signed another kind, application/json"):
        trust.require(image, STACK)
    attach(image, bundles(image, sigstore, subject=[("x", f"sha256:{'0' * 64}")]))
    with refused("integrity.signature", "about another digest"):
        trust.require(image, STACK)
    other = Late()
    demand(root=other.trusted_root())
    attach(image, bundles(image, other))
    with refused("integrity.signature", "no accepted identity signed a Sigstore bundle"):
        trust.require(image, STACK)


class Late(Instance):
    """A Sigstore whose certificates end before the log's entry is made."""

    def _builder(self, issuer, subject, until):
        return super()._builder(issuer, subject, min(until, sigstore_instance.NOW + dt.timedelta(seconds=30)))


def test_invalid_bundles_are_refused(image, demand):
    demand()
    tag = attached.tag_of(image.digests[0], "att")
    for data in (b"", b"[" * 9999, b"{}", b"1", b"\xff", b'{"mediaType": 1}'):
        Folder(image.layout.path).write(tag, [Attached(data, KIND)])
        with refused("integrity.signature", "no accepted identity signed a Sigstore bundle"):
            trust.require(image, STACK)


def test_an_invalid_trusted_root_is_named(image, sigstore, demand):
    attach(image, bundles(image, sigstore))
    for root in ("", "{}", "[", '{"mediaType": "x"}'):
        demand(root=root)
        with refused("input.table", "root.json is not a trusted root"):
            trust.require(image, STACK)


@pytest.mark.parametrize("is_tag", [False, True])
def test_a_registry_is_asked_for_bundles_by_the_api_or_by_the_tag_in_its_place(serve, image, sigstore, is_tag):
    blob = json.dumps(bundles(image, sigstore)[0]).encode()
    layer, digest = attached._described(blob, KIND), image.digests[0]
    below = {"sbom": f"sha256:{'1' * 64}", "bundle": f"sha256:{'2' * 64}"}
    index = {"manifests": [
        {"digest": below["sbom"], "size": 1, "artifactType": "application/spdx+json"},
        {"digest": below["bundle"], "size": 1, "artifactType": KIND},
    ]}  # fmt: skip
    answers = {
        f"manifests/{digest.replace(':', '-')}" if is_tag else f"referrers/{digest}": json.dumps(index).encode(),
        **dict.fromkeys((f"manifests/{name}" for name in below.values()), json.dumps({"layers": [layer]}).encode()),
        f"blobs/{layer['digest']}": blob,
    }

    def answer(handler):
        body = answers.get(handler.path.partition("?")[0].rpartition("/v2/a/b/")[2])
        return (404, b"", {}) if body is None else (200, body, {})

    address = serve(answer).url.removeprefix("http://")
    assert Repository(f"{address}/a/b").read_referrers(digest, trust.BUNDLE) == [Attached(blob, KIND)]
