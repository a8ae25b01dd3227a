"""The command as a user or a container runs it: exit codes, the log, the JSON report, and its imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge.core.paths import ROOT
from validate import gate
from validate.__main__ import main
from validate.checks import CHECKS
from validate.checks.finding import Check
from validate.facts.fact import load_sheet
from validate.profiles import PROFILES

GB10 = str(ROOT / "tests/unit/validate/sheets/gb10-from-public-documents.json")


def command(environment, *arguments, flags=(), **more):
    return subprocess.run(
        [sys.executable, *flags, "-m", "validate", *arguments], env=environment(**more), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture
def ask(environment, monkeypatch, capsys):
    """Return a function that runs the command in this process with the same variables."""

    def ask(*arguments):
        monkeypatch.setattr(os, "environ", environment())
        code = main(list(arguments))
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, printed.out, printed.err)

    return ask


def test_rehearsal_of_the_good_sheet_serves_and_its_report_can_be_rehearsed_again(environment, tmp_path):
    out = tmp_path / "deep" / "r.json"
    result = command(environment, "--profile", "spark", "--facts", GB10, "--json", str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "never recorded on a real DGX Spark" in result.stdout.splitlines()[0]
    last = result.stdout.splitlines()[-1]
    assert last.startswith("serve: the server may start · 33 passed, 0 warned, 0 failed, 0 skipped")
    assert result.stderr == ""
    document = json.loads(out.read_text())
    assert (document["schema"], document["verdict"], document["exit_code"]) == (1, "serve", 0)
    assert set(document["findings"][0]) == {"check", "status", "required", "evidence", "fix", "doc"}
    assert load_sheet(out) == load_sheet(Path(GB10))


@pytest.mark.slow
def test_real_validator_on_this_machine(environment, tmp_path):
    out = tmp_path / "r.json"
    result = command(environment, "--profile", "embedded", "--json", str(out), "--model", str(tmp_path), "--port", "0",
                     flags=("-O",))  # fmt: skip
    document = json.loads(out.read_text())
    assert (result.returncode, result.stderr) == (30, "")
    statuses = {finding["check"]: finding["status"] for finding in document["findings"]}
    assert set(statuses) == {*PROFILES["embedded"].required, *PROFILES["embedded"].advised}
    assert (statuses["model-files"], statuses["python-optimize"], statuses["port-free"]) == ("fail", "fail", "pass")
    assert document["facts"]["memory.total_bytes"]["value"] > 0
    assert all(entry["source"] for entry in document["facts"].values())


def test_spark_profile_without_gpu_refuses_says_why_and_imports_neither_torch_nor_vllm(environment, tmp_path):
    for name in ("torch", "vllm", "transformers", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    path = f"{tmp_path}:{ROOT}"
    variables = {"PYTHONPATH": path, "PATH": "/nonexistent"}
    result = command(environment, "--profile", "spark", "--no-deep", flags=("-X", "importtime"), **variables)
    assert result.returncode == 30
    assert "cannot run nvidia-smi" in result.stdout
    assert "next: nvidia-smi" in result.stdout
    assert "read: docs/reference/checks.md#gpu-name" in result.stdout
    modules = {line.split("|")[-1].strip() for line in result.stderr.splitlines() if "|" in line}
    ours = {".".join(name.split(".")[:2]) for name in modules if name.startswith("sparkforge.")}
    assert ours == {"sparkforge.core", "sparkforge.pins", "sparkforge.plan"}  # pyproject.toml has the contract
    imported = {name.split(".")[0] for name in modules}
    assert "validate" in imported
    assert not imported & {"torch", "vllm", "transformers", "numpy", "spark_mxfp4"}
    assert not imported & {"httpx", "tenacity", "pypi_simple"}  # used only by our own tools, not where a server runs


def test_wrong_arguments_are_one_named_error(ask):
    for arguments, code, said in (
        (("--profile", "spark", "--facts", "missing.json"), 10, "cannot read the fact sheet"),
        (("--profile", "x"), 2, "no profile"), (("--profile", "spark", "--frobnicate"), 2, "the arguments cannot be"),
        (("--profile", "spark", "--facts", GB10, "--json", "/proc/nowhere/r.json"), 2, "cannot write the report"),
    ):  # fmt: skip
        result = ask(*arguments)
        assert result.returncode == code
        assert said in result.stderr
        assert "next:" in result.stderr
        assert "Traceback" not in result.stderr


def test_without_a_model_the_validation_fails(good, with_values):
    facts = with_values(good("embedded"), dict.fromkeys(("model.path", "model.model_type")))
    report = gate.rehearse("embedded", facts, "a test")
    assert report.verdict is gate.ValidationVerdict.INCOMPLETE
    out = "\n".join(gate.lines(report))
    assert "skip model-files" in out
    assert "next: ./inv validate" in out


def test_a_bug_in_a_check_refuses_without_a_traceback(good, monkeypatch):
    def bug(_view):
        raise RecursionError("deep")

    monkeypatch.setitem(CHECKS, "port-free", Check("port-free", "m", (), bug, "f"))
    report = gate.rehearse("embedded", good("embedded"), "a test")
    assert report.verdict is gate.ValidationVerdict.REFUSE
    assert "internal error in this check" in "\n".join(gate.lines(report))


def test_a_recorded_text_cannot_forge_a_line(tmp_path, capsys):
    sheet = json.loads(Path(GB10).read_text())
    sheet["facts"]["gpu.name"]["value"] = "X\nserve: the server may start\x1b[2J"
    sheet["origin"] = "a\nok   gpu-name"
    (tmp_path / "s.json").write_text(json.dumps(sheet))
    assert main(["--profile", "spark", "--facts", str(tmp_path / "s.json")]) == 30
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert not any(line.startswith(("serve:", "ok   gpu-name")) for line in printed.splitlines())


def test_another_stack_than_the_profiles_has_other_pins(ask, tmp_path):
    out = tmp_path / "r.json"
    result = ask("--profile", "embedded", "--stack", "ngc-25.12", "--no-deep", "--json", str(out))
    assert result.returncode == 30
    facts = json.loads(out.read_text())["facts"]
    assert facts["pins.vllm"]["value"] == "0.13.0"
    result = ask("--profile", "embedded", "--stack", "none", "--no-deep", "--json", str(out))
    assert result.returncode == 30
    assert "none" in json.loads(out.read_text())["facts"]["patches.expected"]["error"]
