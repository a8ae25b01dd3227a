"""The table of kernels is well-formed, and fits the audit's rules and the table of peaks."""

import fnmatch

import pytest

from sparkforge.audit import rules as audit_rules
from sparkforge.compile.flashinfer.sets import TABLE as PATH
from sparkforge.compile.flashinfer.sets import load
from sparkforge.compile.peaks import Peaks
from sparkforge.core.errors import InputError, UsageError

VERSION = "0.7.0.post1"
TABLE = load(VERSION)
# Files that FlashInfer's generators name, one of each kind, as they are called in a unit's name.
UNITS = (
    "fused_moe_120_fp8xfp4/120_cutlass_kernel_file_gemm_grouped_sm120_M128_BS_group2.generated.cuda.o",
    "fp4_quantization_120f/kernels_quantization.cuda.o",
    "mxfp8_quantization_sm100/kernels_quantization.cuda.o",
    "sampling/csrc_sampling.cuda.o",
    "sampling/csrc_flashinfer_sampling_binding.cuda.o",
    "xqa_input_bf16_kv_cache_e4m3_x/xqa_mha.cuda.o",
    "xqa_input_bf16_kv_cache_e4m3_x/xqa_xqa_wrapper.cuda.o",
    "batch_prefill_attention_sink_x_fa2/batch_prefill_attention_sink_x_fa2_batch_prefill_paged_kernel_mask_3.cuda.o",
    "batch_prefill_attention_sink_x_fa2/batch_prefill_attention_sink_x_fa2_batch_prefill.cuda.o",
    "batch_prefill_attention_sink_x_fa2/batch_prefill_attention_sink_x_fa2_batch_prefill_jit_binding.cuda.o",
)


def changed(tmp_path, old, new):
    """The table with `old` replaced once."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"
    assert old in PATH.read_text()
    path.write_text(PATH.read_text().replace(old, new, 1))
    return load(VERSION, path)


def test_gpt_oss_has_what_it_needs_once_and_all_has_more():
    names = [module.name for module in TABLE.chosen("gpt-oss")]
    assert len(names) == len(set(names)) == 11
    assert "fused_moe_120_fp8xfp4" in names
    for prefix in ("batch_prefill_attention_sink_bf16_kv_", "xqa_input_bf16_kv_cache_"):
        matching = [name for name in names if name.startswith(prefix)]
        types = {(kv, window) for kv in ("bf16", "e4m3") for window in ("True", "False")}
        assert types == {("e4m3" if "e4m3" in name else "bf16", name.split("swa_")[-1].split("sliding_window_")[-1]
                          .split("_")[0]) for name in matching}  # fmt: skip
    assert set(names) < {module.name for module in TABLE.chosen("all")}
    assert len(TABLE.chosen("trial")) == 1


def test_every_module_has_a_rule_for_its_file_and_a_reason():
    rules = audit_rules.load().modules
    for module in TABLE.module:
        assert fnmatch.fnmatch(f"{module.name}.so", rules[module.audit].file), module.name
        assert ("e4m3" in module.name) == module.audit.endswith("_fp8")
    assert all(call.why and call.text for call in TABLE.calls.values())
    assert {module.call for module in TABLE.module} == TABLE.calls.keys()


@pytest.mark.parametrize("unit", UNITS)
def test_no_unit_of_ours_counts_as_never_measured(unit):
    assert not Peaks("test").cost(unit).source.startswith("not measured")


def test_what_is_built_decides_the_digest_and_nothing_else(tmp_path):
    digest = TABLE.digest(TABLE.module)
    other, changed_why = (
        changed(tmp_path, *change) for change in (("page_size = 16", "page_size = 32"), ("lays out the", "orders the"))
    )
    assert other.digest(other.module) != digest
    assert changed_why.digest(changed_why.module) == digest
    assert TABLE.digest(TABLE.chosen("trial")) != digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('call = "experts"', 'call = "nothing"'),
        ('sets = ["gpt-oss"]', 'sets = ["other"]'),
        ('name = "sampling"', 'name = "fp4_quantization_120f"'),
        ('generator = "flashinfer.jit.sampling:gen_sampling_module"', 'generator = "os:system"'),
        ("schema = 1", "schema = 2"),
        ("lines = [365, 365]", ""),
        ("lines = [365, 365]", "lines = []"),
    ],
)
def test_a_table_that_does_not_fit_together_is_refused(tmp_path, old, new):
    with pytest.raises((ValueError, LookupError)):
        changed(tmp_path, old, new)


def test_an_unknown_release_or_set_is_named():
    with pytest.raises(InputError, match=f"no kernels are known for FlashInfer 0.5.3.*{VERSION}"):
        load("0.5.3")
    with pytest.raises(UsageError, match="gpt-oss"):
        TABLE.chosen("llama")
