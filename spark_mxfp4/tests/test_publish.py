"""The files of the repository for Hugging Face's `kernels`; test_hub_repository.py uses the real loader."""

import ast
import json
import os
import re

import pytest

from spark_mxfp4.kernels import publish


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return publish.write(tmp_path_factory.mktemp("hub") / "spark-mxfp4", 3)


@pytest.mark.parametrize("backend", publish.BACKENDS)
def test_a_build_is_whole_and_imports_nothing_of_the_installed_library(folder, backend):
    build = folder / "build" / f"torch-{backend}"
    modules = list(build.rglob("*.py"))
    assert len(modules) > 3
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("spark_mxfp4")]
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not (node.module or "").startswith("spark_mxfp4"), module
            if isinstance(node, ast.ImportFrom) and node.level:
                package = module.parents[node.level - 1] / (node.module or "").replace(".", "/")
                for alias in node.names:
                    files = package.with_suffix(".py"), (package / alias.name).with_suffix(".py")
                    assert any(map(os.path.isfile, files)), (module, alias.name)
    metadata = json.loads((build / "metadata.json").read_text())
    assert (metadata["name"], metadata["version"], metadata["backend"]) == ("spark-mxfp4", 3, {"type": backend})
    operators = {name for module in modules for name in re.findall(r'custom_op\("(\w+)::', module.read_text())}
    assert operators == ({metadata["id"]} if backend == "cuda" else set())


def test_sources_and_tables_are_copied_with_their_modules(folder):
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", "LICENSE", "build/torch-cuda/kernels/tuned.json"} <= files
    sources = {path.relative_to(publish.PACKAGE) for path in (publish.PACKAGE / "kernels").rglob("*.cu*")}
    assert {f"build/torch-cuda/{source}" for source in sources} <= files
    assert not [name for name in files if name.startswith("build/torch-cpu") and ".cu" in name]
    assert not [name for name in files if "/hf/" in name or "/vllm/" in name]
    assert (folder / "README.md").read_text().startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")


def test_the_same_sources_give_the_same_bytes(folder, tmp_path):
    again = publish.write(tmp_path / "again", 3)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert (again / path.relative_to(folder)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"number": 0}, "the hub counts from 1"),
        ({"name": "Fast_Moe"}, "is no kernel's name on the hub"),
        ({"name": "../x"}, "is no kernel's name on the hub"),
    ],
)
def test_names_and_numbers_that_the_hub_rejects_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        publish.write(tmp_path / "hub", **options)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_a_broken_module_leaves_nothing(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        publish.write(tmp_path / "there")
    (tmp_path / "broken.py").write_text("def (")
    with pytest.raises(SyntaxError):
        publish.write(tmp_path / "hub", 1, tmp_path / "broken.py")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.py", "there"]
