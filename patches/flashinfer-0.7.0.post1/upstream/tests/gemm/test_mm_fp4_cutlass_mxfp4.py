"""
Copyright (c) 2026 by FlashInfer team.

Licensed under the Apache License, Version 2.0 (the "License");
you may not use this file except in compliance with the License.
You may obtain a copy of the License at

  http://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software
distributed under the License is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
See the License for the specific language governing permissions and
limitations under the License.
"""

from types import SimpleNamespace

import pytest
import torch

import flashinfer.utils
from flashinfer.gemm import gemm_base, mm_fp4
from flashinfer.jit import env as jit_env
from flashinfer.jit.gemm import core

M, N, K = 5, 2880, 4096  # rows of a padded to 128, those of b to 2944


def operands(m=M, n=N, k=K, block_size=32):
    """Return a, b and their scales in the 128x4 layout, as mm_fp4 takes them."""

    def quantized(rows):
        padded = (rows + 127) // 128 * 128, (k // block_size + 3) // 4 * 4
        return torch.zeros(rows, k // 2, dtype=torch.uint8), torch.zeros(
            padded, dtype=torch.uint8
        )

    (a, a_scale), (b, b_scale) = quantized(m), quantized(n)
    return a, b.T, a_scale, b_scale.T


@pytest.fixture
def capability(monkeypatch):
    """Make every device one of this compute capability."""

    def capability(*version):
        for module in (flashinfer.utils, gemm_base):
            monkeypatch.setattr(module, "get_compute_capability", lambda _: version)

    return capability


@pytest.fixture
def modules(monkeypatch):
    """Record what each module is called with; nothing is compiled, no GPU is used."""
    calls = []

    def generator(name):
        def fp4_gemm(*arguments):
            calls.append((name, arguments))

        module = SimpleNamespace(fp4_gemm=fp4_gemm, fp4_gemm_tactic_num=lambda: 1)
        return lambda: SimpleNamespace(build_and_load=lambda: module)

    for name in ("fp4", "mxfp4"):
        monkeypatch.setattr(
            gemm_base,
            f"gen_gemm_sm120_module_cutlass_{name}",
            generator(name),
            raising=False,
        )
        loader = getattr(gemm_base, f"get_gemm_sm120_module_cutlass_{name}", None)
        if loader is not None:
            loader.cache_clear()
    yield calls
    for name in ("fp4", "mxfp4"):
        loader = getattr(gemm_base, f"get_gemm_sm120_module_cutlass_{name}", None)
        if loader is not None:
            loader.cache_clear()


@pytest.fixture
def generated(monkeypatch, tmp_path):
    """Generate a module's JitSpec for 12.1a into an empty workspace."""
    monkeypatch.setattr(jit_env, "FLASHINFER_GEN_SRC_DIR", tmp_path / "generated")
    monkeypatch.setattr(jit_env, "FLASHINFER_JIT_DIR", tmp_path / "cached_ops")
    context = core.current_compilation_context
    monkeypatch.setattr(context, "TARGET_CUDA_ARCHS", {(12, "1a")})
    return lambda name: getattr(core, f"gen_gemm_sm120_module_cutlass_{name}")()


def multiply(*tensors, **options):
    options = {"block_size": 32, "use_nvfp4": False, "backend": "cutlass", **options}
    return mm_fp4(*tensors, **options)


@pytest.mark.parametrize("version", [(12, 0), (12, 1)])
@pytest.mark.parametrize("alpha", [None, torch.ones(1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mxfp4_reaches_its_module(capability, modules, version, alpha, dtype):
    capability(*version)
    a, b, a_scale, b_scale = operands()
    out = multiply(a, b, a_scale, b_scale, alpha, dtype)
    assert (out.shape, out.dtype) == ((M, N), dtype)
    ((name, arguments),) = modules
    assert name == "mxfp4"
    assert [tuple(x.shape) for x in arguments[:4]] == [
        (M, K // 2),
        (N, K // 2),
        (128, K // 32),
        (2944, K // 32),
    ]
    assert arguments[4] is alpha
    assert arguments[5] is out
    assert all(x.is_contiguous() for x in arguments[:4])


def test_nvfp4_keeps_its_module(capability, modules):
    capability(12, 1)
    multiply(
        *operands(block_size=16), torch.ones(1), use_nvfp4=True, block_size=16
    )
    assert [name for name, _ in modules] == ["fp4"]


@pytest.mark.parametrize("version", [(10, 0), (10, 3)])
def test_other_architectures_refuse_mxfp4(capability, modules, version):
    capability(*version)
    with pytest.raises(ValueError, match="mxfp4"):
        multiply(*operands())
    assert modules == []


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a, b, x, y: (a[:, :-8], b[:-8], x, y), "K in multiples of 32"),
        (lambda a, b, x, y: (a, b[:, :-4], x, y), "N in multiples of 8"),
        (lambda a, b, x, y: (a, b, x[:-1], y), "a_descale must be 16384 bytes"),
        (lambda a, b, x, y: (a, b, x, y[:, :N]), "b_descale must be 376832 bytes"),
        (lambda a, b, x, y: (a, b, x.view(torch.float8_e4m3fn), y), "UE8M0"),
    ],
)
def test_what_cannot_be_multiplied_is_named(capability, modules, change, message):
    capability(12, 1)
    with pytest.raises(ValueError, match=message):
        multiply(*change(*operands()))
    assert modules == []


def test_the_module_has_two_types_of_every_tile_and_scheduler(generated):
    spec = generated("mxfp4")
    assert spec.name == "mxfp4_gemm_cutlass_sm120"
    names = [source.name for source in spec.sources]
    assert names[0] == "fp4_gemm_cutlass_sm120.cu"
    assert len(set(names)) == 1 + 2 * 7
    units = "".join(source.read_text() for source in spec.sources[1:])
    assert units.count("template size_t mxfp4GemmKernelLauncherSm120<") == 2 * 2 * 7
    assert "<half, 128, 64, 128, true, true, false>" in units
    assert "-DFLASHINFER_FP4_GEMM_MXFP4" in spec.extra_cuda_cflags


def test_nvfp4_is_built_as_before(generated):
    spec = generated("fp4")
    assert spec.name == "fp4_gemm_cutlass_sm120"
    assert len(spec.sources) == 1 + 2 * 8
    assert not any("MXFP4" in flag for flag in spec.extra_cuda_cflags)
