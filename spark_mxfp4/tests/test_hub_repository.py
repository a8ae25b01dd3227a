"""Kernels through the real package `kernels`: a local folder in the layout of its builder, and our own repository."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from project import PROJECT
from spark_mxfp4 import conformance, registry
from spark_mxfp4.experts import ExpertWeights, Projection, moe
from spark_mxfp4.kernels import publish

MODULE = """
from spark_mxfp4.experts import moe
from spark_mxfp4.kernel import MoeKernel

class Fast(MoeKernel):
    hidden_alignment = 128

    def run(self, x, weights, topk_ids, topk_weights, expert_map=None):
        return moe(x, weights, topk_ids, topk_weights, expert_map)
"""


@pytest.fixture
def folder(tmp_path):
    variant = tmp_path / "my-moe" / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(MODULE)
    about = {
        "id": "_my_moe_cpu_1", "name": "my-moe", "version": 1, "license": "Apache-2.0", "backend": {"type": "cpu"},
        "python-depends": [],
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(about))
    return tmp_path / "my-moe"


def test_a_folders_class_is_a_kernel(folder):
    kernel = registry.load(f"{folder}#Fast")
    assert (kernel.hidden_alignment, kernel.intermediate_alignment) == (128, 32)
    torch.manual_seed(1)
    weights = ExpertWeights(Projection(torch.randn(2, 64, 64)), Projection(torch.randn(2, 64, 32)))
    arguments = torch.randn(3, 64), weights, torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    assert torch.equal(kernel.run(*arguments), moe(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda build: build.rename(build.with_name("torch-cuda")), "Cannot find a build variant"),
        (lambda build: (build / "metadata.json").write_text("{"), "metadata"),
        (lambda build: (build / "__init__.py").write_text("import no_such_module"), "No module named 'no_such_module'"),
        (lambda build: (build / "__init__.py").write_text("other = 1"), "has no attribute 'Fast'"),
    ],
)
def test_a_folder_without_a_usable_kernel_gives_a_one_line_error(folder, change, message):
    change(folder / "build" / "torch-cpu")
    with pytest.raises(ValueError, match=message) as caught:
        registry.load(f"{folder}#Fast")
    assert "\n" not in str(caught.value)


def test_an_uncached_repository_gives_an_error_offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"kernel 'kernels-community/no-such@1' cannot be loaded"):
        registry.load("kernels-community/no-such@1")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Our own kernels as a repository."""
    return publish.write(tmp_path_factory.mktemp("hub") / "spark-mxfp4", 3)


WITHOUT_THE_LIBRARY = """
import json, sys
sys.modules["spark_mxfp4"] = None
from pathlib import Path
import kernels, torch
from kernels import get_loaded_kernels
{example}
cuda = kernels.get_local_kernel(Path("DIR/build/torch-cuda"))  # loaded by its folder, because this torch has no CUDA
experts, hidden, intermediate = 4, 64, 32
def packed(rows, columns):
    blocks, scales = moe.quantize(torch.randn(experts, rows, columns))
    return moe.Projection(blocks.flatten(-2), scales)
weights = kernel.prepare(moe.ExpertWeights(packed(2 * intermediate, hidden), packed(hidden, intermediate)))
x, ids, shares = torch.randn(5, hidden), torch.randint(0, experts, (5, 2)), torch.rand(5, 2)
try:
    cuda.Kernel("mxfp4").prepare(weights)
except NotImplementedError as error:
    print(error)
print(json.dumps([
    list(kernel.run(x, weights, ids, shares).shape),
    sorted(str(loaded.metadata.id) for loaded in get_loaded_kernels()),
    sorted(name for name in sys.modules if name.partition(".")[0] == "spark_mxfp4"),
    sorted(name for name in torch._C._dispatch_get_all_op_names() if "mxfp4" in name),
]))
"""


def test_our_repository_loads_and_runs_where_the_library_is_not_installed(published):
    """Run the README's example with the real loader. The CUDA build is imported, and its error names this device."""
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(from pathlib import Path\nfrom kernels import .*?)```", readme, re.DOTALL)
    program = WITHOUT_THE_LIBRARY.format(example=example).replace('"DIR', f'"{published}')
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    refused, answer = result.stdout.splitlines()
    assert refused == "kernel 'triton' cannot run on cpu · it needs an NVIDIA GPU · set SPARK_MXFP4_KERNEL=torch"
    shape, loaded, ours, operators = json.loads(answer)
    assert shape == [5, 64]
    names = {path.parent.name: json.loads(path.read_text())["id"] for path in published.glob("build/*/metadata.json")}
    assert loaded == sorted(names.values())
    assert ours == ["spark_mxfp4"]  # the None that hides the library
    assert operators == [f"{names['torch-cuda']}::linear"]  # the copy's own namespace, so that two versions can coexist


def test_our_repository_is_a_kernel_by_its_folder(published):
    conformance.check(registry.load(f"{published}#Kernel"), cases=conformance.CASES[:2])
    conformance.check(registry.load(str(published)), cases=conformance.CASES[:2])


def test_a_module_from_the_template_can_be_published(tmp_path):
    from spark_mxfp4 import template

    module = template.write("fast_moe", tmp_path) / "fast_moe.py"
    folder = publish.write(tmp_path / "hub", 1, module, "fast-moe")
    builds = {path.name: json.loads((path / "metadata.json").read_text())["id"] for path in folder.glob("build/*")}
    assert all(builds[f"torch-{backend}"].startswith(f"_fast_moe_{backend}_") for backend in publish.BACKENDS)
    conformance.check(registry.load(f"{folder}#FastMoe"), cases=conformance.CASES[:2])


# The files of our repository.


@pytest.mark.parametrize("backend", publish.BACKENDS)
def test_a_build_is_whole_and_imports_nothing_of_the_installed_library(published, backend):
    build = published / "build" / f"torch-{backend}"
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


def test_sources_and_tables_are_copied_with_their_modules(published):
    files = {str(path.relative_to(published)) for path in published.rglob("*") if path.is_file()}
    assert {"README.md", "LICENSE", "build/torch-cuda/kernels/tuned.json"} <= files
    sources = {path.relative_to(publish.PACKAGE) for path in (publish.PACKAGE / "kernels").rglob("*.cu*")}
    assert {f"build/torch-cuda/{source}" for source in sources} <= files
    assert not [name for name in files if name.startswith("build/torch-cpu") and ".cu" in name]
    assert not [name for name in files if "/hf/" in name or "/vllm/" in name]
    assert (published / "README.md").read_text().startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")


def test_the_same_sources_give_the_same_bytes(published, tmp_path):
    again = publish.write(tmp_path / "again", 3)
    for path in (path for path in published.rglob("*") if path.is_file()):
        assert (again / path.relative_to(published)).read_bytes() == path.read_bytes()


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
