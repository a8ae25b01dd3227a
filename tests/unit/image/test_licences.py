"""Licence texts for wheels that come without one."""

import pytest
from expected import refused

from sparkforge.image import licences

# As their dist-info folders are called in the embedded image.
WITHOUT = ("loguru-0.7.3", "model_hosting_container_standards-0.1.16", "opentelemetry_semantic_conventions_ai-0.5.1",
           "sentencepiece-0.2.3", "spark_mxfp4-0.1.0", "tokenizers-0.23.3", "vllm-0.32.0+cpu")  # fmt: skip


@pytest.fixture
def packages(tmp_path):
    for name in (*WITHOUT, "other-1.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    with_text = tmp_path / "torch-2.13.0.dist-info/licenses"
    with_text.mkdir(parents=True)
    (with_text / "LICENSE").write_text("theirs")
    return tmp_path


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
    docs, common = tmp_path / "usr/share/doc", tmp_path / "usr/share/common-licenses"
    (docs / "libc6").mkdir(parents=True)
    (docs / "libc6/copyright").write_text("see /usr/share/common-licenses/GPL-2.")
    (docs / "libc-bin").symlink_to("libc6")
    common.mkdir()
    (common / "GPL-2").write_text("the GPL")
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
