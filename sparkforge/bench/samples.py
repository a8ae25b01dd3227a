"""Compute figures from finished requests, and check whether they are plausible.

The figures follow `vllm bench serve` (vllm/benchmarks/serve.py, 0.32.0).

ttft: time from sending a request to its first piece. itl: time between two pieces. e2el: time to the last piece.
tpot: (e2el - ttft) / (tokens - 1). Times start when a request is sent, not when it begins to wait for a slot.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sparkforge.bench.schema import Config, Metrics, Request, ResultCheck, Spread

PROMPT_SLACK = 0.05  # text prompts are tokenized again, and a template or a first token may be added
MOST_TOKENS_A_PIECE = 16  # speculative decoding sends several at once; above this, itl is meaningless


@dataclass
class Sample:
    """One request as its client saw it. Seconds; `start` counts from the load's begin; `pieces` are stream events."""

    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    pieces: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    wanted_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def row(self) -> Request:
        """Return the result's row for it, in milliseconds."""
        return Request(
            start_ms=round(self.start * 1000, 3),
            ttft_ms=round(self.ttft * 1000, 3),
            tpot_ms=None if self.tpot is None else round(self.tpot * 1000, 4),
            e2el_ms=round(self.latency * 1000, 3),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )


@dataclass(frozen=True)
class FinishedLoad:
    """A finished load: its samples and the seconds from its first request to its last piece."""

    samples: list[Sample]
    duration: float
    counted: float | None = None  # increase of the server's own token counter


def spread(seconds: Sequence[float]) -> Spread | None:
    """Return mean, median and 99th percentile in milliseconds; None for no value."""
    if not seconds:
        return None
    # Linear interpolation, which is numpy's default.
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    mean, median = statistics.fmean(seconds), statistics.median(seconds)
    return Spread(mean=mean * 1000, median=median * 1000, p99=p99 * 1000)


def compute_metrics(load: FinishedLoad, config: Config) -> Metrics | None:
    """Return the figures over the requests that finished; None if none did or no time passed."""
    answered = [sample for sample in load.samples if not sample.error]
    first, latency = spread([s.ttft for s in answered]), spread([s.latency for s in answered])
    if first is None or latency is None or load.duration <= 0:
        return None
    per_token = spread([s.tpot for s in answered if s.tpot is not None])
    sent, received = sum(s.prompt_tokens for s in answered), sum(s.output_tokens for s in answered)
    output, total = received / load.duration, (sent + received) / load.duration
    return Metrics(
        completed=len(answered),
        failed=len(load.samples) - len(answered),
        duration_s=load.duration,
        total_input_tokens=sent,
        total_output_tokens=received,
        output_throughput=output,
        total_token_throughput=total,
        tput_per_gpu=total / config.tp,
        output_tput_per_gpu=output / config.tp,
        interactivity=1000 / per_token.median if per_token and per_token.median > 0 else None,
        ttft_ms=first,
        tpot_ms=per_token,
        itl_ms=spread([gap for s in answered for gap in s.gaps]),
        e2el_ms=latency,
    )


def check_load(load: FinishedLoad, config: Config) -> list[ResultCheck]:
    """Return every check of a load; it passed if all are ok."""
    checks = list[ResultCheck]()

    def check(name: str, fault: str, detail: str, **figures: float) -> None:
        checks.append(ResultCheck.model_validate({"name": name, "ok": not fault, "told": fault or detail, **figures}))

    answered = [sample for sample in load.samples if not sample.error]
    errors = Counter(sample.error for sample in load.samples if sample.error)
    failed = errors.total() + config.num_prompts - len(load.samples)
    fault = f"{failed} of {config.num_prompts} requests failed" if failed else ""
    fault += f"; most often: {errors.most_common(1)[0][0]}" if errors else ""
    check("every request was answered", fault, f"{config.num_prompts} of them", value=failed, limit=0)
    if not answered:
        return checks

    # ignore_eos is set, so every answer has the requested number of tokens.
    received = sum(sample.output_tokens for sample in answered)
    wrong = [sample for sample in answered if sample.output_tokens != sample.wanted_tokens]
    fault = f"{len(wrong)} answers have the wrong length: " if wrong else ""
    fault += f"{wrong[0].output_tokens} tokens, not {wrong[0].wanted_tokens}" if wrong else ""
    check("every answer has the length asked for", fault, f"{received} tokens")

    wanted, sent = config.isl * len(answered), sum(sample.prompt_tokens for sample in answered)
    far = abs(sent - wanted) > max(PROMPT_SLACK, config.random_range_ratio) * wanted
    fault = f"the server counted {sent} prompt tokens where {wanted} were sent" if far else ""
    check("every prompt has its length", fault, f"{sent} tokens", value=sent, limit=wanted)

    # At least one piece for every few tokens, and no piece without a token, except for the last.
    wrong = [s for s in answered if s.output_tokens > MOST_TOKENS_A_PIECE * s.pieces or s.pieces > s.output_tokens + 1]
    counts = f"{wrong[0].output_tokens} tokens and sent {wrong[0].pieces} pieces" if wrong else ""
    fault = f"the server counted {counts} ({len(wrong)} answers)" if wrong else ""
    check("pieces and counted tokens agree", fault, f"{sum(sample.pieces for sample in answered)} pieces")

    longest = load.duration * 1.01 + 0.1
    possible = load.duration > 0 and all(0 < sample.ttft <= sample.latency <= longest for sample in answered)
    fault = "" if possible else f"a latency does not fit into {load.duration:.3f} s"
    check("times are possible", fault, f"{load.duration:.2f} s")

    if load.counted is not None:
        rise = f"its counter rose by {load.counted:.0f}"
        fault = f"{rise}, its answers claim {received}" if load.counted < received else ""
        check("the server's own counter agrees", fault, rise, value=received, limit=load.counted)
    return checks
