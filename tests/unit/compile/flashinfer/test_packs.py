"""Kernel packs: making, use instead of compiling, attacks; as an archive, as a folder and in a bundle."""

import hashlib
import io
import json
import shutil
import tarfile
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from expected import refused

from sparkforge.compile import toolchain
from sparkforge.compile.flashinfer import build
from sparkforge.compile.flashinfer.build import KernelRequest
from sparkforge.core import manifest
from sparkforge.image import packs, provenance, signing, trust

pytestmark = pytest.mark.needs("c++", "ninja")
LAB, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
REQUEST = KernelRequest("spark")


@pytest.fixture
def world(site, tmp_path, monkeypatch, trust_file):
    """The small FlashInfer with its kernels built, and a signing key; state and trust.toml are in tmp_path."""
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(build, "prepare", lambda _request: site.order)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    site.key = tmp_path / "key.pem"
    site.key.write_bytes(LAB.private_bytes(*form))
    site.key.chmod(0o600)
    build.build(site.order)
    return site


def demand():
    key = f'[keys.lab]\npublic = """{signing.public_text(LAB)}"""\n'
    trust.FILE.write_text(f'schema = 1\n{key}[images]\ndemand = ["signature"]\n')
    trust.FILE.chmod(0o600)


def elsewhere(world):
    """An order of the same modules on another machine, where nothing is built."""
    return replace(world.order, output=world.order.output.with_name("elsewhere"))


def take(world, place):
    order = elsewhere(world)
    shutil.rmtree(order.output, ignore_errors=True)
    result, _ = build.build(order, packs.taking(str(place)))
    return result.compiled == 0, manifest.load(order.variables_file)


@pytest.mark.parametrize("name", ["pack.tar", "folder"])
def test_a_signed_pack_is_used_instead_of_compiling(world, tmp_path, capsys, name):
    place = tmp_path / name
    digest = packs.publish(REQUEST, str(place), world.key)
    assert packs.publish(REQUEST, str(tmp_path / "again.tar"), None) == digest
    demand()
    taken, record = take(world, place)
    assert taken
    assert "signed by lab" in capsys.readouterr().err
    assert list(record.outputs.values()) == list(manifest.load(world.order.variables_file).outputs.values())
    loaded = world.order.environment.site_packages / "flashinfer/data/aot/tiny/tiny.so"
    assert loaded.read_bytes() == world.library.read_bytes()
    order = elsewhere(world)
    assert not build.build(order, packs.taking(str(place)))[1]
    (world.jit / "one.h").write_text("inline int one() { return 11; }\n")
    build.build(replace(order, arch="12.0a"))  # compiles; the pack's library must not be loaded any more
    assert not loaded.exists()


def test_a_cross_compiled_pack_is_used_like_a_native_one(world, tmp_path, monkeypatch):
    other = "x86_64" if toolchain.THIS_MACHINE == "aarch64" else "aarch64"
    native = replace(world.order, chain=replace(world.order.chain, machine=other, home=tmp_path / "elsewhere"))
    torch = {"torch": "2.13.0+cpu"}
    foreign = replace(native, output=tmp_path / "cross", environment=replace(native.environment, versions=torch))
    assert packs.key_of(foreign.identity) != packs.key_of(world.order.identity)
    served = replace(foreign.environment, versions={"torch": "2.13.0"})
    assert packs.key_of(foreign.identity) == packs.key_of(replace(foreign, environment=served).identity)
    build.build(foreign)
    world.order = foreign
    packs.publish(REQUEST, str(tmp_path / "packs"), None)
    taken = replace(foreign, output=tmp_path / "taken")
    assert build.build(taken, packs.taking(str(tmp_path / "packs")))[0].compiled == 0
    assert not list(world.order.environment.site_packages.glob("flashinfer/data/aot/*")), "another machine's"
    monkeypatch.setattr(toolchain, "THIS_MACHINE", other)
    native = replace(taken, output=tmp_path / "native", environment=served)
    assert build.build(native, packs.taking(str(tmp_path / "packs")))[0].compiled == 0
    assert list(world.order.environment.site_packages.glob("flashinfer/data/aot/*/tiny.so"))


def test_modules_without_a_pack_are_compiled_and_bundles_provide_packs(world, tmp_path, capsys, monkeypatch):
    assert not take(world, tmp_path / "none")[0]
    assert "compiling them" in capsys.readouterr().err
    monkeypatch.setenv("SPARKFORGE_OFFLINE", str(tmp_path / "bundle"))
    packs.publish(REQUEST, str(tmp_path / "bundle/packs"), None)
    assert take(world, "")[0]
    assert "unsigned" in capsys.readouterr().err


def test_a_pack_lists_its_content_and_is_not_used_for_other_inputs(world, tmp_path):
    packs.publish(REQUEST, str(tmp_path / "pack.tar"), world.key)
    with tarfile.open(tmp_path / "pack.tar") as tar:
        bill = json.load(tar.extractfile("sbom.json"))
        assert {(member.mtime, member.uid, member.mode) for member in tar} == {(0, 0, 0o644)}
        assert tar.getnames() == ["index.json", "audit.json", "libraries/tiny.so", "sbom.json"]
    assert {"flashinfer-python"} <= {component["name"] for component in bill["components"]}
    world.order = replace(world.order, arch="12.0a")
    with refused("integrity.image", "other FLASHINFER_CUDA_ARCH_LIST"):
        take(world, tmp_path / "pack.tar")


# Attacks. Each replaces the pack of the same name; none may be used, and none may end in a traceback.


def rewritten(data, *, index=None, **changes):
    """Return the tar with entries of index.json replaced by `index`, and the library's name or content replaced."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar, tarfile.open(fileobj=out, mode="w") as changed:
        for member in tar:
            content = tar.extractfile(member).read()
            if member.name == "index.json" and index:
                content = json.dumps({**json.loads(content), **index}).encode()
            if member.name.startswith("libraries/"):
                member.name, content = changes.get("name", member.name), changes.get("library", content)
            member.size = len(content)
            changed.addfile(member, io.BytesIO(content))
    return out.getvalue()


ATTACKS = {
    "another library": (lambda data: rewritten(data, library=b"x"), "hash"),
    "truncated": (lambda data: data[: len(data) // 2], "archive"),
    "rubbish": (lambda _: b"rubbish", "archive"),
    "a member outside": (lambda data: rewritten(data, name="../../tiny.so"), "archive"),
    "another key": (lambda data: rewritten(data, index={"key": "0" * 64}), "image"),
    "other inputs": (lambda data: rewritten(data, index={"inputs": {"nvcc": "1"}}), "image"),
    "no inputs": (lambda data: rewritten(data, index={"inputs": None}), "archive"),
    "no members": (lambda data: rewritten(data, index={"members": {}}), "archive"),
}


def test_a_pack_that_was_tampered_with_is_refused(world, tmp_path):
    place = tmp_path / "pack.tar"
    packs.publish(REQUEST, str(place), None)
    honest = place.read_bytes()
    for attack, code in ATTACKS.values():
        place.write_bytes(attack(honest))
        with refused(f"integrity.{code}"):
            take(world, place)
        assert not list(elsewhere(world).output.glob("*.manifest.json"))
        assert not list(elsewhere(world).output.rglob("*.so"))
    assert not list(tmp_path.rglob("tiny.so"))[1:]  # [0] is the library that was built
    packs.publish(REQUEST, str(tmp_path / "folder"), None)
    largest = max((tmp_path / "folder/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"x")
    with refused("integrity.hash"):
        take(world, tmp_path / "folder")


def statement(digest, key):
    return signing.signed(provenance.statement([("x", digest)], provenance.CYCLONEDX, {}), key)


def test_a_demanded_signature_that_is_missing_or_wrong_refuses_the_pack(world, tmp_path):
    place = tmp_path / "pack.tar"
    digest = packs.publish(REQUEST, str(place), None)
    demand()
    for data in (
        None, statement(hashlib.sha256(b"another").hexdigest(), LAB).data, statement(digest, OTHER).data, b"[" * 9999,
    ):  # fmt: skip
        if data:
            signing.signature_path(place).write_bytes(data)
        with refused("integrity.signature", "trust.toml demands signature by lab"):
            take(world, place)
