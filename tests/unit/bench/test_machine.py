"""What a result says of its machine."""

from __future__ import annotations

import pytest

from sparkforge.bench import machine


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("echo 'NVIDIA GB10, 580.95.05'", ["NVIDIA GB10, 580.95.05"]),
        ("echo NVIDIA-SMI has failed; exit 9", []),
        ("", []),
    ],
)
def test_gpus_are_named_where_there_are_any(tmp_path, monkeypatch, script, wanted):
    if script:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.facts()["gpus"] == wanted
