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
