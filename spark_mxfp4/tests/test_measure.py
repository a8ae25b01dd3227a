"""The measurement of the experts without a GPU: which models and peers, and FlashInfer's layout through a stand-in."""

import contextlib
import importlib
import json
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import common
import measure_experts
from spark_mxfp4.kernels import timing
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference
from spark_mxfp4.mxfp4 import dequantize

TINY = common.LayerSizes(4, 2, 96, 160)


def fused_moe(*, input, output, **given):  # noqa: A002 - FlashInfer's own name
    """What FlashInfer's cutlass_fused_moe says that it computes, from weights that stay as they are."""
    assert given["use_w4_group_scaling"]
    assert {tensor.dtype for tensor in (input, given["fc1_expert_biases"], given["fc2_expert_biases"])} == {
        torch.bfloat16
    }
    output.zero_()
    first, second = (
        dequantize(given[f"fc{n}_expert_weights"].unflatten(-1, (-1, 16)), given["quant_scales"][n - 1]) for n in (1, 2)
    )
    for token, (ids, shares) in enumerate(
        zip(given["token_selected_experts"], given["token_final_scales"], strict=True)
    ):
        total = torch.zeros(output.shape[1])
        for expert, share in zip(ids.tolist(), shares, strict=True):
            products = input[token].float() @ first[expert].T + given["fc1_expert_biases"][expert].float()
            up, gate = products.chunk(2)
            limit = given["swiglu_limit"][expert]
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = (up + given["swiglu_beta"][expert]) * gate * torch.sigmoid(given["swiglu_alpha"][expert] * gate)
            total += share * (hidden @ second[expert].T + given["fc2_expert_biases"][expert].float())
        output[token] = total.bfloat16()


@pytest.fixture
def cutlass(monkeypatch):
    """peer_cutlass with a FlashInfer that computes in torch; `tuned` lists what its autotuner was asked."""
    tuner, tuned = SimpleNamespace(warmup=3, repeat=10), []

    @contextlib.contextmanager
    def autotune(choose, tuning_buckets):
        tuned.append((choose, tuning_buckets))
        yield

    modules = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.autotuner", "flashinfer.fused_moe")}
    modules["flashinfer.autotuner"].AutoTuner = SimpleNamespace(get=lambda: tuner)
    modules["flashinfer.autotuner"].autotune = autotune
    modules["flashinfer.fused_moe"].cutlass_fused_moe = fused_moe
    modules["flashinfer.fused_moe"].interleave_moe_weights_for_sm90_mixed_gemm = lambda weight, _: weight
    modules["flashinfer.fused_moe"].interleave_moe_scales_for_sm90_mixed_gemm = lambda scales: scales
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "peer_cutlass", raising=False)
    import peer_cutlass

    yield SimpleNamespace(peer=peer_cutlass, tuned=tuned, tuner=tuner)
    sys.modules.pop("peer_cutlass")


def on_cpu(monkeypatch, peer):
    monkeypatch.setattr(peer, "random_weights", lambda *sizes: random_weights(*sizes, device="cpu"))
    monkeypatch.setattr(peer, "random_routing", lambda *sizes: random_routing(*sizes, device="cpu"))
    monkeypatch.setattr(peer, "_inputs", lambda number, model: torch.randn(number, model.hidden).bfloat16())
    monkeypatch.setattr(timing, "graph_time", lambda once, count: [once(i) for i in range(count)] and 10.0)
    monkeypatch.setattr(common, "count_of", lambda _: 2)


def test_padded_layers_have_ups_above_gates(cutlass):
    weights = random_weights(2, 96, 160, device="cpu")
    layer = cutlass.peer.prepare(weights)
    assert [tuple(t.shape) for t in (*layer.weights, *layer.scales, *layer.biases)] == [
        (2, 512, 64), (2, 128, 128), (2, 512, 4), (2, 128, 8), (2, 512), (2, 128),
    ]  # fmt: skip
    up, gate = weights.gate_up.weight[:, 1::2], weights.gate_up.weight[:, ::2]
    assert torch.equal(layer.weights[0][:, :160, :48], up)
    assert torch.equal(layer.weights[0][:, 256:416, :48], gate)
    assert not layer.weights[0][:, 160:256].any()
    assert not layer.weights[0][:, :, 48:].any()
    assert torch.equal(layer.biases[0][:, 256:416], weights.gate_up.bias[:, ::2])


def test_rows_have_the_error_against_our_reference(cutlass, monkeypatch):
    on_cpu(monkeypatch, cutlass.peer)
    rows = cutlass.peer.measure(TINY, (1, 3))
    assert [(row["tokens"], row["us"]) for row in rows] == [(1, 10.0), (3, 10.0)]
    assert all(row["error"] < 0.01 for row in rows)
    assert cutlass.tuned == [(True, (1, 3)), (False, (1, 3))]
    assert (cutlass.tuner.warmup, cutlass.tuner.repeat) == (cutlass.peer.WARMUPS, cutlass.peer.REPEATS)


def test_a_layer_that_is_laid_out_wrongly_shows_in_the_error(cutlass, monkeypatch):
    on_cpu(monkeypatch, cutlass.peer)
    monkeypatch.setattr(cutlass.peer, "_halves", cutlass.peer._whole)  # gates and ups still in turn
    assert cutlass.peer.measure(TINY._replace(intermediate=128), (2,))[0]["error"] > 0.1


def test_weights_without_bias_are_refused(cutlass):
    with pytest.raises(ValueError, match="packed weights and a bias"):
        cutlass.peer.prepare(random_weights(1, 128, 128, device="cpu", bias=False))


def test_models_are_chosen_by_their_experts():
    assert list(measure_experts.chosen_models("")) == list(measure_experts.MODELS)
    assert list(measure_experts.chosen_models("16,128")) == ["gpt-oss-120b", "16 experts, top-2"]
    with pytest.raises(ValueError, match="no model has 7 experts"):
        measure_experts.chosen_models("7,16")


def test_a_peer_that_fails_leaves_its_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def load():
        raise ImportError("there is no flashinfer")

    assert measure_experts.measure_peer("peer_cutlass", load, "gpt-oss-20b", (1,)) == {
        "peer_cutlass_failed": "ImportError: there is no flashinfer"
    }
    assert "peer_cutlass failed for gpt-oss-20b" in capsys.readouterr().out


def test_peers_are_those_of_the_command_line(cutlass):
    assert not measure_experts.peers(Namespace(peer=None, peer_cutlass=False))
    wanted = measure_experts.peers(Namespace(peer="folder", peer_cutlass=True))
    assert list(wanted) == ["peer", "peer_cutlass"]
    assert wanted["peer_cutlass"]() is cutlass.peer.measure


def test_the_command_writes_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(measure_experts, "ceilings", lambda: {"copy_gbs": 1.0})
    monkeypatch.setattr(
        measure_experts, "measure_ours", lambda model, tokens: [{"tokens": number} for number in tokens]
    )
    monkeypatch.setattr(measure_experts, "cutlass_peer", lambda: lambda model, tokens: [{"experts": model.experts}])
    command = [
        "measure_experts",
        "--output",
        str(tmp_path / "f.json"),
        "--tokens",
        "1,8",
        "--experts",
        "32",
        "--peer-cutlass",
    ]
    monkeypatch.setattr("sys.argv", command)
    measure_experts.main()
    assert json.loads((tmp_path / "f.json").read_text())["models"] == {
        "gpt-oss-20b": {
            **measure_experts.MODELS["gpt-oss-20b"]._asdict(),
            "ours": [{"tokens": 1}, {"tokens": 8}],
            "peer_cutlass": [{"experts": 32}],
        }
    }
    assert "gpt-oss-20b: experts 32" in capsys.readouterr().out


def test_a_number_of_experts_that_no_model_has_ends_the_command_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["measure_experts", "--output", str(tmp_path / "f.json"), "--experts", "7"])
    with pytest.raises(SystemExit, match="no model has 7 experts · they have 128, 32"):
        measure_experts.main()


def test_the_stand_in_is_the_reference(cutlass):
    weights = random_weights(2, 128, 128, device="cpu")
    x, routing = torch.randn(3, 128).bfloat16(), random_routing(3, 2, 1, device="cpu")
    assert error(cutlass.peer.run(x, cutlass.peer.prepare(weights), *routing), reference(x, weights, *routing)) < 0.01


@pytest.mark.parametrize("tokens", ["1,x", "0", "1,,4", "", "-1", "1.5"])
@pytest.mark.parametrize("module", ["measure_experts", "measure_linear", "measure_shards"])
def test_tokens_that_are_no_numbers_above_zero_are_one_line(monkeypatch, capsys, module, tokens):
    measurement = importlib.import_module(module)
    monkeypatch.setattr(sys, "argv", [module, "--output", "f.json", f"--tokens={tokens}"])
    with pytest.raises(SystemExit) as refused:
        measurement.main()
    assert refused.value.code == 2
    assert f"{tokens!r} is no list of whole numbers above 0 · give them as in 1,64" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["measure_experts", "measure_linear", "measure_shards"])
def test_a_folder_that_is_not_there_is_one_line_before_the_measurement(monkeypatch, capsys, tmp_path, module):
    measurement = importlib.import_module(module)
    monkeypatch.setattr(sys, "argv", [module, "--output", str(tmp_path / "none" / "f.json")])
    with pytest.raises(SystemExit) as refused:
        measurement.main()
    assert refused.value.code == 2
    assert f"mkdir -p {tmp_path / 'none'}" in capsys.readouterr().err
