"""The distribution: what its wheel holds, and that it works where nothing else of this repository is."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions

import pytest

from sparkforge.core.paths import ROOT

PACKAGE = ROOT / "spark_mxfp4"
# setuptools changes sys.argv while it builds.
BUILD = (
    "import sys; from setuptools import build_meta; target = sys.argv[1]; "
    "build_meta.build_wheel(target); build_meta.build_sdist(target)"
)


def python(*arguments, cwd):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the sdist, built from a copy, because setuptools writes beside its sources."""
    source, target = tmp_path_factory.mktemp("source") / "spark_mxfp4", tmp_path_factory.mktemp("dist")
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    done = python("-P", "-c", BUILD, target, cwd=source)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(target)
    return target


def test_the_wheel_holds_the_package_and_nothing_else(installed):
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    package = {name for name in files if ".dist-info/" not in name}
    suffixes = (".py", ".cu", ".cuh", ".mojo", ".json", ".typed")
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in suffixes and "build" not in path.parts]
    assert package == {f"spark_mxfp4/{path.relative_to(PACKAGE)}" for path in sources}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    shutil.unpack_archive(next(built.glob("*.tar.gz")), tmp_path, filter="data")
    done = python("-P", "-c", BUILD, tmp_path, cwd=next(tmp_path.glob("spark_mxfp4-*")))
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as again, zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        assert set(again.namelist()) == set(wheel.namelist())


def test_it_works_from_a_bare_folder_and_without_transformers_says_what_to_install(installed, tmp_path):
    example = re.search(r"## torch\n\n```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)[1]
    program = tmp_path / "example.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(installed)!r})\n{example}\n"
        "import spark_mxfp4\n"
        "print(tuple(y.shape), spark_mxfp4.__file__, [n for n in sys.modules if n.split('.')[0] == 'sparkforge'])\n"
        "sys.modules['transformers'] = None\n"
        "try:\n    from spark_mxfp4 import hf\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = python("-P", program, cwd=tmp_path)
    assert done.stdout.split(" ", 2)[:2] == ["(5,", "64)"], done.stderr
    assert str(installed) in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].endswith("[]")
    assert "spark_mxfp4.hf cannot be used" in done.stdout, done.stderr
    assert lines[-1].endswith("pip install 'spark-mxfp4[hf]'")


def test_vllm_and_pip_find_its_entry_point_and_version(installed, tmp_path):
    program = (
        "from importlib.metadata import distributions\n"
        f"[found] = distributions(path=[{str(installed)!r}])\n"
        "print(found.metadata['Name'], found.version, *(f'{e.group}:{e.value}' for e in found.entry_points))\n"
    )
    done = python("-P", "-c", program, cwd=tmp_path)
    name, version, point = done.stdout.split()
    assert (name, point) == ("spark-mxfp4", "vllm.general_plugins:spark_mxfp4.vllm.plugin:register")
    assert f'version = "{version}"' in (PACKAGE / "pyproject.toml").read_text()


def test_the_extra_and_the_readme_name_the_releases_that_the_plugin_supports(installed):
    from packaging.requirements import Requirement

    from spark_mxfp4.vllm.versions import SUPPORTED

    [distribution] = distributions(path=[str(installed)])
    [extra] = [required for required in map(Requirement, distribution.requires) if required.name == "vllm"]
    assert {bound.version for bound in extra.specifier} == {SUPPORTED[0], SUPPORTED[-1]}
    assert all(extra.specifier.contains(f"{release}+sparkforge.1") for release in SUPPORTED)
    rows = re.findall(r"^\| (\d[\d.]*) \|", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    assert tuple(dict.fromkeys(rows)) == SUPPORTED
