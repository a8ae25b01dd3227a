"""Checks whether a load's figures can be true. A server that lies, or broke, must not get a figure into a table."""

from __future__ import annotations

from collections import Counter

from sparkforge.bench.samples import FinishedLoad, Sample
from sparkforge.bench.schema import Config, ResultCheck

PROMPT_SLACK = 0.05  # prompts as text are tokenized again, and a template or a first token may be added
MOST_TOKENS_A_PIECE = 16  # speculative decoding sends several at once; above this, latencies by piece mean nothing


def check_load(load: FinishedLoad, config: Config) -> list[ResultCheck]:
    """Return every check of a load; it passed if all are ok."""
    answered = [sample for sample in load.samples if not sample.error]
    if not answered:
        return [check_answered(load, config)]
    checks = [
        check_answered(load, config),
        check_answer_lengths(answered),
        check_prompt_lengths(answered, config),
        check_pieces(answered),
        check_times(load),
    ]
    return checks if load.counted is None else [*checks, check_counter(answered, load.counted)]


def check_answered(load: FinishedLoad, config: Config) -> ResultCheck:
    """Every request was answered to its end."""
    errors = Counter(sample.error for sample in load.samples if sample.error)
    failed = errors.total() + config.num_prompts - len(load.samples)
    most = f"; most often: {errors.most_common(1)[0][0]}" if errors else ""
    detail = f"{failed} of {config.num_prompts} requests failed{most}" if failed else f"{config.num_prompts} of them"
    return ResultCheck(name="every request was answered", ok=failed == 0, told=detail, value=float(failed), limit=0.0)


def check_answer_lengths(answered: list[Sample]) -> ResultCheck:
    """Every answer has the tokens asked for, since ignore_eos is set."""
    wrong = [sample for sample in answered if sample.output_tokens != sample.wanted_tokens]
    detail = f"{sum(s.output_tokens for s in answered)} tokens"
    if wrong:
        first = wrong[0]
        detail = f"{len(wrong)} answers have another length: {first.output_tokens} tokens, not {first.wanted_tokens}"
    return ResultCheck(name="every answer has the length asked for", ok=not wrong, told=detail)


def check_prompt_lengths(answered: list[Sample], config: Config) -> ResultCheck:
    """Prompts were as long as the shape says, all together."""
    wanted, sent = config.isl * len(answered), sum(sample.prompt_tokens for sample in answered)
    slack = max(PROMPT_SLACK, config.random_range_ratio)
    ok = abs(sent - wanted) <= slack * wanted
    detail = f"{sent} tokens" if ok else f"the server counted {sent} prompt tokens where {wanted} were sent"
    return ResultCheck(name="every prompt has its length", ok=ok, told=detail, value=float(sent), limit=float(wanted))


def check_pieces(answered: list[Sample]) -> ResultCheck:
    """The tokens that the server counts are the ones it sent: at least one piece a few tokens, no piece without one."""
    sparse = [s for s in answered if s.output_tokens > MOST_TOKENS_A_PIECE * s.pieces]
    excess = [s for s in answered if s.pieces > s.output_tokens + 1]  # the last piece may be empty
    detail = f"{sum(s.pieces for s in answered)} pieces"
    if wrong := [*sparse, *excess]:
        worst = wrong[0]
        detail = (
            f"the server counted {worst.output_tokens} tokens and sent {worst.pieces} pieces ({len(wrong)} answers)"
        )
    return ResultCheck(name="pieces and counted tokens agree", ok=not wrong, told=detail)


def check_times(load: FinishedLoad) -> ResultCheck:
    """Times go forward."""
    ok = load.duration > 0 and all(
        0 < s.ttft <= s.latency <= load.duration * 1.01 + 0.1 for s in load.samples if not s.error
    )
    detail = f"{load.duration:.2f} s" if ok else f"a latency does not fit into {load.duration:.3f} s"
    return ResultCheck(name="times are possible", ok=ok, told=detail)


def check_counter(answered: list[Sample], counted: float) -> ResultCheck:
    """The server's own counter rose by at least what its answers claim."""
    claimed = sum(sample.output_tokens for sample in answered)
    ok = counted >= claimed
    detail = f"its counter rose by {counted:.0f}" + ("" if ok else f", its answers claim {claimed}")
    return ResultCheck(
        name="the server's own counter agrees", ok=ok, told=detail, value=float(claimed), limit=float(counted)
    )
