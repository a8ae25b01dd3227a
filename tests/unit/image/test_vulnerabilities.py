"""A bill of materials against an OSV database on disk, and the reasons of vex.toml."""

import json
import subprocess
import zipfile
from itertools import pairwise

import pytest
from expected import refused
from invoke.exceptions import Exit
from oci_layout import Writer, ours
from programs import write_files

from sparkforge.cli import build as commands
from sparkforge.image import build, vulnerabilities

SOURCE = {"type": "source-distribution", "url": "pkg:deb/debian/glibc@2.36-9%2Bdeb12u14?arch=source"}
BILL = json.dumps({"components": [
    {"name": "vllm", "version": "0.32.0+sparkforge.1", "purl": "pkg:pypi/vllm@0.32.0%2Bsparkforge.1"},
    {"name": "torch", "version": "2.13.0", "purl": "pkg:pypi/torch@2.13.0"},
    {"name": "libc6", "version": "2.36-9+deb12u14", "externalReferences": [SOURCE],
     "purl": "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64&distro=bookworm"},
    {"name": "debian", "version": "bookworm-slim", "purl": "pkg:oci/debian@sha256:0"}, {"name": "a.so"},
]}).encode()  # fmt: skip


def record(*events, name="vllm", ecosystem="PyPI", kind="ECOSYSTEM", versions=(), **more):
    more_of = {"repo": "x", "database_specific": {"a": 1}}
    ranges = [{"type": kind, "events": [dict([event]) for event in events], **more_of}] if events else []
    affected = {"package": {"ecosystem": ecosystem, "name": name}, "ranges": ranges, "versions": list(versions)}
    return {"id": "GHSA-1", "aliases": ["CVE-2026-1"], "summary": "It  burns", "affected": [affected], **more}


@pytest.fixture
def check(tmp_path):
    def check(*records):
        file = tmp_path / "all.zip"
        with zipfile.ZipFile(file, "w") as archive:
            for number, entry in enumerate(records):
                archive.writestr(f"{number}.json", entry if isinstance(entry, bytes) else json.dumps(entry))
        vulnerabilities.check(BILL, file)

    return check


@pytest.mark.parametrize(
    "entry",
    [
        record(("introduced", "0")),
        record(("introduced", "0.32.0")),
        record(("introduced", "0"), ("fixed", "0.9.0"), ("introduced", "0.31.0"), ("fixed", "0.32.1")),
        record(("introduced", "0.1"), ("last_affected", "0.32.0")),
        record(("introduced", "no version"), versions=["0.32.0"]),
        record(versions=["0.32.0"]),
    ],
)
def test_a_version_in_a_range_or_in_the_list_is_refused_by_name(check, entry, capsys):
    with refused("validation.vulnerable", "CVE-2026-1 vllm 0.32.0"):
        check(entry)
    assert capsys.readouterr().out == "CVE-2026-1 vllm 0.32.0: It burns\n"


@pytest.mark.parametrize(
    "entry",
    [
        record(("introduced", "0"), ("fixed", "0.32.0")),
        record(("introduced", "0.32.1")),
        record(("introduced", "0"), ("last_affected", "0.31.9")),
        record(("introduced", "0"), kind="GIT"),
        record(("introduced", "0"), withdrawn="2026-01-01T00:00:00Z"),
        record(("introduced", "0"), ecosystem="npm"),
        record(("introduced", "0"), name="other"),
        record(("introduced", "0"), ("fixed", "2.36-9+deb12u14"), name="glibc", ecosystem="Debian:12"),
        record(("introduced", "0"), name="glibc", ecosystem="Debian:13"),
        record(("introduced", "0"), name="libc6", ecosystem="Debian:12"),  # Debian's records name source packages
        {"id": "x"},
    ],
)
def test_records_of_other_versions_or_packages_pass(check, entry, capsys):
    check(entry)
    said = capsys.readouterr()
    assert said.out == ""
    assert "3 components, 1 records" in said.err


def test_a_reason_in_vex_toml_prevents_the_refusal(check, capsys):
    known = record(
        ("introduced", "0"), name="glibc", ecosystem="Debian:12", id="DEBIAN-CVE-2019-1010023", aliases=[],
        upstream=["CVE-2019-1010023"],
    )  # fmt: skip
    check(known)
    printed = capsys.readouterr().out
    assert printed.startswith("CVE-2019-1010023 libc6 2.36-9+deb12u14: not_affected: it needs ldd")
    assert "(https://sourceware.org/bugzilla/show_bug.cgi?id=22851)" in printed
    with refused("validation.vulnerable"):  # the reason is only about glibc
        check({**known, "affected": record(("introduced", "0"))["affected"]})


def test_a_database_may_be_a_record_or_a_folder_and_the_command_reads_an_images_bill(tmp_path, capsys):
    write_files(tmp_path, {"PyPI/x.json": json.dumps(record(("introduced", "0"), name="torch"))})
    for place in (tmp_path / "PyPI", tmp_path / "PyPI/x.json"):
        with refused("validation.vulnerable", "torch 2.13.0"):
            vulnerabilities.check(BILL, place)
    ours(Writer(tmp_path / "image"), build.expected("amd64", stack="embedded"), components=["torch"])
    with pytest.raises(Exit):
        commands.image_sbom.body(
            None, image=str(tmp_path / "image"), stack="embedded", check_vulnerabilities=str(tmp_path / "PyPI")
        )
    assert "[validation.vulnerable]" in capsys.readouterr().err


def test_a_malformed_record_is_refused(check):
    for data, reason in (
        (b"[" * 9999, "nested|not JSON"), (b"{}", "id"), (b'{"id": "x", "affected": [{"ranges": [{}]}]}', "ranges"),
        (b'"' + b"x" * vulnerabilities.LARGEST, "more than"), (b"\xff", "not text"),
    ):  # fmt: skip
        with refused("storage.access", reason):
            check(data)


def test_a_path_without_a_database_and_a_bill_with_an_unusable_component_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04 cut")
    for name, code, reason in (
        ("empty", "storage.access", "no OSV record"), ("a.zip", "storage.access", "zip"),
        ("none", "usage", "No such file"),
    ):  # fmt: skip
        with refused(code, reason):
            vulnerabilities.check(BILL, tmp_path / name)
    for entry in ({"purl": "pkg:pypi/a@1"}, {"purl": "x", "version": "1"}, {"purl": "pkg:pypi/a@1", "version": "?"}):
        bill = json.dumps({"components": [{"name": "a", **entry}]}).encode()
        with refused("integrity.image", "bill of materials"):
            vulnerabilities.check(bill, tmp_path)


@pytest.mark.needs("dpkg")
def test_debians_versions_are_in_debians_order():
    ordered = ["0~~", "0~a", "0", "0a", "0+", "0.1-1~bpo1", "0.1-1", "0.1-1+b1", "0.1-2", "0.9", "0.10", "1.0~rc1-1",
               "1.0-1", "1.0-1.1", "1.0.1-1", "1:0.1-1", "2:0~0"]  # fmt: skip
    for older, newer in pairwise(ordered):
        assert vulnerabilities._debian_order(older) < vulnerabilities._debian_order(newer)
        subprocess.run(["dpkg", "--compare-versions", older, "lt", newer], check=True)  # noqa: S607
