"""The measurement of dense products without a GPU: its rows, its reading kernel, and how it calls vLLM's kernels."""

import importlib
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import measure_linear
from project import PROJECT
from spark_mxfp4.kernels.check import error
from spark_mxfp4.kernels.linear import Format, reference
from spark_mxfp4.mxfp4 import dequantize, quantize

ROWS, COLUMNS, COPY = 48, 64, 1000.0
UTILS = "vllm.model_executor.layers.quantization.utils"


class Marlin:
    """Stands in for Marlin: it keeps a layer as it is, and its product is the plain one."""

    MARLIN_MAX_BLOCKS_PER_SM = 4

    def __init__(self):
        self.locks = []

    def marlin_make_workspace_new(self, device, blocks):
        self.locks.append(torch.zeros(2 * blocks, dtype=torch.int32, device=device))
        return self.locks[-1]

    def check(self, x, workspace, columns, bias):
        assert any(workspace is locks for locks in self.locks)
        assert (x.dtype, x.shape[1], bias) == (torch.bfloat16, columns, None)

    def prepare_fp8_layer_for_marlin(self, layer, *, size_k_first):
        assert size_k_first
        assert tuple(layer.weight.shape) == (layer.input_size_per_partition, layer.output_size_per_partition)
        assert layer.orig_dtype == torch.bfloat16

    def apply_fp8_marlin_linear(self, *, input, weight, weight_scale, workspace, size_n, size_k, bias):  # noqa: A002
        self.check(input, workspace, size_k, bias)
        return (input.float() @ (weight.float() * weight_scale.view(1, size_n))).bfloat16()

    def prepare_fp4_layer_for_marlin(self, layer):
        assert tuple(layer.weight.shape) == (layer.output_size_per_partition, layer.input_size_per_partition // 2)
        assert layer.params_dtype == torch.bfloat16

    def apply_fp4_marlin_linear(
        self, *, input, weight, weight_scale, weight_global_scale, workspace, size_n, size_k, bias  # noqa: A002
    ):  # fmt: skip
        values = dequantize(weight.view(size_n, -1, 16), torch.full((size_n, size_k // 32), 127, dtype=torch.uint8))
        if weight_global_scale is None:
            scales = torch.exp2(weight_scale.float() - 127).repeat_interleave(32, 1)
        else:
            scales = weight_scale.float().repeat_interleave(16, 1) * weight_global_scale
        self.check(input, workspace, size_k, bias)
        return (input.float() @ (values * scales).T).bfloat16()


def scaled_fp8_quant(x, *, use_per_token_if_dynamic):
    assert use_per_token_if_dynamic
    scales = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scales).to(torch.float8_e4m3fn), scales


def cutlass_scaled_mm(a, b, a_scales, b_scales, dtype):
    assert b.stride(0) == 1, "CUTLASS takes it by columns"
    assert tuple(b_scales.shape) == (b.shape[1], 1)
    return ((a.float() * a_scales) @ (b.float() * b_scales.T)).to(dtype)


def forget():
    """Let the next import of the module find another vLLM."""
    sys.modules.pop("peer_linear", None)


@pytest.fixture
def peer_linear(monkeypatch):
    """The module over stand-ins for vLLM."""
    forget()
    marlin = Marlin()
    modules = {"vllm": ModuleType("vllm"), UTILS: ModuleType(UTILS)}
    modules["vllm"].__version__ = "0"
    modules["vllm"]._custom_ops = SimpleNamespace(
        scaled_fp8_quant=scaled_fp8_quant, cutlass_scaled_mm=cutlass_scaled_mm
    )
    for name in ("marlin_utils", "marlin_utils_fp4", "marlin_utils_fp8"):
        setattr(modules[UTILS], name, marlin)
    for end in range(1, UTILS.count(".") + 1):
        modules.setdefault(package := UTILS.rsplit(".", end)[0], ModuleType(package))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("peer_linear")
    forget()


@pytest.fixture
def without_gpu(monkeypatch):
    """Each call that would be timed runs once and takes 2 µs."""

    def once(call, count):
        for i in range(count):
            call(i)
        return 2.0

    monkeypatch.setattr(measure_linear, "graph_time", once)


def matrices(count=2):
    return [(torch.randn(ROWS, COLUMNS) * 0.02).bfloat16() for _ in range(count)]


def test_vllms_kernels_get_the_weights_they_expect_and_are_checked(peer_linear, without_gpu):
    states = {number: torch.randn(number, COLUMNS).bfloat16() for number in (1, 3)}
    rows = list(measure_linear._vllm(matrices(), states, COPY))
    assert [(row["name"], row["tokens"]) for row in rows] == [
        (peer.name, number) for peer in peer_linear.peers() for number in states
    ]
    for row in rows:
        assert row["error"] < (0.05 if row["name"].startswith("vLLM") else 0.004), row
        assert row["us"] == 2.0
    of_copy = {row["name"]: row["of_copy"] for row in rows}
    assert of_copy["vLLM FP8"] == pytest.approx((ROWS * COLUMNS + 4 * ROWS) / 2e3 / COPY, abs=1e-3)
    assert of_copy["Marlin FP8"] == of_copy["vLLM FP8"] > of_copy["Marlin NVFP4"] >= of_copy["Marlin MXFP4"]


def test_scales_of_nvfp4_stand_for_those_of_mxfp4(peer_linear):
    matrix = torch.randn(ROWS, COLUMNS) * torch.exp2(torch.randint(-12, 1, (ROWS, 1)).float())
    _, scales = quantize(matrix)
    bytes_, factor = peer_linear.nvfp4_scales(scales)
    exact = torch.exp2(scales.double() - 127).repeat_interleave(2, 1)
    assert torch.equal(bytes_.double() * factor.double(), exact)
    tiny = torch.tensor([[120, 106, 105, 0]], dtype=torch.uint8)
    assert (peer_linear.nvfp4_scales(tiny)[0].float()[0, ::2] == torch.tensor([256, 2.0**-6, 0, 0])).all()
    with pytest.raises(ValueError, match="it is zero"):
        peer_linear.nvfp4_scales(torch.zeros(1, 2, dtype=torch.uint8))


def test_a_kernel_that_fails_is_a_row_and_the_others_are_measured(peer_linear, without_gpu, monkeypatch):
    def refuse(*_, **_unused):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(peer_linear.operators, "cutlass_scaled_mm", refuse)
    rows = list(measure_linear._vllm(matrices(), {1: torch.randn(1, COLUMNS).bfloat16()}, COPY))
    assert [row.get("failed", "")[:23] for row in rows[:2]] == ["RuntimeError: no kernel"] * 2
    assert [row["us"] for row in rows] == [None, None, 2.0, 2.0, 2.0]
    assert json.loads(json.dumps(rows)) == rows


def test_a_row_says_that_vllm_is_absent(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    forget()
    (row,) = measure_linear._vllm(matrices(), {}, COPY)
    assert row["name"] == "vLLM"
    assert "cannot be imported" in row["absent"]
    measure_linear._print("qkv, vLLM", row)
    assert "cannot be imported" in capsys.readouterr().out


def test_all_bytes_are_read_and_copied_in_turn_and_the_fastest_launch_counts(monkeypatch):
    seen, times = [], iter([*range(9, 1, -1), *range(2, 10), 5])

    def timed(call, count):
        for i in range(count):
            call(i)
        return float(next(times))

    monkeypatch.setattr(measure_linear, "graph_time", timed)
    monkeypatch.setattr(measure_linear, "read", lambda words, _out, launch, early: seen.append((words, launch, early)))
    weights = [torch.randint(0, 256, (5, 7, 32), dtype=torch.uint8) for _ in range(measure_linear.AT_ONCE)]
    before = [weight.clone() for weight in weights]
    plain, early, copied = measure_linear.bytes_alone("MXFP4", weights, COPY)
    assert plain["name"] == "read the weight's bytes, MXFP4"
    assert (plain["us"], early["us"], copied["us"]) == (2.0, 2.0, 5.0)
    last, first = measure_linear.LAUNCHES[-1], measure_linear.LAUNCHES[0]
    assert (plain["threads"], plain["loads"], plain["blocks"]) == last
    assert (early["threads"], early["loads"], early["blocks"]) == first
    assert all(words.numel() * 4 == weights[0].numel() for words, _, _ in seen)
    assert len({words.data_ptr() for words, _, _ in seen}) == len(weights)
    assert [is_early for _, _, is_early in seen].count(True) == len(seen) / 2
    for weight, was in zip(weights, before, strict=True):  # two rounds: each half was read or written, as a whole
        head, tail = weight.view(2, -1)
        assert torch.equal(head, was.view(2, -1)[0])
        assert torch.equal(tail, ~head)


def test_no_two_kernels_that_start_early_read_the_same_weight(monkeypatch):
    monkeypatch.setattr(measure_linear, "graph_time", lambda _call, _count: 1.0)
    weights = [torch.zeros(1, 1, 32, dtype=torch.uint8) for _ in range(measure_linear.AT_ONCE - 1)]
    names = [row["name"] for row in measure_linear.bytes_alone("FP8", weights, COPY)]
    assert names == ["read the weight's bytes, FP8", "copy half of the weight's bytes onto the other, FP8"]


READ = """
import torch
import measure_linear as m
m._processors = lambda device: 3
m.LAUNCHES = (m.ReadLaunch(32, 2, 1), m.ReadLaunch(64, 1, 2))
for launch in m.LAUNCHES:
    block = launch.threads * m.THREAD_WORDS
    for count in (4, block, 7 * block + 4):
        for place in {0, count // 2, count - 1}:
            words, out = torch.zeros(count, dtype=torch.int32), torch.zeros(m.MOST_WORDS, dtype=torch.int32)
            words[place] = 0x5EED5EED  # read twice it would cancel
            m.read(words, out, launch, early=False)
            assert out.nonzero().flatten().tolist() == [place % block], (launch, count, place)
print("every word once")
"""


def test_the_reading_kernel_reads_every_word_once():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(PROJECT / "bench")}
    result = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "every word once\n", result.stderr


def test_shapes_are_chosen_by_name():
    assert measure_linear._named("qkv,head") == ["qkv", "head"]
    assert measure_linear._named(None) == list(measure_linear.SHAPES)
    with pytest.raises(SystemExit, match="cannot measure tail"):
        measure_linear._named("qkv,tail")


def test_formats_of_peers_are_those_of_the_reference(peer_linear):
    matrix = matrices(1)[0]
    weight, scales = peer_linear._by_row(matrix)
    assert error(weight.float() * scales, reference(matrix, Format.FP8)) == 0
