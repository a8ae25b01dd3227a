"""Kernels hubs with the interface of triton_kernels: the hub quantises, lays out and runs; incomplete hubs are refused.

The hub is our stand-in in torch.
"""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

from spark_mxfp4 import conformance, hf, registry
from spark_mxfp4.experts import ExpertWeights, Projection, moe
from spark_mxfp4.hf.experts import PackedExperts
from spark_mxfp4.kernels.check import error, random_routing, random_weights

STAND_IN = Path(__file__).with_name("stand_in_hub")
NAMES = ("gate_up_proj", "down_proj")


@pytest.fixture
def make_hub(tmp_path, monkeypatch):
    """Return a function that copies the stand-in to a package of that name and returns its folder."""
    names = []

    def make(name, changes=None):
        folder = tmp_path / f"around_{name}" / name
        shutil.copytree(STAND_IN, folder, ignore=shutil.ignore_patterns("__pycache__"))
        for path, (old, new) in (changes or {}).items():
            file = folder.joinpath(*path.split(".")).with_suffix(".py")
            text = file.read_text()
            assert old in text
            file.write_text(text.replace(old, new))
        names.append(name)
        return folder

    yield make
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]


@pytest.fixture
def fork(make_hub, monkeypatch):
    """The stand-in as an imported package `fork`."""
    monkeypatch.syspath_prepend(str(make_hub("fork").parent))
    return importlib.import_module("fork")


def products(package):
    return importlib.import_module(f"{package.__name__}.matmul_ogs").CALLS


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "intermediate"),
    [(1, 3, 1, 32, 64), (17, 5, 3, 96, 32), (40, 8, 8, 64, 64)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_layers_equal_the_reference_and_restore_works(fork, tokens, experts, top_k, hidden, intermediate, bias):
    kernel = registry.load("hub:fork")
    weights = random_weights(experts, hidden, intermediate, "cpu", bias=bias)
    x, (ids, shares) = torch.randn(tokens, hidden), random_routing(tokens, experts, top_k, "uneven", "cpu")
    prepared = kernel.prepare(weights)
    assert prepared.gate_up.weight.shape[-1] % 48 == 0  # the hub's own layout
    wide = ExpertWeights(*(p._replace(bias=None if p.bias is None else p.bias.float()) for p in weights))
    # Shares need not sum to 1, and a share may be 0.
    for factor in (torch.ones(top_k), torch.linspace(0, 2, top_k) if top_k > 1 else torch.tensor([0.3])):
        computed = kernel.run(x, prepared, ids, shares * factor)
        assert error(computed, moe(x, wide, ids, shares * factor)) < 1e-5
    restored = kernel.restore(prepared, hidden, intermediate)
    for back, original in zip(restored, weights, strict=True):
        assert all(map(torch.equal, back[:2], original[:2]))
    assert len(products(fork)) == 4


def test_a_model_is_quantised_laid_out_and_run_by_the_hub(make_model, answer, fork):
    model, plain = make_model(), hf.convert_and_replace(make_model())
    logits, tokens = answer(model)
    assert hf.convert_and_replace(model, fork) is model
    computed, again = answer(model)
    torch.testing.assert_close(computed, logits, rtol=1e-4, atol=1e-4)
    assert again == tokens
    assert len(products(fork)) >= 6  # two products in each of three layers show that the hub ran
    assert model.model.layers[0].mlp.experts.gate_up_proj_blocks.numel() == 0  # weights are not kept twice
    hf.convert_and_replace(model, "torch")
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(answer(model)[0], logits) or answer(model)[1] == tokens


def test_rounding_is_the_hubs_own(make_model, fork):
    model, ours = (make_model(exact=False) for _ in range(2))
    weights = [getattr(model.model.layers[1].mlp.experts, name).clone() for name in NAMES]
    hf.convert_and_replace(model, fork)
    hf.convert_and_replace(ours)
    downcast = importlib.import_module("fork.numerics_details.mxfp").downcast_to_mxfp_torch
    state, other = (m.state_dict() for m in (model, ours))
    for name, weight in zip(NAMES, weights, strict=True):
        key = f"model.layers.1.mlp.experts.{name}"
        values, scales = downcast(weight.bfloat16(), torch.uint8, axis=1)
        assert torch.equal(state[f"{key}_blocks"].flatten(-2), values.transpose(1, 2))
        assert torch.equal(state[f"{key}_scales"], scales.transpose(1, 2))
        assert not torch.equal(state[f"{key}_scales"], other[f"{key}_scales"])


def test_a_checkpoint_is_loaded_into_a_hub_without_rounding(make_model, answer, make_hub, tmp_path):
    hf.convert_and_replace(make_model()).save_pretrained(tmp_path / "packed")
    loaded = hf.load_packed(str(tmp_path / "packed"), make_hub("from_folder"), dtype=torch.float32)
    assert answer(loaded)[1] == answer(make_model())[1]
    stock = hf.load_packed(str(tmp_path / "packed"))
    blocks = [m.model.layers[2].mlp.experts.state_dict()["down_proj_blocks"] for m in (loaded, stock)]
    assert torch.equal(*blocks)


def test_a_folder_is_the_package_or_holds_it(make_model, answer, make_hub):
    folder, tokens = make_hub("some_fork"), answer(make_model())[1]
    for spelling in (folder, f"hub:{folder}", f"hub:{folder.parent}"):
        assert answer(hf.convert_and_replace(make_model(), spelling))[1] == tokens
        assert Path(sys.modules["some_fork.matmul_ogs"].__file__).parent == folder


def test_stock_kernels_are_replaced_in_place(make_model, answer, make_hub, fork, monkeypatch):
    """Use a model made by transformers' own quantizer, with the stand-in as its stock kernels."""
    from types import MethodType

    from transformers.integrations import mxfp4 as stock

    monkeypatch.syspath_prepend(str(make_hub("stock_hub").parent))
    stock_hub = importlib.import_module("stock_hub")
    for path in ("matmul_ogs", "swiglu", "routing", "tensor", "tensor_details.layout"):
        importlib.import_module(f"stock_hub.{path}")
    monkeypatch.setattr(stock, "triton_kernels_hub", stock_hub, raising=False)
    model = make_model()
    logits, tokens = answer(model)
    packed = hf.convert_and_replace(make_model()).state_dict()
    for number, layer in enumerate(model.model.layers):
        experts = stock.Mxfp4GptOssExperts(model.config)
        prefix = f"model.layers.{number}.mlp.experts."
        for name in NAMES:
            blocks, scales = packed[f"{prefix}{name}_blocks"], packed[f"{prefix}{name}_scales"]
            stock.swizzle_mxfp4_convertops(blocks, scales, experts, name, torch.device("cpu"), stock_hub)
            getattr(experts, f"{name}_bias").data = packed[f"{prefix}{name}_bias"]
        layer.mlp.experts = experts
        layer.mlp.forward = MethodType(stock.mlp_forward, layer.mlp)
    assert answer(model)[1] == tokens  # transformers calls the stand-in
    ran = len(products(stock_hub))
    assert ran

    hf.convert_and_replace(model, fork)
    assert all(isinstance(layer.mlp.experts, PackedExperts) for layer in model.model.layers)
    computed, again = answer(model)
    torch.testing.assert_close(computed, logits, rtol=1e-4, atol=1e-4)
    assert again == tokens
    assert len(products(stock_hub)) == ran
    assert products(fork)
    state = model.state_dict()
    assert state.keys() == packed.keys()
    assert all(torch.equal(state[key], packed[key]) for key in packed if key.endswith(("_blocks", "_scales")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matmul_ogs": ("def matmul_ogs(", "def matmul(")}, r"it lacks matmul_ogs\.matmul_ogs · take a hub"),
        ({"matmul_ogs": ("class FnSpecs", "class Specs"), "swiglu": ("swiglu_fn", "swiglu")}, r"swiglu\.swiglu_fn"),
        ({"matmul_ogs": ("    weight_scale: Any", "    b_mx_scale: Any")}, r"PrecisionConfig \(.*'weight_scale'\)"),
        ({"matmul_ogs": ("    reduction_n: int\n", "")}, r"matmul_ogs\.FusedActivation \(too many positional"),
        ({"routing": ("def routing(logits, n_expts_act)", "def routing(logits)")}, r"routing\.routing \(too many"),
        ({"tensor": ("convert_layout", "convert")}, r"tensor\.convert_layout"),
        ({"numerics_details.mxfp": ("src_tensor, out_quant_type, axis", "src_tensor, axis")}, "downcast_to_mxfp_torch"),
        ({}, r"it lacks routing \(No module named 'lacking\.routing'\)"),
    ],
)
def test_missing_names_of_a_hub_are_listed(make_model, make_hub, changes, message):
    folder, model = make_hub("lacking", changes), make_model()
    if not changes:
        (folder / "routing.py").unlink()
    if "FnSpecs" in str(changes):  # else the file cannot be imported
        text = (folder / "matmul_ogs.py").read_text()
        (folder / "matmul_ogs.py").write_text(text.replace("specs: FnSpecs", "specs: Specs"))
    with pytest.raises(ValueError, match=message) as raised:
        hf.convert_and_replace(model, folder)
    assert str(raised.value).startswith(f"kernels hub 'hub:{folder}' cannot be used")
    assert not isinstance(model.model.layers[0].mlp.experts, PackedExperts)


def test_a_package_that_fails_to_import_and_two_packages_of_one_name_are_refused(make_hub, tmp_path):
    folder = make_hub("broken", {"__init__": ('"""', 'raise RuntimeError("no driver")\n"""')})
    with pytest.raises(ValueError, match=r"cannot be imported · no driver · check the package in "):
        registry.load(f"hub:{folder}")
    folder = make_hub("twice")
    shutil.copytree(folder, tmp_path / "other" / "twice")
    registry.load(f"hub:{folder}")
    registry.load(f"hub:{folder}")
    with pytest.raises(ValueError, match=rf"a package 'twice' was imported from {folder} before"):
        registry.load(f"hub:{tmp_path / 'other' / 'twice'}")


def test_a_hub_may_serve_without_expert_parallelism(fork, capsys):
    results = conformance.check(registry.load("hub:fork"))
    assert [result.case.name for result in results if result.unsupported] == ["experts on another device"]
    assert conformance.main(["hub:fork", "--device", "cpu"]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    [refused] = [line for line in lines if not line.startswith("ok ")]
    assert refused.startswith("no    experts on another device  not supported: ")
    assert "its routing knows no experts on other devices" in refused
    assert verdict.endswith("it may serve, without expert parallelism")


def test_weights_that_are_not_packed_are_refused(fork):
    kernel, dense = registry.load("hub:fork"), Projection(torch.zeros(1, 32, 32))
    with pytest.raises(ValueError, match="cannot lay out dense weights"):
        kernel.prepare(ExpertWeights(dense, dense))
    plain = random_weights(1, 32, 32, "cpu", bias=False)
    with pytest.raises(ValueError, match="call prepare first"):
        kernel.run(torch.randn(1, 32), plain, torch.zeros(1, 1), torch.ones(1, 1))
