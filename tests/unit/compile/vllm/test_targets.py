import re

import pytest

from sparkforge import pins
from sparkforge.audit import rules as audit_rules
from sparkforge.compile.vllm import targets as vllm_targets
from sparkforge.core.errors import UsageError

TABLE = vllm_targets.load("0.32.0")


def test_every_target_says_why_and_where_and_what_is_used_has_an_output():
    for name, target in TABLE.targets.items():
        assert re.match(r"(CMakeLists\.txt|cmake/external_projects/\w+\.cmake):\d+$", target.where), name
        assert target.why
        assert bool(target.output) is target.use, name
        assert set(target.needs) <= TABLE.repositories.keys()
        assert not target.module or target.module in audit_rules.load().modules, name


def test_every_repository_is_pinned_under_the_same_variable():
    pinned = pins.load().stacks["spark"].git
    assert {name: repository.variable for name, repository in TABLE.repositories.items()} == {
        name: pinned[name].src_dir for name in TABLE.repositories
    }
    cuda = {name for name, pin in pinned.items() if pin.of == "vllm" and pin.switch != "VLLM_TARGET_DEVICE=cuda"
            and "cargo" not in (pin.switch or "")}  # fmt: skip
    assert set(TABLE.repositories) == cuda


def test_what_sm121_does_not_use_is_refused_with_the_reason_and_the_line():
    with pytest.raises(UsageError, match=r"FlashAttention 3 is for 9.0a \(cmake/external_projects/vllm_flash_attn"):
        TABLE.chosen(["_vllm_fa3_C"])
    with pytest.raises(UsageError, match="vLLM has no target _C ·"):
        TABLE.chosen(["_C"])


def test_without_names_everything_that_is_used_is_built_in_the_tables_order():
    assert TABLE.chosen([]) == TABLE.used
    assert TABLE.chosen(["spinloop", "cumem_allocator"]) == ["cumem_allocator", "spinloop"]
    assert {"_C_stable_libtorch", "_moe_C_stable_libtorch"} < set(TABLE.used)


@pytest.mark.parametrize(("arch", "base"), [("12.1a", "12.0"), ("12.1", "12.0"), ("12.0f", "12.0f")])
def test_the_architecture_is_mapped_as_vllms_cmake_files_do(arch, base):
    assert (TABLE.mapped(arch).base, TABLE.mapped(arch).family) == (base, "12.0f")


def test_an_architecture_that_nobody_tried_is_refused():
    with pytest.raises(UsageError, match=r"no rule for --arch 10\.0a"):
        TABLE.mapped("10.0a")
