"""spark-mxfp4 as somebody else gets it: its wheel alone, installed by pip into an environment that is not ours.

The environment has the test environment's packages by links, without our own distributions, so that what is found is
the wheel's.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from spark_mxfp4 import template
from spark_mxfp4.kernels import publish
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.integration
OURS = re.compile(r"(__editable__.*)?_*(sparkforge|spark_mxfp4|validate)\b")
PROGRAM = """
import json, sys
from importlib.metadata import distribution, entry_points
points = [point.value for point in entry_points(group="vllm.general_plugins") if point.name == "spark_mxfp4"]
if "vllm" not in sys.argv:
    print(json.dumps([points]))
    raise SystemExit
{example}
import spark_mxfp4
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from spark_mxfp4 import registry
found = distribution("spark-mxfp4")
checkpoint = type("C", (), {{"model_type": "gpt_oss"}})
print(json.dumps([
    points, spark_mxfp4.__file__, spark_mxfp4.__version__ == found.version, str(config),
    QUANTIZATION_METHODS.count("spark-mxfp4"), registry.load("torch").name,
    config.override_quantization_method({{"quant_method": "mxfp4"}}, "spark-mxfp4", checkpoint),
]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built by uv from a copy of the sources."""
    source, target = tmp_path_factory.mktemp("source") / "spark_mxfp4", tmp_path_factory.mktemp("dist")
    shutil.copytree(
        ROOT / "spark_mxfp4", source, ignore=shutil.ignore_patterns(".venv", "__pycache__", "build", "*.egg-info")
    )
    command = [sys.executable, "-m", "uv", "build", "--offline", "--no-build-isolation", "--python", sys.executable]
    result = subprocess.run([*command, "--out-dir", target, source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(list(target.glob("*.tar.gz"))) == 1
    [built] = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """The interpreter of a new environment with links to every package of this one but ours."""
    folder = tmp_path_factory.mktemp("foreign")
    links = folder / "packages"
    links.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not OURS.match(entry.name):
            (links / entry.name).symlink_to(entry)
    command = [sys.executable, "-m", "uv", "venv", "--offline", "--quiet", "--python", sys.executable, folder / "venv"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    [site] = (folder / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{links}\n")
    return folder / "venv" / "bin" / "python"


def ask(python, *arguments):
    readme = (ROOT / "spark_mxfp4" / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(from vllm\.model_executor.*?)```", readme, re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_PLUGINS"))}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [python, "-P", "-c", PROGRAM.format(example=example), *arguments],
            cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def installed(wheel, foreign):
    """The same interpreter, after pip has installed the wheel and nothing else."""
    assert ask(foreign) == [[]]  # nothing of ours is there before
    install = [foreign, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir", wheel]
    result = subprocess.run(install, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return foreign


@pytest.mark.nightly  # spark_mxfp4/tests/test_package.py has the wheel; every server of ours has the plugin
def test_vllm_finds_the_plugin_after_pip_install_of_the_wheel(installed):
    points, file, same_version, config, registered, kernel, claimed = ask(installed, "vllm")
    assert points == ["spark_mxfp4.vllm.plugin:register"]
    assert Path(file).is_relative_to(installed.parent.parent)
    assert same_version
    assert config == "<class 'spark_mxfp4.vllm.plugin.SparkMxfp4Config'>"
    assert (registered, kernel, claimed) == (1, "torch", "spark-mxfp4")


def test_its_programs_write_what_they_write_in_a_checkout(installed, tmp_path):
    """The template and the hub's repository come out of the wheel, byte for byte as out of the sources."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for program, arguments in (
        ("template", ("fast_moe", "--folder", tmp_path)),
        ("kernels.publish", (tmp_path / "hub",)),
    ):
        command = [installed, "-P", "-m", f"spark_mxfp4.{program}", *arguments]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    (tmp_path / "checkout").mkdir()
    written = [template.write("fast_moe", tmp_path / "checkout"), publish.write(tmp_path / "checkout" / "hub")]
    for folder in written:
        for file in (path for path in folder.rglob("*") if path.is_file()):
            assert (tmp_path / file.relative_to(tmp_path / "checkout")).read_bytes() == file.read_bytes(), file
