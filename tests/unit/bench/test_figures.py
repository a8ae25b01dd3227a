"""From samples to figures, against numbers that can be checked by hand and against numpy's percentile."""

import pytest

from sparkforge.bench import samples
from sparkforge.bench.samples import FinishedLoad, Sample


def sample(**changes):
    values = {"ttft": 0.5, "latency": 1.4, "gaps": [0.1] * 9, "pieces": 10, "prompt_tokens": 24, "output_tokens": 10}
    return Sample(**{**values, "wanted_tokens": 10, **changes})


def test_figures_follow_vllms_definitions(config):
    load = FinishedLoad([sample(), sample(ttft=0.3, latency=1.2)], 2.0)
    figures = samples.compute_metrics(load, config.model_copy(update={"tp": 2}))
    assert figures.tpot_ms.median == pytest.approx(100)  # (1.4 - 0.5) / 9
    assert figures.interactivity == pytest.approx(10)
    assert (figures.ttft_ms.median, figures.ttft_ms.p99) == pytest.approx((400, 498))  # numpy's percentile
    assert figures.e2el_ms.mean == pytest.approx(1300)
    assert figures.output_throughput == pytest.approx(10)
    assert figures.total_token_throughput == pytest.approx(34)
    assert figures.tput_per_gpu == pytest.approx(17)
    impossible = samples.check_load(FinishedLoad([sample(latency=9.0)], 1.0), config)
    assert not next(check for check in impossible if check.name == "times are possible").ok


@pytest.mark.parametrize(
    "load", [FinishedLoad([], 0.0), FinishedLoad([sample(error="x")], 1.0), FinishedLoad([sample()], 0.0)]
)
def test_nothing_is_divided_by_nothing(load, config):
    assert samples.compute_metrics(load, config) is None
    assert not all(check.ok for check in samples.check_load(load, config))
