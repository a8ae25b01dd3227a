"""The check finds nothing to do for the pinned releases, and vLLM's own selector and parser answer."""

import sys

import pytest

from lab.upstream import check
from lab.upstream.effect import Effect
from lab.upstream.releases import candidates
from lab.upstream.report import PARTS
from sparkforge import pins
from sparkforge.patching import series

pytestmark = pytest.mark.integration
STACKS = [name for name, stack in pins.load().stacks.items() if stack.image and stack.image.kernels]


@pytest.mark.parametrize("stack", STACKS)
def test_the_pinned_releases_break_nothing_and_the_queue_leads_to_hardware_fp4(stack):
    table = pins.load()
    against = [f"{queue.upstream}-{queue.version}" for _, queue in series.queues(table, stack)]
    checking = check.StackCheck.of(table, stack, sys.executable)
    with checking.folders:
        rows = {row.name.partition("-")[0]: row for row in map(checking.run, candidates(table, stack, against))}
    for row in rows.values():
        assert row.is_pinned
        assert {part: column.effect for part, column in row.columns.items()} == dict.fromkeys(PARTS, Effect.NONE), row
    assert rows["vllm"].columns["experts"].summary == "stock MARLIN; queue FLASHINFER_CUTLASS_MXFP4_MXFP8"
    count = len(checking.profiles)
    assert rows["vllm"].columns["flags and variables"].summary.endswith(f"{count} of {count} profiles parsed")
