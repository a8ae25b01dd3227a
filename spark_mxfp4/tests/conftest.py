"""Small gpt-oss models in memory, with experts' weights that MXFP4 represents exactly."""

import ctypes
import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from spark_mxfp4.mxfp4 import dequantize

INSTALL = {"c++": "sudo apt install g++", "nvcc": "install CUDA 13, and put its bin/ on PATH"}
ROOM = 1 << 14  # guard elements around each tensor, which no kernel may write


def require(program):
    """Return the path of `program`. If it is missing, skip the test, or fail it on CI."""
    path = shutil.which(program)
    if path is None:
        reason = f"{program} is not installed: {INSTALL[program]}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return path


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            require(program)


@pytest.fixture(scope="session")
def nvcc():
    return require("nvcc")


@pytest.fixture(autouse=True)
def own_cache_and_no_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("SPARK_MXFP4_KERNEL", "SPARK_MXFP4_TRUST_REMOTE_CODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def same_numbers():
    """Use the same random numbers in each run, so that failures repeat. On a GPU they differ (device/conftest.py)."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: with small tensors on shared cores, waiting threads make tests ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def claim_gpu(monkeypatch):
    """Return a function that replaces functions of torch.cuda, and torch's HIP version, as on a GPU not here."""

    def claim(hip=None, **results):
        monkeypatch.setattr(torch.version, "hip", hip)
        for name, result in results.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)

    return claim


@pytest.fixture
def search_on(monkeypatch):
    """Search for kernel shapes, with no results yet."""
    from spark_mxfp4.kernels import search, tuning

    monkeypatch.setenv(search.SEARCH_VARIABLE, "on")
    monkeypatch.setattr(tuning, "_adopted", {})


@pytest.fixture
def gpu_on_cpu(library, monkeypatch, claim_gpu):
    """Run hopper.py with the test module's `library`, one multiprocessor, and memory of NaN and 77 between guards."""
    from cpu_kernels import properties
    from spark_mxfp4.kernels import hopper

    library.spark_error = lambda number: f"{number} threads wait for ever".encode()
    monkeypatch.setattr(hopper, "library", lambda: library)
    claim_gpu(current_stream=SimpleNamespace(cuda_stream=None), get_device_properties=properties(1))
    library.add_tensor.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.add_tensor(None, 0)
    guarded = []
    empty = torch.empty

    def poisoned(*sizes, dtype=torch.float32, device="cpu"):
        shape = torch.Size(sizes)
        around = empty(shape.numel() + 2 * ROOM, dtype=dtype, device=device)
        around.fill_(torch.nan if dtype.is_floating_point else 77)
        guarded.extend((edge, edge.clone()) for edge in (around[:ROOM], around[-ROOM:]))
        library.add_tensor(around[ROOM:-ROOM].data_ptr(), shape.numel() * around.itemsize)
        return around[ROOM:-ROOM].view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: poisoned(*x.shape, dtype=x.dtype))
    yield
    assert all(torch.equal(edge.view(torch.uint8), before.view(torch.uint8)) for edge, before in guarded)


@pytest.fixture
def ids():
    return torch.tensor([[3, 17, 99, 4, 4, 60, 127, 0, 31, 5]])


@pytest.fixture
def make_model():
    from transformers import GptOssConfig, GptOssForCausalLM

    def make(seed=0, *, exact=True, dtype=torch.float32, **changes):
        settings = {
            "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32,
            "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 5, "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "pad_token_id": 0, "eos_token_id": 127,
        }  # fmt: skip
        torch.manual_seed(seed)
        model = GptOssForCausalLM(GptOssConfig(**{**settings, **changes})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.5, 0.5)
            for layer in model.model.layers if exact else ():
                for name in ("gate_up_proj", "down_proj"):
                    weight = getattr(layer.mlp.experts, name)
                    experts, columns, rows = weight.shape
                    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
                    scales = torch.randint(121, 124, blocks.shape[:-1], dtype=torch.uint8)
                    weight.copy_(dequantize(blocks, scales).transpose(1, 2))
        return model.to(dtype)

    return make


@pytest.fixture
def model(make_model):
    return make_model()


@pytest.fixture
def answer(ids):
    @torch.no_grad()
    def of(model):
        logits = model(ids).logits.float()
        return logits, model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None).tolist()

    return of
