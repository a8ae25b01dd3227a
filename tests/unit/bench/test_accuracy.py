"""The gate's figures on hand-made numbers, its thresholds and canaries."""

import hashlib
import math
import tomllib

import pytest
from expected import refused

from sparkforge.bench import accuracy, gate
from sparkforge.bench.accuracy import Score
from sparkforge.bench.baselines import AccuracyThreshold, Reference
from sparkforge.bench.gate import Passage, passage
from sparkforge.core.errors import UsageError
from sparkforge.models import tiny


@pytest.mark.parametrize(("total", "tokens"), [(-1e9, 10), (0.0, 0), (-math.inf, 10)])
def test_hopeless_scores_are_infinite_and_fail(total, tokens):
    score = Score(total, tokens, 100)
    assert score.metrics["word_perplexity"] == math.inf
    limits = {"word_perplexity": 1e300}
    threshold = AccuracyThreshold(model="*", text="t", at_most=limits, source="s", date="2026-11-21")
    assert not gate.check_score(score, threshold, "")[0].ok


def test_the_served_score_is_the_sum_over_chunks_of_512_tokens(stub, endpoint, passage):
    score = accuracy.score(endpoint, passage.text)
    asked = [body for path, body, _ in stub.bodies if path == "/v1/completions"]
    assert [len(body["prompt"]) for body in asked] == [512, len(passage.text) - 512]
    assert all(body["echo"] and body["logprobs"] for body in asked)
    assert score.tokens == len(passage.text) - 2  # the first token of each chunk and the generated token are not scored
    assert score.total == pytest.approx(-0.5 * score.tokens)
    assert score.metrics["bits_per_byte"] == pytest.approx(0.5 * score.tokens / len(passage.text) / math.log(2))


def test_a_worse_model_fails_with_metric_and_difference(stub, endpoint, table, passage):
    stub.logprob = -4.0
    verdict = gate.run(endpoint, table, passage)
    with refused("benchmark.gate") as caught:
        gate.require(verdict)
    assert "bits_per_byte is 5.7564 and must be ≤ 3.4293: off by 2.3271 (67.9%)" in caught.value.why


def test_upper_and_lower_limits_are_distinguished(stub, endpoint, table, passage, capsys):
    scored = len(passage.text) - 2
    size = len(passage.text)
    known = Reference(precision="float32", nats=scored / 2, tokens=scored, size=size, within=0.5, why="a test")
    row = AccuracyThreshold(model="*", text="persuasion-24", reference=known, source="s", date="2026-11-21")
    verdict = gate.run(endpoint, table.model_copy(update={"gates": [row]}), passage)
    gate.print_gate(verdict)
    printed = capsys.readouterr().err
    assert "✓ bits_per_byte, upper limit: 0.7195 ≤ 1.0793" in printed
    assert "✓ bits_per_byte, lower limit: 0.7195 ≥ 0.3598" in printed
    assert "limits: the model's own reference in float32, ± 50.0% of its nats (a test)" in printed
    assert "sanity" not in printed


@pytest.mark.parametrize(
    ("bits", "failed"),
    [
        (1.4138, set()),  # bfloat16 in vLLM
        (1.456, {("bits_per_byte", "upper"), ("byte_perplexity", "upper"), ("word_perplexity", "upper")}),
        (1.39, {("bits_per_byte", "lower")}),
    ],
)
def test_the_tiny_model_is_compared_with_its_float32_figures(table, bits, failed):
    threshold = table.threshold("tiny-gpt-oss", "persuasion-24")
    assert threshold.reference.weights_sha256 == hashlib.sha256(tiny.FILE.read_bytes()).hexdigest()
    score = Score(-bits * math.log(2) * 9000, 1859, 9000)
    checks = gate.check_score(score, threshold, "")
    assert {(check.name, check.bound) for check in checks if not check.ok} == failed
    assert len(checks) == 4


def test_without_a_threshold_there_is_no_verdict_and_a_recorded_row_is_one_that_passes(endpoint, table, passage):
    with refused("benchmark.undecided", "no threshold"):
        gate.run(endpoint, table, Passage("another-text", "words"))
    verdict = gate.run(endpoint, table, passage)
    text = gate.threshold_row("org/Honest-Model", verdict, len(passage.text.encode()), "2026-11-21")
    (row,) = (AccuracyThreshold(**row) for row in tomllib.loads(text)["gates"])
    assert row.model == "honest-model"
    assert row.bounds("")[0][1] == pytest.approx(verdict.bits_per_byte * 1.03, rel=1e-3)
    assert gate.run(endpoint, table.model_copy(update={"gates": [row]}), passage).passed


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
    "the arguments are not JSON": ("tool_call", {"tool_arguments": '{"city": '}),
    "the arguments name no city": ("tool_call", {"tool_arguments": "{}"}),
    "which was not offered": ("tool_call", {"tool_name": "rm"}),
    "does not have the API's form": ("answers", {"lie": "no choices"}),
}


@pytest.mark.parametrize(("fault", "name", "changes"), [(fault, *row) for fault, row in BROKEN.items()])
def test_a_canary_says_what_is_wrong(stub, endpoint, fault, name, changes):
    assert [check.told for check in gate.ask_canaries(endpoint, list(gate.CANARIES))] == ["correct"] * 4
    vars(stub).update(changes)
    check = gate.ask_canaries(endpoint, [name])[0]
    assert not check.ok
    assert fault in check.told
