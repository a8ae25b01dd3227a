"""Checks whether a load's figures can be true. A server that lies, or broke, must not get a figure into a table."""

from __future__ import annotations

from collections import Counter

from sparkforge.bench.samples import FinishedLoad
from sparkforge.bench.schema import Config, ResultCheck

PROMPT_SLACK = 0.05  # prompts as text are tokenized again, and a template or a first token may be added
MOST_TOKENS_A_PIECE = 16  # speculative decoding sends several at once; above this, latencies by piece mean nothing


def check_load(load: FinishedLoad, config: Config) -> list[ResultCheck]:
    """Return every check of a load; it passed if all are ok."""
    answered = [sample for sample in load.samples if not sample.error]
    errors = Counter(sample.error for sample in load.samples if sample.error)
    failed = errors.total() + config.num_prompts - len(load.samples)
    detail = f"{failed} of {config.num_prompts} requests failed" if failed else f"{config.num_prompts} of them"
    detail += f"; most often: {errors.most_common(1)[0][0]}" if errors else ""
    checks = [
        ResultCheck(name="every request was answered", ok=not failed, told=detail, value=float(failed), limit=0.0)
    ]
    if not answered:
        return checks

    # ignore_eos is set, so every answer has the tokens asked for.
    received = sum(sample.output_tokens for sample in answered)
    wrong = [sample for sample in answered if sample.output_tokens != sample.wanted_tokens]
    detail = f"{received} tokens"
    if wrong:
        lengths = f"{wrong[0].output_tokens} tokens, not {wrong[0].wanted_tokens}"
        detail = f"{len(wrong)} answers have another length: {lengths}"
    checks.append(ResultCheck(name="every answer has the length asked for", ok=not wrong, told=detail))

    wanted, sent = config.isl * len(answered), sum(sample.prompt_tokens for sample in answered)
    ok = abs(sent - wanted) <= max(PROMPT_SLACK, config.random_range_ratio) * wanted
    detail = f"{sent} tokens" if ok else f"the server counted {sent} prompt tokens where {wanted} were sent"
    name = "every prompt has its length"
    checks.append(ResultCheck(name=name, ok=ok, told=detail, value=float(sent), limit=float(wanted)))

    # At least one piece for a few tokens, and no piece without one, except for the last.
    wrong = [s for s in answered if s.output_tokens > MOST_TOKENS_A_PIECE * s.pieces or s.pieces > s.output_tokens + 1]
    detail = f"{sum(sample.pieces for sample in answered)} pieces"
    if wrong:
        counts = f"{wrong[0].output_tokens} tokens and sent {wrong[0].pieces} pieces"
        detail = f"the server counted {counts} ({len(wrong)} answers)"
    checks.append(ResultCheck(name="pieces and counted tokens agree", ok=not wrong, told=detail))

    longest = load.duration * 1.01 + 0.1
    ok = load.duration > 0 and all(0 < sample.ttft <= sample.latency <= longest for sample in answered)
    detail = f"{load.duration:.2f} s" if ok else f"a latency does not fit into {load.duration:.3f} s"
    checks.append(ResultCheck(name="times are possible", ok=ok, told=detail))

    if load.counted is not None:
        ok = load.counted >= received
        detail = f"its counter rose by {load.counted:.0f}" + ("" if ok else f", its answers claim {received}")
        name = "the server's own counter agrees"
        checks.append(ResultCheck(name=name, ok=ok, told=detail, value=float(received), limit=load.counted))
    return checks
