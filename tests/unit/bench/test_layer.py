"""What `./inv bench.kernels` runs: the library's measurement, in the interpreter that was named."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkforge.bench.kernels import layer
from sparkforge.cli import program
from sparkforge.core.errors import ProcessError


@pytest.fixture
def commands(monkeypatch):
    """The commands that would have run; the measurement leaves figures."""
    seen = []

    def run(command, **_):
        seen.append([str(part) for part in command])
        if "--output" in seen[-1]:
            Path(seen[-1][seen[-1].index("--output") + 1]).write_text(json.dumps({"models": {}}))
        return SimpleNamespace(returncode=0, stdout="lines\n", stderr="")

    monkeypatch.setattr(layer, "run", run)
    monkeypatch.setattr(layer, "facts", lambda: {"cores": 1})
    return seen


def test_the_flags_reach_the_measurement(commands, tmp_path):
    line = ["bench.kernels", "--python", "/bin/true", "--peer", str(tmp_path), "--peer-cutlass", "--tokens", "1,8"]
    assert program.main([*line, "--output", str(tmp_path / "k.json")]) == 0
    assert commands[0] == ["/bin/true", "-c", "import torch, triton"]
    measured = commands[1]
    assert measured[:3] == ["/bin/true", "-m", "spark_mxfp4.kernels.measure"]
    assert measured[5:] == ["--peer", str(tmp_path), "--tokens", "1,8", "--peer-cutlass"]
    assert json.loads((tmp_path / "k.json").read_text()) == {"machine": {"cores": 1}, "models": {}}


def test_without_the_flag_flashinfer_is_not_asked_for(commands, tmp_path):
    assert program.main(["bench.kernels", "--output", str(tmp_path / "k.json")]) == 0
    assert "--peer-cutlass" not in commands[1]


def test_an_interpreter_without_torch_is_refused(monkeypatch, tmp_path):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="ModuleNotFoundError: No module named 'torch'\n")
    monkeypatch.setattr(layer, "run", lambda *_, **__: failed)
    with pytest.raises(ProcessError, match="cannot measure kernels"):
        layer.main(str(tmp_path / "k.json"), "python", "")


@pytest.mark.parametrize("name", ["kernels", "linear", "shards"])
def test_tokens_that_are_no_numbers_are_refused_before_anything_runs(commands, capsys, tmp_path, name):
    assert program.main([f"bench.{name}", "--tokens", "1,x", "--output", str(tmp_path / "f.json")]) != 0
    assert "--tokens 'x' is no number" in capsys.readouterr().err
    assert commands == []


def test_a_refusal_of_two_gpus_says_what_machine_is_needed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(layer, "facts", dict)
    code = "import sys; sys.exit('torch sees 1 NVIDIA GPUs' if '-m' in sys.argv else 0)"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    python.chmod(0o755)
    assert program.main(["bench.shards", "--python", str(python), "--output", str(tmp_path / "s.json")]) != 0
    printed = capsys.readouterr().err
    assert "torch sees 1 NVIDIA GPUs" in printed
    assert "a machine with two NVIDIA GPUs" in printed
    assert not (tmp_path / "s.json").exists()
