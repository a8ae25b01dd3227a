"""Whether a load's figures can be believed. A server that lies, or broke, must not get a figure into a table."""

from __future__ import annotations

from collections import Counter

from bench.samples import Load, Sample
from bench.schema import Check, Config

PROMPT_SLACK = 0.05  # prompts as text are tokenized again, and a template or a first token may be added
MOST_TOKENS_A_PIECE = 16  # speculative decoding sends several at once; above this, latencies by piece mean nothing


def judge(load: Load, config: Config) -> list[Check]:
    """Return every check of a load; it passed if all are ok."""
    done = [sample for sample in load.samples if not sample.error]
    if not done:
        return [all_done(load, config)]
    checks = [all_done(load, config), answers_whole(done), prompts_whole(done, config), pieces_fit(done), clock(load)]
    return checks if load.counted is None else [*checks, counter_fits(done, load.counted)]


def all_done(load: Load, config: Config) -> Check:
    """Every request was answered to its end."""
    errors = Counter(sample.error for sample in load.samples if sample.error)
    failed = errors.total() + config.num_prompts - len(load.samples)
    most = f"; most often: {errors.most_common(1)[0][0]}" if errors else ""
    told = f"{failed} of {config.num_prompts} requests failed{most}" if failed else f"{config.num_prompts} of them"
    return Check(name="every request was answered", ok=failed == 0, told=told, value=float(failed), limit=0.0)


def answers_whole(done: list[Sample]) -> Check:
    """Every answer has the tokens asked for, since ignore_eos is set."""
    wrong = [sample for sample in done if sample.output_tokens != sample.wanted_tokens]
    told = f"{sum(s.output_tokens for s in done)} tokens"
    if wrong:
        first = wrong[0]
        told = f"{len(wrong)} answers have another length: {first.output_tokens} tokens, not {first.wanted_tokens}"
    return Check(name="every answer has the length asked for", ok=not wrong, told=told)


def prompts_whole(done: list[Sample], config: Config) -> Check:
    """Prompts were as long as the shape says, all together."""
    wanted, sent = config.isl * len(done), sum(sample.prompt_tokens for sample in done)
    slack = max(PROMPT_SLACK, config.random_range_ratio)
    ok = abs(sent - wanted) <= slack * wanted
    told = f"{sent} tokens" if ok else f"the server counted {sent} prompt tokens where {wanted} were sent"
    return Check(name="every prompt has its length", ok=ok, told=told, value=float(sent), limit=float(wanted))


def pieces_fit(done: list[Sample]) -> Check:
    """The tokens that the server counts are the ones it sent: at least one piece a few tokens, no piece without one."""
    few = [s for s in done if s.output_tokens > MOST_TOKENS_A_PIECE * s.pieces]
    many = [s for s in done if s.pieces > s.output_tokens + 1]  # the last piece may be empty
    told = f"{sum(s.pieces for s in done)} pieces"
    if wrong := [*few, *many]:
        worst = wrong[0]
        told = f"the server counted {worst.output_tokens} tokens and sent {worst.pieces} pieces ({len(wrong)} answers)"
    return Check(name="pieces and counted tokens agree", ok=not wrong, told=told)


def clock(load: Load) -> Check:
    """Times go forward."""
    ok = load.duration > 0 and all(
        0 < s.ttft <= s.latency <= load.duration * 1.01 + 0.1 for s in load.samples if not s.error
    )
    told = f"{load.duration:.2f} s" if ok else f"a latency does not fit into {load.duration:.3f} s"
    return Check(name="times are possible", ok=ok, told=told)


def counter_fits(done: list[Sample], counted: float) -> Check:
    """The server's own counter rose by at least what its answers claim."""
    claimed = sum(sample.output_tokens for sample in done)
    ok = counted >= claimed
    told = f"its counter rose by {counted:.0f}" + ("" if ok else f", its answers claim {claimed}")
    return Check(name="the server's own counter agrees", ok=ok, told=told, value=float(claimed), limit=float(counted))
