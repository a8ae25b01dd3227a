"""A served model's score on a text: bits per byte, byte and word perplexity, from a prompt's log probabilities.

The definition is the gpt-oss competition's (accuracy_test_alternative.py, 2026-01-20). The text is split into chunks of
512 tokens. Each chunk is a prompt of a request with `echo` and `logprobs`, and its first token is not scored. With L
the sum of all log probabilities (logprobs, natural logarithm),

    bits_per_byte = -L / (bytes * ln 2)    byte_perplexity = e^(-L / bytes)    word_perplexity = e^(-L / tokens)

where bytes are those of the whole text and tokens are the scored ones, so a "word" is a token. There are two
differences. The competition's script also counts the token that the server generates after each chunk, a 512th of the
sum. It also leaves out a chunk that fails, which lowers the figures; here a failed chunk fails the gate.
"""

import math
from dataclasses import dataclass
from typing import Any

from sparkforge.core.errors import ServerError
from sparkforge.core.openai import Endpoint

CHUNK_TOKENS = 512
LN2 = math.log(2)


@dataclass(frozen=True)
class Score:
    """The score of a text of `size` bytes: `total` is the sum of `tokens` logprobs. With `faults` it is invalid."""

    total: float
    tokens: int
    size: int
    faults: tuple[str, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """The three figures; infinite if nothing was scored."""
        nats_per_byte = -self.total / self.size if self.size and self.tokens else math.inf
        nats_per_token = -self.total / self.tokens if self.tokens else math.inf
        perplexities = {"byte_perplexity": _exp(nats_per_byte), "word_perplexity": _exp(nats_per_token)}
        return {"bits_per_byte": nats_per_byte / LN2, **perplexities}


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def score(endpoint: Endpoint, text: str) -> Score:
    """Score `text` with one request per chunk. Raises ServerError for a server that does not tokenize."""
    tokens = tokenize(endpoint, text)
    chunks = [tokens[start : start + CHUNK_TOKENS] for start in range(0, len(tokens), CHUNK_TOKENS)]
    total, count, faults = 0.0, 0, list[str]()
    for number, chunk in enumerate(chunks, 1):
        try:
            logprobs = prompt_logprobs(endpoint.complete(chunk, max_tokens=1, temperature=0, logprobs=1, echo=True))
            fault = find_fault(logprobs, len(chunk))
        except ServerError as error:
            logprobs, fault = [], f"{error.what} ({error.why})"
        if fault:  # after one failure the other chunks are not sent
            faults.append(f"chunk {number} of {len(chunks)}: {fault}")
            break
        total, count = total + sum(logprobs), count + len(logprobs)
    return Score(total, count, len(text.encode()), tuple(faults))


def tokenize(endpoint: Endpoint, text: str) -> list[int]:
    """Return the token ids of a text. Raises ServerError for a server without vLLM's /tokenize."""
    if tokens := endpoint.tokenize(text):
        return tokens
    endpoint.get("/v1/models")  # raises another error if the server does not answer
    why = "chunks and prompts need its /tokenize, which does not work"
    failure = f"{endpoint.url} does not tokenize"
    raise ServerError(failure, why, "--help   # use a server that does, such as vLLM", code="server.reply")


def prompt_logprobs(answer: dict[str, Any]) -> list[float]:
    """Return all logprobs of a prompt except the first; NaN for a missing one. Raises ServerError if there are none."""
    try:
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        generated = int(answer["usage"]["completion_tokens"])
        prompt = values[1 : len(values) - generated]
        return [math.nan if value is None else float(value) for value in prompt]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        why = f"no choices[0].logprobs.token_logprobs ({error!r})"
        fix = "--help   # use a server with echo, such as vLLM"
        raise ServerError("the server echoes no prompt logprobs", why, fix, code="server.reply") from error


def find_fault(logprobs: list[float], sent: int) -> str:
    """Return the reason why the logprobs of a chunk of `sent` tokens cannot be right; empty if they can."""
    if len(logprobs) != sent - 1:
        return f"{sent} tokens were sent and {len(logprobs)} scored, not {sent - 1}"
    if wrong := [value for value in logprobs if not math.isfinite(value)]:
        return f"{len(wrong)} of {len(logprobs)} logprobs are not finite"
    if wrong := [value for value in logprobs if value > 1e-3]:  # rounding to float32 in vLLM can give 1e-7
        return f"{len(wrong)} of {len(logprobs)} logprobs are above 0 ({max(wrong):.3g}): no probabilities"
    return ""
