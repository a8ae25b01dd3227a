"""Kernels are found by name, and each kind of wrong name has its own message."""

import sys
from types import SimpleNamespace

import pytest
import torch

from spark_mxfp4 import registry
from spark_mxfp4.experts import ExpertWeights, Projection


def test_the_argument_the_environment_or_torch_chooses(monkeypatch):
    kernel = registry.load()
    assert (kernel.name, kernel.cuda_graphs, kernel.has_own_layout) == ("torch", False, False)
    assert kernel.padded(2880, 33) == (2880, 64)
    monkeypatch.setenv(registry.KERNEL_VARIABLE, "own_kernels:plain")
    assert [registry.load().name, registry.load("torch").name] == ["own_kernels:plain", "torch"]


def test_an_own_kernel_declares_its_alignment_and_a_plain_function_has_the_defaults():
    kernel = registry.load("own_kernels:Padded")
    assert (kernel.name, kernel.padded(2880, 2880)) == ("own_kernels:Padded", (3072, 3072))
    kernel = registry.load("own_kernels:plain")
    weights, x = ExpertWeights(Projection(torch.ones(1)), Projection(torch.ones(1))), torch.ones(1)
    assert kernel.run(x, None, None, None) is x
    assert (kernel.prepare(weights), kernel.restore(weights, 32, 32)) == (weights, weights)
    assert (kernel.cuda_graphs, kernel.has_own_layout, kernel.padded(2880, 33)) == (True, False, (2880, 64))


def test_triton_refuses_weights_on_a_cpu():
    kernel = registry.load("triton")
    assert (kernel.name, kernel.padded(2880, 96)) == ("triton", (2880, 96))
    assert (kernel.cuda_graphs, kernel.has_own_layout) == (True, True)
    weights = ExpertWeights(*(Projection(torch.zeros(1, 64, 16, dtype=torch.uint8)) for _ in range(2)))
    with pytest.raises(NotImplementedError, match="cannot run on cpu · it needs an NVIDIA GPU"):
        kernel.prepare(weights)


def test_a_kernel_names_the_implementation_that_will_run(claim_gpu):
    plain = ExpertWeights(*(Projection(torch.zeros(1, 64, 16, dtype=torch.uint8)) for _ in range(2)))
    laid_out = ExpertWeights(*(p._replace(weight=p.weight.unsqueeze(1)) for p in plain))
    assert registry.load("torch").variant(plain) == "torch"
    assert [registry.load("triton").variant(weights) for weights in (plain, laid_out)] == ["triton", "hopper"]
    claim_gpu(get_device_capability=(12, 1))  # a GB10
    weight = SimpleNamespace(device=torch.device("cuda"), dim=lambda: 4)
    assert registry.load("triton").variant(ExpertWeights(Projection(weight), Projection(weight))) == "layer"


def test_without_triton_the_kernel_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("spark_mxfp4.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("spark_mxfp4.kernels", raising=False)
    with pytest.raises(NotImplementedError, match="install triton"):
        registry.load("triton")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tritn", "there is no kernel 'tritn' · the kernels are 'torch', 'triton'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("own_kernels:missing", "missing"),
        ("own_kernels:number", "it is a int"),
        ("own_kernels:Odd", "hidden_alignment is 48"),
        ("own_kernels:Other", "it is another class · name a subclass of MoeKernel"),
        ("own_kernels:marked", "the attribute 'hidden_alignment' · make it a subclass of"),
        (":f", "cannot be loaded"),
        ("own_kernels:", "cannot be loaded"),
        ("owner/name", "name a version: owner/name@1"),
        ("owner/name@#f", "name a version"),
        ("a/b/c@1", "'a/b/c@1' is no repository"),
        ("owner/@1", "is no repository"),
        ("hub:no_such_package", "cannot be imported · No module named 'no_such_package'"),
        ("hub:json", r"it lacks matmul_ogs \("),
        ("hub:owner/name", "name a version: owner/name@1"),
        ("hub:/no/such/folder", "cannot be loaded"),
    ],
)
def test_wrong_names_are_refused_in_one_line(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        registry.load(name)
    assert "\n" not in str(caught.value)
