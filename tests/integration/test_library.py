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
    shutil.copytree(ROOT / "spark_mxfp4", source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    command = [sys.executable, "-m", "uv", "build", "--offline", "--no-build-isolation", "--python", sys.executable]
    done = subprocess.run([*command, "--out-dir", target, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [site] = (folder / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{links}\n")
    return folder / "venv" / "bin" / "python"


def ask(python, *arguments):
    readme = (ROOT / "spark_mxfp4" / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(from vllm\.model_executor.*?)```", readme, re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_PLUGINS"))}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, "-P", "-c", PROGRAM.format(example=example), *arguments],
            cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_finds_the_plugin_after_pip_install_of_the_wheel(wheel, foreign):
    assert ask(foreign) == [[]]  # nothing of ours is there before
    install = [foreign, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir", wheel]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    points, file, same_version, config, registered, kernel, claimed = ask(foreign, "vllm")
    assert points == ["spark_mxfp4.vllm.plugin:register"]
    assert Path(file).is_relative_to(foreign.parent.parent)
    assert same_version
    assert config == "<class 'spark_mxfp4.vllm.plugin.SparkMxfp4Config'>"
    assert (registered, kernel, claimed) == (1, "torch", "spark-mxfp4")
