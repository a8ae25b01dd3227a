"""A stand-in for nvidia-smi, a key file, and short pauses between questions to a server."""

import sys
import time

import pytest
from programs import write_program

from sparkforge.core import docker, openai
from sparkforge.plan import capabilities
from sparkforge.serve import launch

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
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    head = f"#!{sys.executable}\nFIELDS = {capabilities.FIELDS!r}\n"
    return lambda text: write_program(program, f"{head}TEXT = {text!r}\n{STAND_IN}")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    for module in (openai, docker):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.01)


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that the code wants to sleep; it goes on at once."""
    seconds = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@pytest.fixture
def unchecked_port(monkeypatch):
    """Start a server although its port may be taken."""
    monkeypatch.setattr(launch, "check_free", lambda *_: None)


@pytest.fixture
def key_file(tmp_path):
    """The file `key` with the API key `sesame`, for its owner alone."""
    path = tmp_path / "key"
    path.write_text("sesame\n")
    path.chmod(0o600)
    return path
