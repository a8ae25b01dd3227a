"""A server that answers wrongly gives a failed check and no figures; the client does not hang or divide by zero."""

from dataclasses import replace

import pytest
from expected import refused

from sparkforge.bench import gate
from sparkforge.core.errors import ServerError

LIES = {
    "no tokens": "HTTP 200 without a token", "only pings": "not answered within 1 s",
    "truncated": "the stream ended without [DONE]", "silent": "silence for too long", "endless": "more than",
    "hangs up": "the stream broke off", "an error in the stream": "engine died",
    "no JSON": "a stream event is not JSON", "no usage": "no usage counts",
}  # fmt: skip


def reasons(bench, config, **changes):
    result = bench.measure(config.model_copy(update=changes), lambda _: None)
    assert not result.passed
    assert result.ratios == []
    return " | ".join(result.reasons), result


@pytest.mark.slow
@pytest.mark.parametrize(("lie", "reason"), LIES.items())
def test_a_broken_stream_fails_every_request(stub, bench, config, lie, reason):
    stub.lie = lie
    silence = 0.3 if lie == "silent" else 60.0
    answer = 1.0 if lie == "only pings" else 60.0
    patience = {"endpoint": replace(bench.endpoint, read_seconds=silence), "seconds": answer}
    text, result = reasons(replace(bench, **patience), config)
    assert "6 of 6 requests failed" in text
    assert reason in text
    assert result.metrics is None
    assert result.requests == []


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("too many counted", "answers have the wrong length: 320 tokens, not 8"),
        ("too few counted", "answers have the wrong length: 1 tokens, not 8"),
        ("prompts cut", "the server counted 18 prompt tokens where 144 were sent"),
        ("its counter stands still", "its counter rose by 0, its answers claim 48"),
    ],
)
def test_figures_that_contradict_each_other_are_refused(stub, bench, config, lie, reason):
    stub.lie = lie
    assert reason in reasons(bench, config)[0]


def test_tokens_without_pieces_and_a_server_that_is_gone_are_refused(stub, bench, config):
    stub.lie = "bundled"
    text, _ = reasons(bench, config, osl=64)
    assert "the server counted 64 tokens and sent 1 pieces" in text
    gone = replace(bench, endpoint=replace(bench.endpoint, url="http://127.0.0.1:9"))
    assert "does not answer" in reasons(gone, config)[0]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_refused_requests_are_failed_ones_and_not_tried_again(stub, bench, config, status):
    stub.status, stub.fail_from = status, 3
    text, result = reasons(bench, config, warmups=0)
    assert f"3 of 6 requests failed; most often: HTTP {status}" in text
    assert result.metrics.completed == 3
    assert stub.asked["/v1/completions"] == 6


@pytest.mark.parametrize("osl", [8, 1])
def test_an_honest_server_passes(stub, bench, config, osl):
    result = bench.measure(config.model_copy(update={"osl": osl}), lambda _: None)
    assert result.passed, result.reasons
    m = result.metrics
    assert (m.completed, m.total_input_tokens, m.total_output_tokens) == (6, 6 * 24, 6 * osl)
    assert m.total_token_throughput == pytest.approx(6 * (24 + osl) / m.duration_s)
    assert (m.tpot_ms is None, m.interactivity is None, len(result.requests)) == (osl == 1, osl == 1, 6)


def test_a_load_is_the_same_for_the_same_seed_and_asks_for_whole_answers(stub, bench, config):
    for seed in (0, 0, 1):
        bench.measure(config.model_copy(update={"seed": seed, "warmups": 0}), lambda _: None)
    loads = [body for _, body, _ in stub.bodies if body.get("stream")]
    first, second, third = (sorted(body["prompt"] for body in loads[at : at + 6]) for at in (0, 6, 12))
    assert first == second != third
    assert len({tuple(prompt) for prompt in first}) == 6  # all prompts differ
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["max_tokens"] == 8 for body in loads)


def test_a_server_that_does_not_tokenize_is_neither_scored_nor_loaded(stub, bench, config, endpoint, table, passage):
    stub.tokenizes = False
    result = bench.measure(config, lambda _: None)
    assert "does not tokenize" in result.reasons[0]
    with pytest.raises(ServerError, match="does not tokenize"):
        gate.run(endpoint, table, passage)
    assert stub.asked["/v1/completions"] == 0


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("NaN logprobs", "1 of 511 logprobs are not finite"),
        ("positive logprobs", "above 0 (0.5)"),
        ("fewer logprobs", "512 tokens were sent and 508 scored"),
        ("no logprobs", "the server echoes no prompt logprobs"),
        ("a refused chunk", "chunk 2 of 2: /v1/completions answered 500"),
    ],
)
def test_the_gate_fails_on_invalid_scores(stub, endpoint, table, passage, lie, reason):
    stub.lie = lie
    if lie == "a refused chunk":
        stub.status, stub.fail_from = 500, 1
    verdict = gate.run(endpoint, table, passage)
    assert not verdict.passed
    assert reason in verdict.checks[0].told
    with refused("benchmark.gate", "nothing was timed"):
        gate.require(verdict)
