"""Compare two OCI archives: equal means every byte, and differences are named."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lab import reproducible
from sparkforge.audit import elf
from sparkforge.image import provenance, signing
from sparkforge.image.attached import tag_of
from sparkforge.image.build import expected
from sparkforge.image.oci import LayoutImage
from tests.expected import refused
from tests.oci_layout import Writer, ours


def layer(files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, (content, mode, time) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(content), mode, time
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def archive(path, layers):
    """Write an OCI archive of raw layers to `path`."""
    writer = Writer(path.with_suffix(".layout"))
    blobs = [writer.put(data) for data in layers]
    writer.index([writer.put({"config": writer.put(b"{}"), "layers": blobs})])
    _pack(writer.folder, path)
    return path


def _pack(folder, file):
    with tarfile.open(file, "w") as tar:
        for part in sorted(folder.iterdir()):
            tar.add(part, part.name, filter=lambda info: info.replace(mtime=0, deep=False))


SAME = {"etc/hosts": (b"1", 0o644, 5), "bin/run": (b"code", 0o755, 5)}


def compared(tmp_path, first, second):
    pair = [archive(tmp_path / name, layers) for name, layers in (("a", first), ("b", second))]
    return reproducible.compare([reproducible.read(image) for image in pair], pair)


@pytest.mark.parametrize(
    ("changed", "differing"),
    [
        ({**SAME, "etc/hosts": (b"2", 0o644, 5)}, "layer 0: etc/hosts: content"),
        ({**SAME, "etc/hosts": (b"1", 0o600, 5)}, "layer 0: etc/hosts: mode 0o644 and 0o600"),
        ({**SAME, "etc/hosts": (b"1", 0o644, 6)}, "layer 0: etc/hosts: time 5 and 6"),
        ({**SAME, "var/log/x": (b"", 0o644, 5)}, "layer 0: var/log/x: only in b"),
    ],
)
def test_the_same_bytes_are_identical_and_what_differs_is_named(tmp_path, changed, differing):
    same = compared(tmp_path / "same", [layer(SAME)], [layer(SAME)])
    assert same["identical"]
    reproducible.require_identical(same, "")
    report = compared(tmp_path, [layer(SAME)], [layer(changed)])
    assert not report["identical"]
    assert [line for line in report["differing"] if line.startswith(differing)]
    with refused("integrity.image", "layers 0 differ.*diffoscope a b"):
        reproducible.require_identical(report, "diffoscope a b")


def test_the_first_section_or_byte_that_differs_is_named(tmp_path):
    program = Path("/bin/true").read_bytes()
    offset = elf.opened(Path("/bin/true")).section_headers[".rodata"]["sh_offset"]
    changed = program[:offset] + bytes([program[offset] ^ 1]) + program[offset + 1 :]
    for before, after, where in ((program, changed, "in section .rodata"), (b"abc", b"abd", "at byte 2")):
        report = compared(tmp_path / where, *([layer({"x": (data, 0o644, 5)})] for data in (before, after)))
        assert report["differing"][0].endswith(f", first {where}")


@pytest.fixture
def witness(tmp_path, monkeypatch, docker_command):
    docker_command.answers("buildx version", "v0.1")
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(reproducible, "require_space", lambda *_: None)
    monkeypatch.setattr(reproducible, "build", lambda *_: tmp_path / "ours.tar")
    writer = Writer(tmp_path / "image")
    ours(writer, expected("amd64", stack="embedded"))
    image = LayoutImage(writer.folder)
    _pack(writer.folder, tmp_path / "ours.tar")
    layers = [writer.put(gzip.decompress(image.layout.open_layer(layer).read())) for layer in image.manifest.layers]
    kind, config = image.descriptor.media_type, image.manifest.config.model_dump(by_alias=True)
    document = {"schemaVersion": 2, "mediaType": kind, "layers": layers, "config": config}
    writer.index([writer.put(document, kind)])
    _pack(writer.folder, tmp_path / "theirs.tar")
    return tmp_path / "theirs.tar"


def test_an_identical_rebuild_is_signed(witness, tmp_path):
    key = Ed25519PrivateKey.generate()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "key").write_bytes(key.private_bytes(*form))
    (tmp_path / "key").chmod(0o600)
    reproducible.verify_reproducible("embedded", (), str(witness), tmp_path / "key")
    (digest, *_) = LayoutImage(witness).digests
    (entry,) = signing.own_folder().read(tag_of(digest, "att"))
    signer, statement = signing.read_statement(entry, {"us": key.public_key()})
    assert (signer, statement["predicateType"]) == ("us", provenance.REBUILD)


def test_a_published_image_is_pulled_and_compared_as_its_registry_has_it(witness, docker_command, capsys):
    docker_command.answers("pull", "")
    program = docker_command.folder / "docker"
    rest = program.rename(program.with_name("rest"))
    program.write_text(f'#!/bin/sh\ncase "$*" in "image save"*) cp "{witness}" "$4" ;; *) exec "{rest}" "$@" ;; esac\n')
    program.chmod(0o755)
    name = "registry.example.com/vllm@"
    reproducible.verify_reproducible("embedded", (), name + LayoutImage(witness).digests[0])
    assert f"pull {name}" in docker_command.calls[-1]
    assert "identical: configuration and layers are the same" in capsys.readouterr().err
    with refused("integrity.image", "only its containerd image store"):
        reproducible.verify_reproducible("embedded", (), f"{name}sha256:{'0' * 64}")


def test_a_copy_has_the_modes_of_its_umask(tmp_path):
    reproducible.copy_checkout(tmp_path / "clone", 0o077)
    for name, mode in (("deploy/start", 0o700), ("pins.toml", 0o600), ("sparkforge", 0o700)):
        assert (tmp_path / "clone" / name).stat().st_mode & 0o777 == mode
    assert not (tmp_path / "clone/.git").exists()


def test_without_buildx_nothing_is_built_and_the_package_is_named(docker_command):
    docker_command.answers("buildx version", err="docker: 'buildx' is not a docker command.", code=1)
    with refused("engine.tool", "docker-buildx-plugin"):
        reproducible.verify_reproducible("embedded", ())
    assert docker_command.calls == ["buildx version"]
