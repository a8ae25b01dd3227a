"""Kernels through the real package `kernels`: a local folder in the layout of its builder."""

import json
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
    return publish.write(tmp_path_factory.mktemp("hub") / "spark-mxfp4")


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
