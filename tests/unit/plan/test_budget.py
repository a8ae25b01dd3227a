"""The memory budget: every byte has a line, more asked for needs more, and what is said to fit fits."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkforge.models import recipes as models
from sparkforge.plan import budget, devices
from sparkforge.plan.architecture import parse
from sparkforge.plan.budget import Workload
from sparkforge.plan.devices import GIB

KNOWN = models.load()
MODELS = {name: parse(known.config, name) for name, known in KNOWN.items()}
DEVICES = devices.table()
LOADS = st.builds(
    Workload, context=st.integers(1, 131_072), concurrency=st.integers(1, 200), kv=st.sampled_from(["bf16", "fp8"]),
    batched=st.sampled_from([2_048, 4_096, 8_192]), sequences=st.sampled_from([16, 64, 1_024]),
)  # fmt: skip
ANY = {"model": st.sampled_from(sorted(MODELS)), "device": st.sampled_from(sorted(DEVICES)), "load": LOADS}


@settings(max_examples=150, deadline=None)
@given(**ANY)
def test_the_lines_sum_to_the_memory(model, device, load):
    lines = budget.make(MODELS[model], DEVICES[device], load)
    assert sum(line.bytes for line in lines.lines) + lines.left == lines.total == DEVICES[device].memory_bytes
    assert all(line.bytes >= 0 for line in lines.lines)


@settings(max_examples=60, deadline=None)
@given(**ANY)
def test_what_is_said_to_fit_fits_and_no_more(model, device, load):
    m, d = MODELS[model], DEVICES[device]
    sequences, tokens = budget.most_sequences(m, d, load), budget.most_tokens(m, d, load)
    if sequences:
        assert budget.fits(m, d, replace(load, concurrency=sequences))
    assert not budget.fits(m, d, replace(load, concurrency=sequences + 1))
    if tokens:
        assert budget.fits(m, d, replace(load, context=tokens))
    assert tokens == m.longest or not budget.fits(m, d, replace(load, context=tokens + 1))
    assert budget.fits(m, d, load) == (budget.missing(m, d, load) <= 0)


def test_gpt_oss_120b_on_a_spark_by_hand():
    load = Workload(32_768, 16, batched=4_096, sequences=16)
    lines = {line.name: line.bytes for line in budget.make(MODELS["gpt-oss-120b"], DEVICES["spark"], load).lines}
    block = 18 * 16 * 2_048
    assert lines["weights"] == 65_248_815_744
    assert lines["KV cache"] == block * (16 * (2_048 + 10) + (2_048 + 521) - (2_048 + 10))
    tokens = 4_096 * (4 * (3 * 2_880 + 2_880) + 80 * 64 + 4 * 2_880)
    assert lines["activations"] == 2 * tokens + 4 * 2 * 16 * 201_088
    assert lines["graphs, workspaces"] == 3.5 * GIB


@pytest.mark.parametrize(("resident", "share"), [(0.0, 0.87), (6.2, 0.87), (20.0, 0.79), (200.0, 0.0)])
def test_the_share_is_what_the_others_leave(resident, share):
    spark = DEVICES["spark"]
    device = spark.model_copy(update={"resident": spark.resident.model_copy(update={"value": resident})})
    assert budget.most_share(device) == share
