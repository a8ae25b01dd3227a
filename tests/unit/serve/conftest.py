"""A stand-in for nvidia-smi."""

import sys

import pytest

from sparkforge.plan import capabilities

STAND_IN = """
import sys
rows = [dict(zip(FIELDS, line.split(", "))) for line in TEXT.splitlines()]
options = dict(word.split("=", 1) for word in sys.argv[1:])
if number := options.get("--id"):
    if not number.isdecimal() or int(number) >= len(rows):
        sys.exit("No devices were found")
    rows = [rows[int(number)]]
for row in rows:
    print(*(row.get(field, "[N/A]") for field in options["--query-gpu"].split(",")), sep=", ")
"""


@pytest.fixture
def fake_nvidia_smi(tmp_path, monkeypatch):
    """Return a function that sets nvidia-smi's GPUs, a line each; `--id` selects one by its index."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def prints(text):
        program.write_text(f"#!{sys.executable}\nFIELDS, TEXT = {capabilities.FIELDS!r}, {text!r}\n{STAND_IN}")
        program.chmod(0o755)

    return prints
