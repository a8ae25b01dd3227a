"""From samples to figures, against numbers that can be checked by hand and against numpy's percentile."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkforge.bench import context, report, samples
from sparkforge.bench.samples import FinishedLoad, Sample


def sample(**changes):
    values = {"ttft": 0.5, "latency": 1.4, "gaps": [0.1] * 9, "pieces": 10, "prompt_tokens": 24, "output_tokens": 10}
    return Sample(**{**values, "wanted_tokens": 10, **changes})


def test_figures_follow_vllms_definitions(config):
    figures = samples.compute_metrics(
        FinishedLoad([sample(), sample(ttft=0.3, latency=1.2)], 2.0), config.model_copy(update={"tp": 2})
    )
    assert figures.tpot_ms.median == pytest.approx(100)  # (1.4 - 0.5) / 9
    assert figures.interactivity == pytest.approx(10)
    assert figures.ttft_ms.median == pytest.approx(400)
    assert figures.e2el_ms.mean == pytest.approx(1300)
    assert figures.output_throughput == pytest.approx(10)
    assert figures.total_token_throughput == pytest.approx(34)
    assert figures.tput_per_gpu == pytest.approx(17)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_a_spread_is_numpys(values):
    spread = samples.spread(values)
    expected = [np.mean(values), np.median(values), np.percentile(values, 99)]
    assert [spread.mean, spread.median, spread.p99] == pytest.approx([value * 1000 for value in expected], abs=1e-3)


@pytest.mark.parametrize(
    "load", [FinishedLoad([], 0.0), FinishedLoad([sample(error="x")], 1.0), FinishedLoad([sample()], 0.0)]
)
def test_nothing_is_divided_by_nothing(load, config):
    assert samples.compute_metrics(load, config) is None
    assert not all(check.ok for check in samples.check_load(load, config))


@pytest.mark.parametrize(
    ("load", "ok"),
    [
        (FinishedLoad([sample(latency=9.0)], 1.0), False),
        (FinishedLoad([sample(ttft=0.0)], 2.0), False),
        (FinishedLoad([sample()], 1.4), True),
    ],
)
def test_a_latency_beyond_the_load_is_refused(load, ok, config):
    checks = samples.check_load(load, config.model_copy(update={"num_prompts": 1, "osl": 10}))
    assert all(check.ok for check in checks) == ok
    assert ok or not next(check for check in checks if check.name == "times are possible").ok


def test_the_terminal_shows_failed_and_passed(make_result, capsys, table):
    failed = make_result(
        passed=False, metrics=None, checks=[{"name": "x", "ok": False, "told": "it lied"}], requests=[]
    )
    report.print_results([make_result(), failed], table.figures)
    output = capsys.readouterr().err
    assert "cited, not measured here" in output
    assert "it lied" in output


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("echo 'NVIDIA GB10, 580.95.05'", ["NVIDIA GB10, 580.95.05"]),
        ("echo NVIDIA-SMI has failed; exit 9", []),
        ("", []),
    ],
)
def test_gpus_are_named_where_there_are_any(tmp_path, monkeypatch, script, wanted):
    if script:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert context.facts()["gpus"] == wanted
