"""`.venv/bin/python -m lab.load_format` on a small checkpoint: real readers where torch is installed."""

import json
import sys

import pytest

from lab import load_format
from sparkforge.core.errors import BenchmarkError, UsageError
from sparkforge.core.program import exit_code


def test_the_stock_reader_is_measured_cold_and_warm(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(load_format, "ROUNDS", 1)
    output = tmp_path / "figures.json"
    load_format.main(str(output), sys.executable, 9)
    result = json.loads(output.read_text())
    assert result["checkpoint"]["files"] == 4
    assert 8_000_000 <= result["checkpoint"]["bytes"] <= 9_000_000
    assert [(row["format"], row["cache"]) for row in result["rows"]][:2] == [
        ("safetensors", "cold"), ("safetensors", "warm"),
    ]  # fmt: skip
    assert all(row["median_seconds"] > 0 and row["gb_per_second"] > 0 for row in result["rows"])
    assert result["machine"]["memory_bytes"] > 0
    assert "torch" in result["versions"]
    assert not list((load_format.paths.state()).glob("load-format-*"))  # the checkpoint is gone


def test_formats_that_load_other_bytes_are_no_result(tmp_path, monkeypatch):
    def child(_interpreter, operation, *arguments):
        if operation == "load":
            return {"cold": {"seconds": 1.0, "bytes": 8, "tensors": 1, "sha256": arguments[1], "peak_rss_bytes": 1}}
        return {"device": "cpu", "formats": ["safetensors", "fastsafetensors"], "versions": {}}

    monkeypatch.setattr(load_format, "_child", child)
    with pytest.raises(BenchmarkError, match="different bytes"):
        load_format.main(str(tmp_path / "x.json"), sys.executable, 8)
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("size", [0, 7, -1, 100_001])
def test_a_wrong_size_is_refused(tmp_path, capsys, size):
    assert exit_code(lambda: load_format.main(str(tmp_path / "x.json"), megabytes=size)) == UsageError.exit_code
    assert str(size) in capsys.readouterr().err
