"""The requirements of trust.toml for an image, and attacks that must fail with their errors. Images are OCI layouts."""

import base64
import json
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from expected import refused
from invoke.exceptions import Exit
from oci_layout import Writer, layer, ours

from sparkforge.cli import build as commands
from sparkforge.core.errors import StorageError
from sparkforge.image import attached, build, inspect, oci, provenance, registry, signing, trust
from sparkforge.image.attached import Attached, Folder

STACK = "embedded"
LAB, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
ALL = ("signature", "provenance", "sbom")


@pytest.fixture
def demand(trust_file):
    def demand(*things, lab=LAB, office=None, **images):
        images = [f"{name} = {json.dumps(value)}" for name, value in {"demand": list(things or ALL), **images}.items()]
        keys = [f'[keys.{name}]\npublic = """{signing.public_text(key)}"""' for name, key in
                {"lab": lab, "office": office}.items() if key]  # fmt: skip
        trust_file.write_text("\n".join(["schema = 1", *keys, "[images]", *images]))
        trust_file.chmod(0o600)
        return trust_file

    return demand


@pytest.fixture
def attachments(tmp_path, monkeypatch):
    """The folder that takes the place of a registry."""
    monkeypatch.setattr(trust, "Repository", lambda name: Folder(tmp_path / "registry"))
    return tmp_path / "registry"


@pytest.fixture
def make(tmp_path):
    def make(name="image", key=LAB, builder="urn:lab", **options):
        writer = Writer(tmp_path / name)
        ours(writer, build.expected("amd64", stack=STACK), **options)
        if key:
            image = oci.LayoutImage(writer.folder)
            for digest, kinds in evidence(image, key, builder).items():
                for kind, entries in kinds.items():
                    signing.attach(Folder(writer.folder), digest, kind, entries)
        return writer.folder

    return make


def evidence(image, key, builder="urn:lab"):
    predicate = provenance.predicate(image, STACK, inspect.manifest(image, STACK), builder)
    bill = json.loads(inspect.bill(image, STACK))
    named = signing.digests(image)
    contents = {provenance.SLSA: predicate, provenance.CYCLONEDX: bill}
    statements = [signing.signed(provenance.statement(named, *content), key) for content in contents.items()]
    return {digest: {"sig": [signing.signature(name, digest, key)], "att": statements} for name, digest in named}


def require(folder, **options):
    return trust.require(oci.LayoutImage(folder), STACK, **options)


def test_machines_that_rebuilt_an_image_are_one_line(make, demand, capsys):
    folder, second = make(), Ed25519PrivateKey.generate()
    demand("signature", office=second)
    named = signing.digests(oci.LayoutImage(folder))
    rebuild = provenance.statement(named, provenance.REBUILD, {})
    statements = [signing.signed(rebuild, key) for key in (LAB, second, OTHER)]
    signing.attach(Folder(folder), named[0][1], "att", statements)
    commands.image_verify.body(None, image=str(folder), stack=STACK)
    assert "rebuilt bit for bit by lab, office\n" in capsys.readouterr().err


@pytest.mark.usefixtures("demand")  # the fixture's function is not called, so there is no trust.toml
def test_without_a_policy_nothing_is_required_and_own_builds_are_reported_as_unsigned(make, capsys):
    commands.image_verify.body(None, image=str(make(key=None)), stack=STACK)
    assert "is your own unsigned build" in capsys.readouterr().err


def test_an_unsigned_image_is_refused_with_the_next_command_and_not_by_the_bill_alone(make, demand, capsys):
    folder = make(key=None)
    demand("signature")
    with pytest.raises(Exit):
        commands.image_verify.body(None, image=str(folder), stack=STACK)
    said = capsys.readouterr().err
    assert "[integrity.signature]" in said
    assert "trust.toml demands signature by lab: nothing is attached to it" in said
    assert "next: ./inv image.sign KEY" in said


@pytest.mark.parametrize("thing", ALL)
def test_each_missing_requirement_is_named(make, demand, thing):
    folder = make()
    demand(thing)
    for digest in oci.LayoutImage(folder).digests:
        for suffix in ("sig", "att"):
            place, tag = Folder(folder), attached.tag_of(digest, suffix)
            kept = [entry for entry in place.read(tag) if thing not in kind_of(entry)]
            place.write(tag, kept)
    with refused("integrity.signature", f"demands {thing} by lab: nothing is attached|demands {thing} by lab"):
        require(folder)


def kind_of(entry):
    kinds = {provenance.SLSA: "provenance", provenance.CYCLONEDX: "sbom", None: "signature"}
    return kinds[entry.annotations.get("predicateType")]


def test_another_builder_or_stack_is_refused(make, demand):
    folder = make()
    for options, reason in (
        ({"builders": ["urn:other"]}, "it was built by urn:lab, which trust.toml does not name"),
        ({"stacks": ["spark"]}, "trust.toml does not accept the stack embedded"),
    ):
        demand(**options)
        with refused("integrity.signature", reason):
            require(folder)
    demand("provenance")
    with refused("integrity.signature", "names the stack embedded, and spark was requested"):
        trust.require(oci.LayoutImage(folder), "spark")


# Attacks: the registry's owner may attach anything, but has no trusted key.


def attach(folder, entries):
    """Replace an image's attachments by entries (digest → suffix → attached), under the tags of its own digests."""
    image, found = oci.LayoutImage(folder), list(entries.values())
    for digest, kinds in zip(image.digests, found, strict=True):
        for suffix, attachments in kinds.items():
            Folder(folder).write(attached.tag_of(digest, suffix), attachments)


def edited(entry, change):
    envelope = json.loads(entry.data)
    payload = change(base64.b64decode(envelope["payload"]))
    data = {**envelope, "payload": base64.b64encode(payload).decode()}
    return Attached(json.dumps(data).encode(), entry.kind, entry.annotations)


def change_all(entries, change):
    return {digest: {**kinds, "att": [change(entry) for entry in kinds["att"]]} for digest, kinds in entries.items()}


def envelope_with(**change):
    return lambda entry: Attached(json.dumps({**json.loads(entry.data), **change}).encode(), entry.kind, {})


def resigned(change):
    """Sign a changed document with the right key, as by mistake or by an old version of the tools."""

    def again(entry):
        statement = json.loads(base64.b64decode(json.loads(entry.data)["payload"]))
        change(statement)
        return signing.signed(statement, LAB)

    return again


def cut_bill(statement):
    if statement["predicateType"] == provenance.CYCLONEDX:
        statement["predicate"]["components"] = []


def swap_pins(statement):
    if statement["predicateType"] == provenance.SLSA:
        statement["predicate"]["buildDefinition"]["resolvedDependencies"] = []


ATTACKS = {
    "payload changed": (lambda entry: edited(entry, lambda data: data.replace(b"urn:lab", b"urn:bad")), "provenance"),
    "payload truncated": (lambda entry: edited(entry, lambda data: data[:-40]), "no accepted key"),
    "type changed": (envelope_with(payloadType="application/json"), "no accepted key"),
    "no signature": (envelope_with(signatures=[]), "at least 1"),
    "a signature of rubbish": (envelope_with(signatures=[{"sig": "AAAA"}]), "no accepted key"),
    "no base64": (envelope_with(payload="{}"), "pattern"),
    "base64 that is cut": (envelope_with(payload="A"), "Invalid base64"),
    "a flood of signatures": (envelope_with(signatures=[{"sig": "AAAA"}] * 1000), "at most 16"),
    "no envelope": (lambda entry: Attached(b"[" * 9999, entry.kind, {}), "nested|not JSON"),
    "truncated bill, signed": (resigned(cut_bill), "the signed bill of materials is not the one in the image"),
    "other pins, signed": (resigned(swap_pins), "the provenance is not the image's: resolvedDependencies"),
    "no subject, signed": (resigned(lambda statement: statement.update(subject=[])), "at least 1"),
    "another type, signed": (resigned(lambda statement: statement.update(_type="x")), "Input should be"),
}


@pytest.mark.parametrize(("change", "reason"), ATTACKS.values(), ids=ATTACKS)
def test_a_statement_that_was_changed_or_does_not_fit_is_refused(make, demand, change, reason):
    folder = make(key=None)
    attach(folder, change_all(evidence(oci.LayoutImage(folder), LAB), change))
    demand("provenance", "sbom")
    with refused("integrity.signature", reason):
        require(folder)


def test_the_signatures_of_another_image_are_refused(make, demand):
    """An old attestation is attached to an image with the same metadata and one more layer."""
    folder, other = make(key=None, layers=[layer([("opt/backdoor", b"x")])]), make("other")
    attach(folder, evidence(oci.LayoutImage(other), LAB))
    for thing, reason in zip(
        ALL, ("signature is for another image", *["statement is about another digest"] * 2), strict=True
    ):
        demand(thing)
        with refused("integrity.signature", reason):
            require(folder)


def test_the_signatures_of_another_key_are_refused_whatever_they_call_it(make, demand):
    folder = make(key=OTHER)
    for thing in ALL:
        demand(thing)
        with refused("integrity.signature", "no accepted key"):
            require(folder)
    demand(lab=OTHER)
    assert set(require(folder).signed) == set(ALL)  # only the key was wrong


def test_a_key_that_is_not_listed_for_images_does_not_count(make, demand):
    folder = make(key=OTHER)
    demand(keys=["lab"], office=OTHER)
    with refused("integrity.signature", "no accepted key"):
        require(folder)


def test_an_older_image_needs_a_rollback_and_a_rollback_makes_it_the_last(make, demand):
    old = make("old", created="2026-10-01T00:00:00Z")
    new = make("new", created="2026-11-01T00:00:00.123456789Z")
    demand()
    trust.accept(STACK, require(old))
    trust.accept(STACK, require(new))
    with refused("integrity.signature", "older than the last accepted image.*rollback"):
        require(old)
    trust.accept(STACK, require(old, back=True))
    assert require(old)
    (trust.paths.state() / "accepted-images.json").write_text("[")
    with pytest.raises(StorageError):
        require(old)


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (lambda path: path.chmod(0o620), "storage.access", "other users can write it"),
        pytest.param(lambda path: os.chown(path, 12345, -1), "storage.access", "belongs to uid 12345",
                     marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")),
        (lambda path: (path.unlink(), path.symlink_to("gone")), "storage.access", "a link to a file that is not there"),
        (lambda path: path.write_text("schema = 1\n[images]\ndemand = []\n"), "input.table", "'keys' or 'identities'"),
        (lambda path: path.write_text(path.read_text().replace("MCow", "AAAA")), "input.table", "public"),
        (lambda path: path.write_text(path.read_text() + '\nkeys = ["x"]'), "input.table", "names no key: x"),
        (lambda path: path.write_text("schema = 1\n[" * 9), "input.table", "not TOML"),
    ],
)  # fmt: skip
def test_a_policy_of_another_user_or_a_broken_one_is_not_believed(make, demand, change, code, reason):
    folder = make()
    change(demand())
    with refused(code, reason):
        require(folder)


# How an image enters an engine


@pytest.mark.usefixtures("attachments")
@pytest.mark.parametrize(
    ("stack", "refusal"),
    [
        ("spark", ("integrity.image", "its label says 'spark'")),
        (STACK, ("integrity.signature", "nothing is attached to it")),
    ],
)
def test_pull_refuses_another_or_an_unsigned_image_before_a_tag_moves_and_removes_it(
    demand, fake_engine, docker_command, holding, stack, refusal
):
    demand("signature")
    holding(stack=STACK, labels={"org.sparkforge.stack": stack})
    before_the_pull = iter([(404, {"message": "No such image"})])
    fake_engine.routes[r"GET /images/.+/json"] = lambda query: next(before_the_pull, (200, fake_engine.image))
    reference = f"registry.example.com/a/b@sha256:{'d' * 64}"
    with refused(*refusal):
        registry.pull(STACK, reference, partial(build.expected, stack=STACK))
    assert docker_command.calls[-1] == f"image rm {reference}"
    assert not [call for call, _ in fake_engine.asked if "/tag" in call]


def test_what_was_verified_in_a_registry_is_kept_for_the_next_start(demand, attachments):
    digest, image_id = f"sha256:{'d' * 64}", f"sha256:{'e' * 64}"
    image = SimpleNamespace(attrs={"RepoDigests": [f"r/a@{digest}"]}, id=image_id, tags=["r/a:1"], short_id="e")
    signing.attach(Folder(attachments), digest, "sig", [signing.signature("r/a", digest, LAB)])
    demand("signature")
    with refused("integrity.signature"):
        trust.require(image, STACK)
    assert trust.require(image, STACK, "r/a").signed == {"signature": "lab"}
    shutil.rmtree(attachments)
    assert trust.require(image, STACK).signed == {"signature": "lab"}
    image.attrs["RepoDigests"] = []  # the engine no longer knows the image's repository
    with refused("integrity.signature", "for another image"):
        trust.require(image, STACK)
