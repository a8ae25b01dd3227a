"""A kernel from the template: its own test passes, and fails once it is broken; so does the validator's check."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spark_mxfp4 import conformance, registry, template
from sparkforge.core.errors import UsageError
from sparkforge.core.paths import ROOT, environment
from validate.checks import CHECKS
from validate.checks.finding import Status, evaluate
from validate.facts import numerics, numerics_child
from validate.facts.target import Options, Target

# What somebody who makes it fast may break: a line of the kernel, and what it becomes.
BREAKS = {
    "clamp": ("weights.gate_up, expert))", "weights.gate_up, expert), limit=1e9)"),
    "shares": ("output * topk_weights.flatten()[rows].float().unsqueeze(-1)", "output / top_k"),
    "bias": ("product if bias is None else product + bias[expert].float()", "product"),
}


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel from the template, with a module name of its own: what is imported stays."""
    folder = template.write(f"moe_{tmp_path.name}".lower()[:40], tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def run_its_test(folder):
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", folder]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def break_it(folder, name):
    module = folder / f"{folder.name}.py"
    before, after = BREAKS[name]
    text = module.read_text()
    assert text.count(before) == 1
    module.write_text(text.replace(before, after))


def validated(folder, monkeypatch, tmp_path):
    """What the validator says of the kernel: its own program for a small layer, in this process."""

    def run_child(_program, _target, _subject, _seconds, **request):
        answers = tmp_path / "answers"
        numerics_child.main(json.dumps(request), str(answers))
        entries = map(json.loads, answers.read_text().splitlines())
        return {entry["name"]: entry for entry in entries}, ""

    monkeypatch.setenv("SPARK_MXFP4_KERNEL", template.kernel_name(folder.name))
    monkeypatch.setattr(numerics, "run_child", run_child)
    facts = numerics.gather(Target(Options(serve_args=("--quantization", "spark-mxfp4")), "spark"))
    assert facts["numerics.kernel"].value == f"spark_mxfp4 {template.kernel_name(folder.name)}"
    return evaluate(CHECKS["numerics"], facts, required=True).status


def test_what_is_written_passes_its_own_test_and_may_serve(kernel, monkeypatch, tmp_path):
    assert sorted(path.name for path in kernel.iterdir()) == [
        f"benchmark_{kernel.name}.py", f"{kernel.name}.py", f"test_{kernel.name}.py",
    ]  # fmt: skip
    assert not [path for path in kernel.iterdir() if template.STAND_IN in path.read_text()]
    result = run_its_test(kernel)
    assert f"{len(conformance.CASES)} passed" in result.stdout, result.stdout
    assert validated(kernel, monkeypatch, tmp_path) is Status.PASS
    assert registry.load(template.kernel_name(kernel.name)).has_own_layout


def test_a_broken_one_fails_its_own_test(kernel):
    break_it(kernel, "bias")
    result = run_its_test(kernel)
    assert result.returncode == 1
    assert "it differs by" in result.stdout


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_one_is_refused_by_both_checks(kernel, monkeypatch, tmp_path, name):
    break_it(kernel, name)
    with pytest.raises(ValueError, match="must not serve"):
        conformance.check(registry.load(template.kernel_name(kernel.name)))
    assert validated(kernel, monkeypatch, tmp_path) is Status.FAIL


def test_the_benchmark_runs(kernel):
    command = [sys.executable, "-P", kernel / f"benchmark_{kernel.name}.py", "--tokens", "1", "--repeats", "1"]
    command += ["--hidden", "64", "--intermediate", "64", "--device", "cpu"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{kernel}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=kernel, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    header, row = result.stdout.splitlines()
    assert header.split() == ["tokens", kernel.name, "ms", "torch", "ms", "ratio"]
    assert float(row.split()[1]) > 0


@pytest.mark.parametrize("name", ["Fast", "a-b", "../x", "", "class", "torch", "json", "spark_mxfp4", "x" * 99])
def test_a_name_that_python_could_not_import_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r" · .* · "):
        template.write(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    written = template.write("fast_moe", tmp_path)
    (written / "fast_moe.py").write_text("mine")
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        template.write("fast_moe", tmp_path)
    assert (written / "fast_moe.py").read_text() == "mine"


def test_the_command_writes_into_the_callers_folder_and_errors_have_three_parts(tmp_path, monkeypatch, capsys):
    from sparkforge.cli import kernel as commands

    monkeypatch.setenv("INV_CWD", str(tmp_path))
    commands.new.body(None, "fast_moe")
    assert (tmp_path / "fast_moe" / "test_fast_moe.py").is_file()
    assert "up --device embedded --quantization spark-mxfp4" in capsys.readouterr().err
    unwrapped = commands.new.body.__wrapped__
    with pytest.raises(UsageError, match="is there") as caught:
        unwrapped(None, "fast_moe")
    assert caught.value.fix


def test_what_the_command_prints_runs_from_any_folder(tmp_path, monkeypatch, capsys):
    from sparkforge.cli import kernel as commands

    parent = tmp_path / "with a space"
    monkeypatch.setenv("INV_CWD", str(parent))
    commands.new.body(None, "fast_moe")
    printed = capsys.readouterr().err
    python = str(environment("embedded") / "bin" / "python")
    assert f"made by the first {ROOT / 'inv'} up --device embedded" in printed
    lines = [shlex.split(line, comments=True) for line in printed.splitlines() if line.startswith("  ")]
    assert len(lines) == 3
    for arguments in lines:
        paths = [argument.removeprefix("PYTHONPATH=") for argument in arguments]
        assert all(path == python or Path(path).exists() for path in paths if "/" in path)
        assert all(Path(path).is_absolute() for path in paths if "/" in path)
    path, interpreter, *program = lines[0]
    assert interpreter == python
    command = ["env", f"{path}:{ROOT}", "OMP_NUM_THREADS=1", sys.executable, "-P", *program, "--device", "cpu"]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert result.stdout.endswith("it may serve\n"), result.stderr
