"""The gate's figures by hand-made numbers, its thresholds, its canaries."""

import hashlib
import math

import httpx
import pytest

from sparkforge.bench import accuracy, canary, gate
from sparkforge.bench.accuracy import Score
from sparkforge.bench.baselines import AccuracyThreshold
from sparkforge.bench.gate import Passage, passage
from sparkforge.core.errors import BenchmarkError, UsageError


def test_the_competitions_three_figures_fit_together():
    """2.0558, 4.1577 and 222.7893 are one and the same sum over bytes and over tokens."""
    size, tokens = 379_390, 100_000
    score = Score(-math.log(222.7893) * tokens, tokens, size)
    assert score.metrics["word_perplexity"] == pytest.approx(222.7893)
    assert score.metrics["byte_perplexity"] == pytest.approx(4.1577, rel=1e-4)
    assert score.metrics["bits_per_byte"] == pytest.approx(2.0558, abs=1e-4)
    assert math.log2(4.1577) == pytest.approx(2.0558, abs=1e-4)


@pytest.mark.parametrize(("total", "tokens"), [(-1e9, 10), (0.0, 0), (-math.inf, 10)])
def test_hopeless_scores_are_infinite_and_fail(total, tokens):
    score = Score(total, tokens, 100)
    assert score.metrics["word_perplexity"] == math.inf
    threshold = AccuracyThreshold(
        model="*", text="t", at_most={"word_perplexity": 1e300}, source="s", date="2026-11-21"
    )
    assert not gate.check_score(score, threshold)[0].ok


def test_the_served_score_is_the_sum_over_chunks_of_512_tokens(stub, endpoint, passage):
    score = accuracy.score(endpoint, passage.text)
    asked = [body for path, body, _ in stub.bodies if path == "/v1/completions"]
    assert [len(body["prompt"]) for body in asked] == [512, len(passage.text) - 512]
    assert all(body["echo"] and body["logprobs"] for body in asked)
    assert score.tokens == len(passage.text) - 2  # the first of each chunk is unscored, the generated one is left out
    assert score.total == pytest.approx(-0.5 * score.tokens)
    assert score.metrics["bits_per_byte"] == pytest.approx(0.5 * score.tokens / len(passage.text) / math.log(2))


def test_a_worse_model_fails_by_metric_and_how_much(stub, endpoint, table, passage):
    stub.logprob = -4.0
    verdict = gate.run(endpoint, table, passage)
    with pytest.raises(BenchmarkError, check=lambda error: error.code == "benchmark.gate") as caught:
        gate.require(verdict)
    assert "bits_per_byte is 5.7564 and must be ≤ 3.4293: off by 2.3271 (67.9%)" in caught.value.why


def test_upper_and_lower_limits_of_a_figure_are_told_apart(stub, endpoint, table, passage, capsys):
    row = AccuracyThreshold(
        model="*", text="persuasion-24", at_most={"bits_per_byte": 9}, at_least={"bits_per_byte": 0.1},
        source="s", date="2026-11-21",
    )  # fmt: skip
    verdict = gate.run(endpoint, table.model_copy(update={"gates": [row]}), passage)
    gate.print_gate(verdict)
    printed = capsys.readouterr().err
    assert "✓ bits_per_byte, upper limit: 0.7195 ≤ 9.0000" in printed
    assert "✓ bits_per_byte, lower limit: 0.7195 ≥ 0.1000" in printed
    assert [(check.bound, check.limit) for check in verdict.checks[:2]] == [("upper", 9.0), ("lower", 0.1)]
    assert "sanity" not in printed


def test_a_sanity_check_is_never_called_a_gate(endpoint, table, passage, capsys):
    gate.print_gate(gate.run(endpoint, table, passage))
    assert "a sanity check, no gate" in capsys.readouterr().err


def test_thresholds_hold_from_below_too():
    assert not gate.bounded("figure", 0.9, 0.91, upper=False).ok
    assert gate.bounded("figure", 0.91, 0.91, upper=False).ok
    assert not gate.bounded("x", math.nan, 0.91, upper=False).ok
    assert not gate.bounded("x", math.nan, 0.91, upper=True).ok


def test_without_a_threshold_there_is_no_verdict(endpoint, table):
    with pytest.raises(BenchmarkError, match="no threshold", check=lambda error: error.code == "benchmark.undecided"):
        gate.run(endpoint, table, Passage("another-text", "words"))


def test_a_recorded_row_is_a_threshold_that_passes(endpoint, table, passage, tmp_path):
    verdict = gate.run(endpoint, table, passage)
    row = gate.threshold_row("org/Honest-Model", verdict, "2026-11-21")
    assert 'model = "honest-model"' in row
    assert f"bits_per_byte = {verdict.bits_per_byte * 1.03:.4f}" in row


def test_texts_are_named_or_files(table, tmp_path):
    assert passage(table, "").name == "persuasion-24"
    (tmp_path / "mine.txt").write_text("words")
    sha256 = hashlib.sha256(b"words").hexdigest()
    assert passage(table, str(tmp_path / "mine.txt")) == Passage("mine", "words", sha256)
    (tmp_path / "empty.txt").write_text(" ")
    for wrong in ("no-such-name", str(tmp_path / "none.txt"), str(tmp_path / "empty.txt")):
        with pytest.raises(UsageError):
            passage(table, wrong)


BROKEN = {
    "content is None": ("content", {"content": None}),
    "no word in it": ("content", {"content": "!!!!!!"}),
    "the first token is ' the'": ("first_token", {"first": " the"}),
    "the arguments are no JSON": ("tool_call", {"tool_arguments": '{"city": '}),
    "the arguments name no city": ("tool_call", {"tool_arguments": "{}"}),
    "which was not offered": ("tool_call", {"tool_name": "rm"}),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_canary_says_what_is_wrong(stub, endpoint, fault):
    name, changes = BROKEN[fault]
    vars(stub).update(changes)
    check = canary.run(endpoint, [name])[0]
    assert not check.ok
    assert fault in check.told


def test_a_sound_harmony_server_passes_every_canary(endpoint):
    assert [check.told for check in canary.run(endpoint, list(canary.CANARIES))] == ["as it should be"] * 4


def test_an_answer_of_another_form_fails_a_canary(endpoint, monkeypatch):
    monkeypatch.setattr(httpx.Response, "json", lambda _: {"choices": []})
    assert "does not have the API's form" in canary.run(endpoint, ["answers"])[0].told
