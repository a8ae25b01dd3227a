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

import pytest

from flashinfer.jit import env as jit_env
from flashinfer.jit import fused_moe

VARIABLE = "FLASHINFER_MOE_SM120_DTYPES"


@pytest.fixture
def generate(monkeypatch, tmp_path):
    """Generate the SM120 module's JitSpec for 12.1a into an empty workspace."""
    monkeypatch.setattr(jit_env, "FLASHINFER_GEN_SRC_DIR", tmp_path / "generated")
    monkeypatch.setattr(jit_env, "FLASHINFER_JIT_DIR", tmp_path / "cached_ops")
    context = fused_moe.current_compilation_context
    monkeypatch.setattr(context, "TARGET_CUDA_ARCHS", {(12, "1a")})

    def generate(dtypes=None):
        if dtypes is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, dtypes)
        return fused_moe.gen_cutlass_fused_moe_sm120_module()

    return generate


def generated(spec):
    return [s for s in spec.sources if str(s).endswith(".generated.cu")]


@pytest.mark.parametrize("unset", [None, "", "  "])
def test_without_the_variable_everything_is_built(generate, unset):
    spec = generate(unset)
    assert spec.name == "fused_moe_120"
    assert not any("FLASHINFER_MOE_" in flag for flag in spec.extra_cuda_cflags)
    assert any("bf16_bf16" in s.name for s in spec.sources)


def test_gpt_oss_needs_a_fifth_of_the_units(generate):
    everything, gpt_oss = generate(), generate("fp8xfp4")
    assert len(gpt_oss.sources) * 5 < len(everything.sources)
    assert 0 < len(generated(gpt_oss)) < len(generated(everything))
    runners = [s.stem for s in gpt_oss.sources if s.stem.startswith("moe_gemm_kernels")]
    assert runners == ["moe_gemm_kernels_fp8_fp4"]
    assert "-DFLASHINFER_MOE_BUILDS_FP8XFP4=1" in gpt_oss.extra_cuda_cflags
    assert "-DFLASHINFER_MOE_BUILDS_BF16XBF16=0" in gpt_oss.extra_cuda_cflags


def test_a_filtered_module_has_names_of_its_own(generate):
    everything, gpt_oss = generate(), generate("fp8xfp4")
    assert gpt_oss.name == "fused_moe_120_fp8xfp4"
    assert not set(generated(everything)) & set(generated(gpt_oss))


def test_order_and_repetition_do_not_matter(generate):
    names = {generate(v).name for v in ("fp8xfp4,bf16xbf16", "bf16xbf16, fp8xfp4,fp8xfp4")}
    assert names == {"fused_moe_120_fp8xfp4_bf16xbf16"}


@pytest.mark.parametrize("value", ["fp4", "fp8xfp4,", "FP8xFP4", "int8xint8"])
def test_an_unknown_name_is_refused_with_the_known_ones(generate, value):
    with pytest.raises(ValueError, match="allowed are fp8xfp4, fp4xfp4"):
        generate(value)
