"""A kernel from the template passes its own test, and a broken kernel fails it."""

import shlex
import subprocess
import sys

import pytest

from spark_mxfp4 import conformance, registry, template


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    folder = template.write(f"moe_{tmp_path.name}".lower()[:40], tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def run_its_test(folder):
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", folder]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_new_kernel_passes_its_own_test_and_may_serve(kernel):
    names = sorted(path.name for path in kernel.iterdir())
    assert names == [f"{prefix}{kernel.name}.py" for prefix in ("benchmark_", "", "test_")]
    assert not [path for path in kernel.iterdir() if template.STAND_IN in path.read_text()]
    result = run_its_test(kernel)
    assert f"{len(conformance.CASES)} passed" in result.stdout, result.stdout
    assert registry.load(template.kernel_name(kernel.name)).has_own_layout


def test_a_broken_kernel_fails_its_own_test(kernel):
    module = kernel / f"{kernel.name}.py"
    biased = "product if bias is None else product + bias[expert].float()"
    module.write_text(module.read_text().replace(biased, "product"))
    result = run_its_test(kernel)
    assert result.returncode == 1
    assert "it differs by" in result.stdout


def test_the_benchmark_runs(kernel):
    command = [sys.executable, "-P", kernel / f"benchmark_{kernel.name}.py", "--tokens", "1", "--repeats", "1"]
    command += ["--hidden", "64", "--intermediate", "64", "--device", "cpu"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(kernel), "OMP_NUM_THREADS": "1"}
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


def test_printed_commands_run_from_any_folder_and_nothing_is_overwritten(tmp_path):
    parent = tmp_path / "with a space"
    parent.mkdir()
    program = [sys.executable, "-P", "-m", "spark_mxfp4.template", "fast_moe"]
    result = subprocess.run(program, cwd=parent, capture_output=True, text=True, check=False)
    assert (parent / "fast_moe" / "test_fast_moe.py").is_file(), result.stderr
    enter, check, *_ = result.stdout.splitlines()
    command = f"{enter} && {check.partition('#')[0].replace('python', shlex.quote(sys.executable), 1)} --device cpu"
    run = subprocess.run(command, shell=True, cwd="/", capture_output=True, text=True, check=False)  # noqa: S602
    assert run.stdout.endswith("it may serve\n"), run.stderr
    (parent / "fast_moe" / "fast_moe.py").write_text("mine")
    again = subprocess.run(program, cwd=parent, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr.count(" · ")) == (1, 2), again.stderr
    assert "nothing is overwritten" in again.stderr
    assert (parent / "fast_moe" / "fast_moe.py").read_text() == "mine"
