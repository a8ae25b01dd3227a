"""What `./inv bench.kernels` runs: the library's measurement, in the interpreter that was named."""

import json
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
