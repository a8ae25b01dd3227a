"""The accuracy gate: a text's score and canaries. Nothing is timed before it passes.

Canaries are single requests whose answers are checked; they detect a broken gpt-oss earlier than the score does. The
first symptom of a wrong kernel is the first token of an answer (vLLM issue 37030: it must be `<|channel|>`), the next
ones are null content and tool calls that are not JSON.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparkforge import pins
from sparkforge.bench import accuracy
from sparkforge.bench import text as texts
from sparkforge.bench.baselines import AccuracyThreshold, Baselines, matches
from sparkforge.bench.schema import Gate, ResultCheck, finite
from sparkforge.core.console import say
from sparkforge.core.errors import BenchmarkError, ServerError, UsageError
from sparkforge.core.files import read_text
from sparkforge.core.openai import Endpoint, last_part
from sparkforge.serve import proof


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
    """Score the text, send the canaries, and return the verdict. Raises BenchmarkError if there is no threshold.

    Raises ServerError for a server that does not tokenize.
    """
    threshold = baselines.threshold(endpoint.model, text.name)
    if threshold is None:
        failure = f"no threshold is known for {endpoint.model} on {text.name}"
        fix = "without --text   # or add a row to sparkforge/bench/baselines.toml, with --record"
        raise BenchmarkError(failure, "a gate without a threshold would pass anything", fix, code="benchmark.undecided")
    start = time.monotonic()
    score = accuracy.score(endpoint, text.text)
    # No canaries for a server that cannot score, because each request could last until the timeout.
    asked = next((row.ask for row in baselines.canaries if matches(row.model, endpoint.model)), [])
    canaries = [] if score.faults else ask_canaries(endpoint, asked)
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
    """Return the check of a figure against an upper or a lower limit; NaN fails."""
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
    """Return a TOML row with the gate's score as the reference for `model`; the text has `size` bytes."""
    name, nats = last_part(model), (gate.bits_per_byte or 0) * accuracy.LN2 * size
    return (
        f'[[gates]]\nmodel = "{name}"\ntext = "{gate.text}"\nreference = {{ precision = "its serving format", '
        f'nats = {nats:.2f}, tokens = {gate.tokens}, size = {size}, within = 0.03, why = "a round figure" }}\n'
        f'source = "measured: ./inv bench.acc --text {gate.text} --record"\ndate = "{date}"\n'
    )


TOKENS = 512  # enough for a short answer after low-effort reasoning
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
HARMONY = "<|start|>user<|message|>What is the capital of France?<|end|><|start|>assistant"  # openai/harmony's format


def ask_canaries(endpoint: Endpoint, names: Sequence[str]) -> list[ResultCheck]:
    """Send every canary of `names` and return a check for each."""
    checks = []
    for name in names:
        try:
            fault = CANARIES[name](endpoint)
        except ServerError as error:
            fault = f"{error.what}: {error.why}"
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            fault = f"the answer does not have the API's form ({error!r})"
        checks.append(ResultCheck(name=f"canary: {name}", ok=not fault, told=fault or "correct"))
    return checks


def answers(endpoint: Endpoint) -> str:
    """Return the fault of a chat answer that lacks the API's form or counts no token; empty for none."""
    response = endpoint.chat(ASK, max_tokens=16, temperature=0)
    counted = response["usage"]["completion_tokens"]
    role = response["choices"][0]["message"]["role"]
    return "" if role == "assistant" and 1 <= counted <= 16 else f"role {role!r}, {counted} of 16 tokens"


def first_token(endpoint: Endpoint) -> str:
    """Return the fault if the first token after a Harmony prompt does not open a channel; empty for none."""
    response = endpoint.complete(HARMONY, max_tokens=1, temperature=0, skip_special_tokens=False)
    text = response["choices"][0]["text"]
    return "" if text == "<|channel|>" else f"the first token is {text!r}, not '<|channel|>'"


def content(endpoint: Endpoint) -> str:
    """Return the fault of a chat answer whose content has no letter; empty for none."""
    choice = endpoint.chat(ASK, max_tokens=TOKENS, temperature=0)["choices"][0]
    text = choice["message"]["content"]
    if text is None or not text.strip():
        return f"content is {text!r} (finish_reason {choice.get('finish_reason')!r})"
    return "" if any(letter.isalpha() for letter in text) else f"content is {text[:60]!r}: no word in it"


def tool_call(endpoint: Endpoint) -> str:
    """Return the fault of an answer that does not call the offered tool with a city, in JSON; empty for none."""
    response = endpoint.chat(proof.ASK, tools=[proof.TOOL], max_tokens=TOKENS, temperature=0)
    return proof.tool_call_fault(response["choices"][0]["message"])


CANARIES = {question.__name__: question for question in (answers, first_token, content, tool_call)}
