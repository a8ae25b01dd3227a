"""From samples to figures, against numbers that can be checked by hand and against numpy's percentile."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkforge.bench import batch, context, report, samples, vllm_client
from sparkforge.bench.samples import FinishedLoad, Sample
from sparkforge.core.errors import BenchmarkError


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


def detailed(**changes):
    result = {
        "duration": 2.0,
        "start_times": [100.0, 100.5],
        "ttfts": [0.5, 0.5],
        "itls": [[0.1] * 7, [0.1] * 7],
        "input_lens": [24, 24],
        "output_lens": [8, 8],
        "errors": ["", ""],
    }
    return json.dumps({**result, **changes})


def test_vllms_detailed_file_gives_the_same_samples(tmp_path, config):
    (tmp_path / "result.json").write_text(detailed())
    load = vllm_client.parse(tmp_path / "result.json", config)
    assert [s.start for s in load.samples] == [0.0, 0.5]
    assert load.samples[0].latency == pytest.approx(1.2)
    assert load.samples[0].pieces == 8
    assert all(check.ok for check in samples.check_load(load, config.model_copy(update={"num_prompts": 2})))


def test_vllms_failed_requests_are_failed_ones(tmp_path, config):
    (tmp_path / "result.json").write_text(detailed(errors=["", "Traceback\nConnectionError: gone"], ttfts=[0.5, 0.0]))
    load = vllm_client.parse(tmp_path / "result.json", config)
    assert load.samples[1].error == "ConnectionError: gone"


@pytest.mark.parametrize("text", ["", "[]", "{}", detailed(ttfts=[1.0]), detailed(itls=None)])
def test_another_file_is_refused(tmp_path, config, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(BenchmarkError, match="vllm bench serve", check=lambda error: error.code == "benchmark.load"):
        vllm_client.parse(tmp_path / "result.json", config)


def test_a_tokenizer_in_the_hubs_cache_is_its_folder(tmp_path, monkeypatch):
    """Compose names the model that is served, which may be a repository; the container's cache is not the user's."""
    snapshot = tmp_path / "hub/models--openai--gpt-oss-20b/snapshots/c1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name, taken in (("openai/gpt-oss-20b", str(snapshot)), ("openai/none", "openai/none"), ("/tok", "/tok")):
        client = batch.choose_client("vllm", Path(sys.executable), name, 1.0)
        assert client.tokenizer == taken


def test_vllms_command_says_everything(tmp_path, config):
    arguments = vllm_client.command(tmp_path / "python", config, "/tok", tmp_path)
    options = dict(itertools.pairwise(arguments))
    assert options["--random-range-ratio"] == "0.0"
    assert (options["--max-concurrency"], options["--num-prompts"], options["--num-warmups"]) == ("2", "6", "1")
    assert (options["--random-input-len"], options["--random-output-len"], options["--tokenizer"]) == (
        "24",
        "8",
        "/tok",
    )
    assert {"--ignore-eos", "--save-detailed", "--save-result"} <= set(arguments)


FAKE = """#!/bin/sh
echo "$@" > args; {0}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo boom >&2; exit 3", "it ended with code 3"),
        ("sleep 60", "it had not ended after 1 s"),
        ("exit 0", "result file"),
    ],
)
def test_a_program_that_fails_or_hangs_is_an_error(tmp_path, config, endpoint, script, reason):
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(script))
    fake.chmod(0o755)
    with pytest.raises(BenchmarkError, check=lambda error: error.code == "benchmark.load") as caught:
        vllm_client.VllmClient(fake, "/tok", 1.0).run(endpoint, config, "", lambda _: None)
    assert reason in caught.value.why
    if "boom" in script:
        assert "boom" in caught.value.why


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
