import pytest

from sparkforge.compile.vllm import targets as vllm_targets
from sparkforge.core.errors import UsageError

TABLE = vllm_targets.load("0.32.0")


def test_what_sm121_does_not_use_is_refused_with_the_reason_and_the_line():
    with pytest.raises(UsageError, match=r"FlashAttention 3 is for 9.0a \(cmake/external_projects/vllm_flash_attn"):
        TABLE.chosen(["_vllm_fa3_C"])
    with pytest.raises(UsageError, match="vLLM has no target _C ·"):
        TABLE.chosen(["_C"])


@pytest.mark.parametrize(("arch", "base"), [("12.1a", "12.0"), ("12.1", "12.0"), ("12.0f", "12.0f")])
def test_the_architecture_is_mapped_as_vllms_cmake_files_do(arch, base):
    assert (TABLE.mapped(arch).base, TABLE.mapped(arch).family) == (base, "12.0f")


def test_an_architecture_that_nobody_tried_is_refused():
    with pytest.raises(UsageError, match=r"no rule for --arch 10\.0a"):
        TABLE.mapped("10.0a")
