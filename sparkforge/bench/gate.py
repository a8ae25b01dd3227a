"""The accuracy gate: nothing is timed before it passes."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkforge import pins
from sparkforge.bench import accuracy, canary
from sparkforge.bench import text as texts
from sparkforge.bench.baselines import AccuracyThreshold, Baselines, matches
from sparkforge.bench.schema import Gate, ResultCheck, finite
from sparkforge.core.console import say
from sparkforge.core.errors import BenchmarkError, UsageError
from sparkforge.core.files import read_text
from sparkforge.core.openai import Endpoint, last_part


@dataclass(frozen=True)
class Passage:
    """A text to score, its name in the table of thresholds, and the sha256 of its file."""

    name: str
    text: str
    sha256: str = ""


def passage(baselines: Baselines, text_or_file: str, model: str = "") -> Passage:
    """Return a known text by its name, or the text of a file, named after the file without its suffix.

    The default is the model's own text. Raises UsageError, also for a file with the name of a known text, whose limits
    would apply, and InputError for a known text that is missing or damaged.
    """
    name = text_or_file or next(text for row, text in baselines.default_texts.items() if matches(row, model))
    packaged, pinned = {text.name: text for text in baselines.texts}, pins.load().texts
    if name in packaged:
        return Passage(name, packaged[name].read(), packaged[name].sha256)
    if name in pinned:
        return Passage(name, texts.read(name, pinned[name]), pinned[name].pinned_files[pinned[name].member].sha256)
    path, known, fix = Path(name), (*packaged, *pinned), "without --text"
    if not path.suffix:
        raise UsageError(f"there is no text {name}", f"the known texts are {', '.join(known)}", fix)
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the text {path}", str(error), fix) from error
    if not text.strip():
        raise UsageError(f"{path} is empty", "there is nothing to score", fix)
    if path.stem in known:
        why = "that is the name of a known text, whose limits would be used for this file"
        failure = f"the text {path} cannot be called {path.stem}"
        raise UsageError(failure, why, f"--text {path.stem}   # or rename the file")
    return Passage(path.stem, text, hashlib.sha256(text.encode()).hexdigest())


def run(endpoint: Endpoint, baselines: Baselines, text: Passage) -> Gate:
    """Score the text, ask the canaries, and return the verdict. Raises BenchmarkError without a threshold for them."""
    threshold = baselines.threshold(endpoint.model, text.name)
    if threshold is None:
        failure = f"no threshold is known for {endpoint.model} on {text.name}"
        fix = "without --text   # or add a row to sparkforge/bench/baselines.toml, with --record"
        raise BenchmarkError(failure, "a gate without a threshold would pass anything", fix, code="benchmark.undecided")
    start = time.monotonic()
    score = accuracy.score(endpoint, text.text)
    # No canaries for a server that cannot score, because each request could last until the timeout.
    asked = next((row.ask for row in baselines.canaries if matches(row.model, endpoint.model)), [])
    canaries = [] if score.faults else canary.run(endpoint, asked)
    checks = [*check_score(score, threshold, text.text), *canaries]
    return Gate(
        passed=all(check.ok for check in checks),
        checks=checks,
        text=text.name,
        text_sha256=text.sha256,
        chunked_by="tokens",
        **{name: finite(value) for name, value in score.metrics.items()},
        tokens=score.tokens,
        seconds=round(time.monotonic() - start, 3),
        sanity_only=threshold.reference is None,
        limits=threshold.limits,
        source=f"{threshold.source} ({threshold.date})",
    )


def check_score(score: accuracy.Score, threshold: AccuracyThreshold, text: str) -> list[ResultCheck]:
    """Return one check for each figure of the threshold, or the fault that makes the figures invalid."""
    if score.faults:
        return [ResultCheck(name="prompt logprobs", ok=False, told=fault) for fault in score.faults]
    return [bounded(name, score.metrics[name], limit, upper=upper) for name, limit, upper in threshold.bounds(text)]


def bounded(name: str, value: float, limit: float, *, upper: bool) -> ResultCheck:
    """Check a figure against a limit from above or below; NaN fails."""
    passed = value <= limit if upper else value >= limit
    sign, off = ("≤" if upper else "≥"), abs(value - limit)
    detail = f"{value:.4f} {sign} {limit:.4f}"
    if not passed:
        detail = f"{name} is {value:.4f} and must be {sign} {limit:.4f}: off by {off:.4f} ({off / abs(limit or 1):.1%})"
    bound: Literal["upper", "lower"] = "upper" if upper else "lower"
    return ResultCheck(name=name, ok=passed, told=detail, value=finite(value), limit=limit, bound=bound)


def require(gate: Gate) -> None:
    """Raise BenchmarkError unless the gate passed."""
    if not gate.passed:
        why = "\n        ".join(check.told for check in gate.checks if not check.ok)
        fix = "./inv logs   # look at the server's MoE backend; ./inv bench.acc shows every check"
        failure = "the served model failed the accuracy gate; nothing was timed"
        raise BenchmarkError(failure, why, fix, code="benchmark.gate")


def print_gate(gate: Gate) -> None:
    """Print every check and the figures."""
    for check in gate.checks:
        say(f"{'✓' if check.ok else '✗'} {check.label}: {check.told}")
    figures = (gate.bits_per_byte, gate.byte_perplexity, gate.word_perplexity)
    if None not in figures:
        bits, per_byte, per_word = figures
        say(f"  {gate.text}: {bits:.4f} bits/byte, byte perplexity {per_byte:.4f}, word perplexity {per_word:.4f}")
    say(f"  {'a sanity check, no gate' if gate.sanity_only else 'limits'}: {gate.limits}")


def threshold_row(model: str, gate: Gate, size: int, date: str) -> str:
    """Return a TOML row that makes the gate's score the reference for its model; the text has `size` bytes."""
    name, nats = last_part(model), (gate.bits_per_byte or 0) * accuracy.LN2 * size
    return (
        f'[[gates]]\nmodel = "{name}"\ntext = "{gate.text}"\nreference = {{ precision = "its serving format", '
        f'nats = {nats:.2f}, tokens = {gate.tokens}, size = {size}, within = 0.03, why = "a round figure" }}\n'
        f'source = "measured: ./inv bench.acc --text {gate.text} --record"\ndate = "{date}"\n'
    )
