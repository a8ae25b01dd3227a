"""The distribution: contents of wheel and sdist, and use without the rest of this repository."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distributions

import pytest

from project import PACKAGE, PROJECT

VERSION = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
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
    source, target = tmp_path_factory.mktemp("source") / "spark_mxfp4", tmp_path_factory.mktemp("dist")
    shutil.copytree(PROJECT, source, ignore=shutil.ignore_patterns(".venv", "__pycache__", "build", "*.egg-info"))
    result = python("-P", "-c", BUILD, target, cwd=source)
    assert result.returncode == 0, result.stderr
    return target


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    shutil.unpack_archive(next(built.glob("*.whl")), target, "zip")
    return target


def test_the_wheel_holds_the_package_and_nothing_else(built, installed):
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    package = {name for name in files if ".dist-info/" not in name}
    suffixes = (".py", ".cu", ".cuh", ".mojo", ".json", ".typed")
    sources = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.suffix in suffixes}
    sources = {name for name in sources if "compiled/" not in name}
    assert package == {f"spark_mxfp4/{name}" for name in sources}
    assert {"kernels/moe.cu", "kernels/layer.cu", "max/kernels/ops.mojo"} <= sources
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)
    assert "py3-none-any" in next(built.glob("*.whl")).name


def test_the_sdist_holds_what_a_build_needs_and_no_tests_or_caches(built, installed):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    egg_info = {name for name in names if ".egg-info/" in name}
    paths = [path for path in (installed / "spark_mxfp4").rglob("*") if path.is_file()]
    package = {f"src/{path.relative_to(installed)}" for path in paths}
    build = {
        "setup.py",
        "setup.cfg",
        "pyproject.toml",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    }
    assert names - egg_info == package | build


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    # tar, because unpack_archive has no `filter` in Python 3.11.2 (Debian 12), and warns without one from 3.12 on.
    subprocess.run([shutil.which("tar"), "-xzf", next(built.glob("*.tar.gz")), "-C", tmp_path], check=True)
    result = python("-P", "-c", BUILD, tmp_path, cwd=next(tmp_path.glob("spark_mxfp4-*")))
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as again, zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        assert set(again.namelist()) == set(wheel.namelist())


def test_it_works_from_a_bare_folder_and_each_module_says_what_to_install(installed, tmp_path):
    program = tmp_path / "example.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers', 'vllm', 'max', 'kernels')))\n"
        "import spark_mxfp4\n"
        "print(spark_mxfp4.__version__, spark_mxfp4.__file__)\n"
        "del sys.modules['torch']\n"
        "for name in ('hf', 'vllm.plugin', 'vllm.versions', 'max.architecture'):\n"
        "    try:\n        __import__(f'spark_mxfp4.{name}')\n"
        "    except ImportError as error:\n        print(type(error).__name__, error.name, error, sep=' | ')\n"
        "try:\n    from spark_mxfp4 import registry; registry.load('owner/name@1')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    result = python("-P", program, cwd=tmp_path)
    first, *modules, hub = result.stdout.splitlines()
    assert first == f"{VERSION} {installed / 'spark_mxfp4' / '__init__.py'}", result.stderr
    refused = [("hf", "transformers"), ("vllm", "vllm"), ("vllm", "vllm"), ("max", "max")]
    for line, (extra, package) in zip(modules, refused, strict=True):
        kind, name, message = line.split(" | ")
        assert name.split(".")[0] == package, line
        assert kind in {"ImportError", "ModuleNotFoundError"}
        assert message.startswith(f"spark_mxfp4.{extra} cannot be used · ")
        assert message.endswith(f"pip install 'spark-mxfp4[{extra}]'")
    assert "the package 'kernels' is missing" in hub


@pytest.mark.parametrize("version", ["5.17.0", "5.190.1"])
def test_another_release_of_transformers_is_refused_by_name(installed, tmp_path, version):
    (tmp_path / "transformers.py").write_text(f"__version__ = {version!r}\n")
    program = tmp_path / "example.py"
    program.write_text(
        f"import sys; sys.path[:0] = [{str(installed)!r}, {str(tmp_path)!r}]\n"
        "try:\n    import spark_mxfp4.hf\nexcept ImportError as error:\n    print(error)\n"
    )
    result = python("-P", program, cwd=tmp_path)
    assert result.stdout == (
        f"spark_mxfp4.hf cannot be used · transformers {version} is installed, and it needs 5.19 · "
        "pip install 'spark-mxfp4[hf]'\n"
    ), result.stderr


def test_only_pyproject_states_the_version(built):
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name.startswith(f"spark_mxfp4-{VERSION}-")
    assert sdist.name == f"spark_mxfp4-{VERSION}.tar.gz"
    assert re.search(r"^## (\d\S*)", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == VERSION
    assert not [path for path in PACKAGE.rglob("*.py") if f'"{VERSION}"' in path.read_text()]


def test_metadata_is_valid_for_an_index_and_vllm_finds_its_entry_point(installed):
    """`twine check` and PyPI require valid metadata and a description of a known content type."""
    from packaging.metadata import Metadata

    [distribution] = distributions(path=[str(installed)])
    metadata = Metadata.from_email(distribution.read_text("METADATA"), validate=True)
    assert (metadata.name, str(metadata.version), metadata.license_expression) == ("spark-mxfp4", VERSION, "Apache-2.0")
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (PROJECT / "README.md").read_text()
    assert set(metadata.provides_extra) == {"hf", "hub", "max", "vllm"}
    for requirement in metadata.requires_dist:
        assert {bound.operator for bound in requirement.specifier} & {">=", "=="}, requirement  # a lower bound
    [point] = distribution.entry_points
    assert (point.group, point.value) == ("vllm.general_plugins", "spark_mxfp4.vllm.plugin:register")
    text = (PACKAGE / "vllm" / "versions.py").read_text()  # importing it needs vLLM
    supported = ast.literal_eval(re.search(r"^SUPPORTED.*= (\(.*\))", text, re.MULTILINE)[1])
    [extra] = [required for required in metadata.requires_dist if required.name == "vllm"]
    assert {bound.version for bound in extra.specifier} == {supported[0], supported[-1]}
    assert all(extra.specifier.contains(f"{release}+sparkforge.1") for release in supported)
    rows = re.findall(r"^\| (\d[\d.]*) \|", (PROJECT / "README.md").read_text(), re.MULTILINE)
    assert tuple(dict.fromkeys(rows)) == supported
