"""Kernels through the real package `kernels`: a folder on this machine, as its builder lays one out."""

import json
import os

import pytest
import torch

from spark_mxfp4 import registry
from spark_mxfp4.experts import ExpertWeights, Projection, moe

pytestmark = pytest.mark.integration
MODULE = """
from spark_mxfp4.experts import moe
from spark_mxfp4.kernel import MoeKernel

class Fast(MoeKernel):
    hidden_alignment = 128

    def run(self, x, weights, topk_ids, topk_weights, expert_map=None):
        return moe(x, weights, topk_ids, topk_weights, expert_map)
"""


@pytest.fixture(autouse=True)
def package():
    try:
        import kernels
    except ImportError:
        told = "the package 'kernels' is not installed: ./inv test brings it"
        if os.environ.get("CI"):
            pytest.fail(told)
        pytest.skip(told)
    return kernels


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
def test_a_folder_that_holds_no_kernel_for_this_machine_is_told_in_one_line(folder, change, message):
    change(folder / "build" / "torch-cpu")
    with pytest.raises(ValueError, match=message) as caught:
        registry.load(f"{folder}#Fast")
    assert "\n" not in str(caught.value)


def test_a_hub_repository_that_is_not_in_the_cache_is_told_offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"kernel 'kernels-community/no-such@1' cannot be loaded"):
        registry.load("kernels-community/no-such@1")
