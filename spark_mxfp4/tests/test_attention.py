"""The attention and norm kernels on a CPU, threads as fibers, against float32; compiled for GPUs without spills."""

import ctypes
import subprocess

import pytest
import torch

import attention_cases
import cpu_kernels
from spark_mxfp4.kernels import attention, precompile


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Attention.cuh's kernels in place of a GPU's, behind attention.py's own functions."""
    loaded = ctypes.CDLL(cpu_kernels.shared_library(tmp_path_factory.mktemp("attention"), "attention.cpp"))
    loaded.spark_attention = lambda job, warps, _stream: loaded.attend_on_cpu(job, warps)
    loaded.spark_rotation = lambda job, _stream: loaded.rotate_on_cpu(job)
    loaded.spark_norm = lambda job, _stream: loaded.normalise_on_cpu(job)
    loaded.spark_step_error = lambda error: f"{error} threads wait for ever".encode()
    return loaded


@pytest.fixture(autouse=True)
def _on_a_cpu(request, monkeypatch):
    if "library" in request.fixturenames:
        library = request.getfixturevalue("library")
        monkeypatch.setattr(attention, "load", lambda _device: library)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: type("Stream", (), {"cuda_stream": None}))
        cpu_kernels.set_processors(16, monkeypatch)
        attention._processors.cache_clear()


@pytest.mark.needs("c++")
@pytest.mark.parametrize(
    ("lengths", "window", "shared_by", "options"),
    [
        ((1,), 0, 1, {}), ((16,), 0, 0, {}), ((130,), 0, 3, {"rotated": True}), ((77, 0, 300), 0, 4, {"sinks": True}),
        ((129, 128, 127), 128, 1, {"sinks": True, "rotated": True}), ((500,), 128, 2, {"block": 48}),
        ((5, 260), 0, 16, {"key_heads": 2, "sinks": True, "rotated": True, "least": 1}),
        ((40, 200), 0, 3, {"key_heads": 2, "group": 2, "sinks": True}),
    ],
)  # fmt: skip
def test_attention_is_that_of_float32(library, lengths, window, shared_by, options):
    attention_cases.check_attention(lengths, window, shared_by, torch.device("cpu"), **options)


@pytest.mark.needs("c++")
def test_a_prompt_is_rotated_and_cached(library):
    attention_cases.check_rotation([(9, 9), (3, 20), (1, 65)], torch.device("cpu"))


@pytest.mark.needs("c++")
@pytest.mark.parametrize(("tokens", "columns"), [(1, 2880), (3, 64), (2, 8192)])
def test_a_norm_is_vllms(library, tokens, columns):
    attention_cases.check_norm(tokens, columns, torch.device("cpu"))


def test_a_sequence_is_shared_by_as_many_blocks_as_the_gpu_has_room_for():
    assert attention.splits(1, 8, 0, 132) == 16
    assert attention.splits(4, 8, 0, 132) == 4
    assert attention.splits(64, 8, 0, 132) == 1
    assert attention.splits(1, 8, 128, 132) == 1  # eight warps take the whole window at once
    assert attention.splits(1, 8, 1024, 48) == 4


def test_other_heads_and_devices_are_left_to_vllm():
    assert not attention.fits(64, 8, 64, torch.device("cpu"))
    assert not attention.fits(64, 8, 128, torch.device("cuda"))
    assert not attention.fits(72, 8, 64, torch.device("cuda"))
    assert not attention.fits(12, 8, 64, torch.device("cuda"))


@pytest.mark.parametrize("target", ["90a", "121a"])
def test_the_kernels_compile_without_spills(target, tmp_path, nvcc):
    source, output = precompile.FOLDER / "step.cu", tmp_path / "step.cubin"
    command = [nvcc, *precompile.flags(target), "-Xptxas", "-v", "-cubin", "-o", output, source]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == 4, result.stderr
