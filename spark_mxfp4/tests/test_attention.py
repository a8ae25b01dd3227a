"""The attention and norm kernels, run on a CPU with fibers as threads, against float32; they compile without spills."""

import ctypes
import re
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import attention_cases
import cpu_kernels
from spark_mxfp4.kernels import attention, norm, precompile
from spark_mxfp4.kernels.attention import Cache, Layer, Projections

HEADS = [
    (64, 8, 64), (64, 8, 128), (72, 8, 64), (12, 8, 64), (8, 1, 64), (9, 1, 64), (8, 8, 64), (0, 8, 64), (8, 0, 64),
]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernels of attention.cuh and norm.cuh compiled for the CPU, with the functions that attention.py calls."""
    loaded = ctypes.CDLL(cpu_kernels.shared_library(tmp_path_factory.mktemp("attention"), "attention.cpp"))
    loaded.spark_attention = lambda job, warps, _stream: loaded.attend_on_cpu(job, warps)
    loaded.spark_rotation = lambda job, _stream: loaded.rotate_on_cpu(job)
    loaded.spark_norm = lambda job, peers, _stream: loaded.normalise_on_cpu(job, peers)
    loaded.spark_error = lambda error: f"{error} threads wait for ever".encode()
    return loaded


@pytest.fixture
def on_a_cpu(library, monkeypatch, claim_gpu):
    monkeypatch.setattr(attention, "load", lambda _device: library)
    claim_gpu(current_stream=SimpleNamespace(cuda_stream=None), get_device_properties=cpu_kernels.properties(16))
    attention._processors.cache_clear()


@pytest.mark.needs("c++")
@pytest.mark.parametrize(
    ("lengths", "window", "shared_by", "options"),
    [
        ((1,), 0, 1, {}), ((16,), 0, 0, {}), ((130,), 0, 3, {"rotated": True}), ((77, 0, 300), 0, 4, {"sinks": True}),
        ((129, 128, 127), 128, 1, {"sinks": True, "rotated": True}), ((500,), 128, 2, {"block": 48}),
        ((5, 260), 0, 16, {"key_heads": 2, "sinks": True, "rotated": True, "least": 1}),
        ((40, 200), 0, 3, {"key_heads": 2, "group": 2, "sinks": True, "block": 32}), ((700,), 0, 1, {}),
        ((600,), 0, 1, {"block": 48, "scale": 8}), ((90, 33), 0, 0, {"key_heads": 2, "stored": False}),
    ],
)  # fmt: skip
def test_attention_is_that_of_float32(on_a_cpu, lengths, window, shared_by, options):
    attention_cases.check_attention(lengths, window, shared_by, torch.device("cpu"), **options)


@pytest.mark.needs("c++")
def test_a_prompt_is_rotated_and_cached(on_a_cpu):
    attention_cases.check_rotation([(9, 9), (3, 20), (1, 65)], torch.device("cpu"))


@pytest.mark.needs("c++")
@pytest.mark.parametrize(
    ("tokens", "columns", "scale"), [(1, 2880, 1), (3, 64, 1), (2, 8, 1), (2, 12_288, 1), (0, 64, 1), (2, 2880, 0.003)]
)
def test_norm_equals_vllms(on_a_cpu, tokens, columns, scale):
    attention_cases.check_norm(tokens, columns, torch.device("cpu"), scale)


@pytest.mark.needs("c++")
@pytest.mark.parametrize(("ranks", "columns"), [(2, 2880), (3, 64), (2, 12_288)])
def test_a_norm_adds_the_parts_of_all_ranks(on_a_cpu, ranks, columns):
    """Ranks run one after another. Each finds the messages of later ranks prefilled, and those must then be sent."""
    inboxes = [torch.zeros(norm.MOST_TOKENS, 3, ranks, columns).bfloat16() for _ in range(ranks)]
    assert {inbox.nbytes for inbox in inboxes} == {norm.inbox_bytes(ranks, columns)}
    boxes = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    groups = [norm.Ranks(boxes, torch.zeros(norm.MOST_TOKENS, dtype=torch.int32), rank) for rank in range(ranks)]
    launches = torch.zeros(norm.MOST_TOKENS, dtype=torch.long)
    weight = torch.randn(columns).bfloat16()
    for tokens in (2, 1, 3, 3, 1, 2, 3):
        parts = torch.randn(ranks, tokens, columns).bfloat16()
        parts[:, :, :20] = 0
        messages = parts.clone()
        messages[:, :, :20] = -0.0  # +0 would mean that no message has arrived
        residual = torch.randn(tokens, columns).bfloat16()
        expected, expected_sum = norm.reference(parts.float().sum(0), residual, weight, 1e-5)
        rows, buffers, outputs = torch.arange(tokens), launches[:tokens] % 3, []
        for rank in range(ranks):
            inboxes[rank][rows, buffers, rank + 1 :] = messages[rank + 1 :].transpose(0, 1)
            outputs.append(norm.reduce_add_rms_norm(parts[rank], residual, weight, 1e-5, groups[rank]))
            torch.testing.assert_close(outputs[rank][0], expected, rtol=0.016, atol=1e-3)
            torch.testing.assert_close(outputs[rank][1], expected_sum, rtol=0.008, atol=1e-6)
            assert all(map(torch.equal, outputs[rank], outputs[0]))
            inboxes[rank][rows, buffers, rank + 1 :] = torch.nan
        for rank, inbox in enumerate(inboxes):
            others = [sender for sender in range(ranks) if sender != rank]
            sent = messages[others].transpose(0, 1).view(torch.int16)
            assert torch.equal(inbox[rows, buffers][:, others].view(torch.int16), sent)
            assert not inbox[rows, (buffers + 2) % 3][:, others].view(torch.int16).any()
        launches[:tokens] += 1


def test_splits_fill_the_gpu():
    # Tokens, key heads, window, multiprocessors; eight warps cover a window of 128 at once.
    loads = {(1, 8, 0, 132): 16, (4, 8, 0, 132): 4, (64, 8, 0, 132): 1, (1, 8, 128, 132): 1, (1, 8, 1024, 48): 4}
    assert {load: attention.splits(*load) for load in loads} == loads


def test_other_heads_and_devices_are_left_to_vllm(claim_gpu):
    assert [sizes for sizes in HEADS if attention.heads_fit(*sizes)] == [(64, 8, 64), (8, 1, 64), (8, 8, 64)]
    assert not attention.device_fits(torch.device("cpu"))
    gpu = torch.device("cuda")
    for capability, fits in (((9, 0), True), ((12, 1), True), ((10, 0), False)):
        claim_gpu(get_device_capability=capability)
        assert attention.device_fits(gpu) is fits
    claim_gpu("7.1", get_device_capability=(9, 0))  # AMD's gfx90a reports 9.0 too
    assert not attention.device_fits(gpu)


def misaligned(tensor):
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


def columns_first(tensor):
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def spread(tensor):
    return torch.nn.functional.pad(tensor, (0, 4))[..., : tensor.shape[-1]]


def every_second(tensor):
    return tensor.repeat_interleave(2, dim=0)[::2]


REFUSED = {  # name → changes of that tensor which the kernels do not support
    "query": (torch.Tensor.float, misaligned, columns_first, spread, lambda t: t[:, :5], lambda t: t[0],
              lambda t: t[:0]),
    "key": (torch.Tensor.half, misaligned, columns_first, lambda t: t[:0], lambda t: t[..., :32],
            lambda t: t.to("meta")),
    "value": (torch.Tensor.float, misaligned, spread, lambda t: t[:2], lambda t: t[:, :1]),
    "cache.data": (torch.Tensor.half, misaligned, spread, lambda t: t[0], lambda t: t[:, :1], lambda t: t[..., :64]),
    "cache.table": (torch.Tensor.long, columns_first, lambda t: t[:2], lambda t: t[:, :0]),
    "cache.lengths": (torch.Tensor.long, every_second, lambda t: t[:2]),
    "cache.slots": (torch.Tensor.int, every_second, lambda t: t[:2], lambda t: t[:, None]),
    "layer.sinks": (torch.Tensor.float, every_second, lambda t: t[:8], lambda t: t.repeat(2)),
    "layer.rotation": (torch.Tensor.bfloat16, columns_first, lambda t: t[:, :32]),
    "layer.tickets": (torch.Tensor.float, every_second, lambda t: t[:5]),
    "output": (torch.Tensor.float, columns_first, lambda t: t[:2], lambda t: t.flatten(1)),
    "starts": (torch.Tensor.long, every_second, lambda t: t[:1], lambda t: t[:, None]),
    "rotation": (torch.Tensor.double, columns_first, lambda t: t[:, :32]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change"), [(name, change) for name in REFUSED for change in REFUSED[name]])
def test_unsupported_tensors_are_refused_with_their_name(name, change):
    device, lengths = torch.device("cpu"), (40, 17, 3)
    new = attention_cases.projections(3, 2, device)
    cache = attention_cases.random_cache(lengths, (1, 1, 1), 2, 16, device)
    rotation = attention_cases.rotations(48, device)
    tensors = {**new._asdict(), **{f"cache.{field}": tensor for field, tensor in cache._asdict().items()}} | {
        "layer.sinks": torch.randn(16).bfloat16(), "layer.rotation": rotation, "rotation": rotation,
        "layer.tickets": attention.counters(2, device), "output": torch.empty_like(new.query),
        "starts": torch.arange(4, dtype=torch.int32),
    }  # fmt: skip
    tensors[name] = change(tensors[name])
    new = Projections(*(tensors[field] for field in Projections._fields))
    cache = Cache(*(tensors[f"cache.{field}"] for field in Cache._fields))
    layer = Layer(1.0, tensors["layer.tickets"], 0, tensors["layer.sinks"], tensors["layer.rotation"])
    if name in {"starts", "rotation"}:
        run = partial(attention.rotate_and_store, new, cache, tensors["starts"], tensors["rotation"])
    else:
        run = partial(attention.attend, new, cache, layer, tensors["output"])
    with pytest.raises(ValueError, match=f"attention cannot run · {re.escape(name)} .* set SPARK_MXFP4_ATTENTION=vllm"):
        run()


WIDE = 770  # times as many columns: more than the kernel takes
NORM_REFUSED = {
    "x": (torch.Tensor.float, columns_first, misaligned, lambda x: x[0], lambda x: x[:, :12],
          lambda x: x.repeat(1, WIDE)),
    "residual": (torch.Tensor.half, columns_first, misaligned, lambda x: x[:1]),
    "weight": (torch.Tensor.float, every_second, misaligned, lambda x: x[:8]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change"), [(name, change) for name in NORM_REFUSED for change in NORM_REFUSED[name]])
def test_tensors_unsupported_by_the_norm_are_refused_with_their_name(name, change):
    tensors = {"x": torch.ones(2, 16), "residual": torch.ones(2, 16), "weight": torch.ones(16)}
    tensors = {key: tensor.bfloat16() for key, tensor in tensors.items()}
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=rf"the norm cannot run · {name} .* use torch\.nn\.functional\.rms_norm"):
        norm.add_rms_norm(*tensors.values(), 1e-5)


def test_another_device_is_refused():
    cpu = torch.device("cpu")
    ones = torch.ones(2, 16).bfloat16()
    refused = r"attention's kernels cannot run on this device"
    with pytest.raises(NotImplementedError, match=rf"{refused} · .* 9\.0, 12\.0 and"):
        norm.add_rms_norm(ones, ones, ones[0].clone(), 1e-5)
    new, cache = attention_cases.projections(1, 1, cpu), attention_cases.random_cache([5], [1], 1, 16, cpu)
    with pytest.raises(NotImplementedError, match=refused):
        attention.attend(new, cache, Layer(1.0, attention.counters(1, cpu)), torch.empty_like(new.query))


@pytest.mark.parametrize("target", ["90a", "121a"])
def test_the_kernels_compile_without_spills(target, tmp_path, nvcc):
    source, output = precompile.FOLDER / "step.cu", tmp_path / "step.cubin"
    command = [nvcc, *precompile.flags(target), "-Xptxas", "-v", "-cubin", "-o", output, source]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == 5, result.stderr
