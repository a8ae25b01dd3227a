"""What a load sends: prompts of known length that share no prefix, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.endpoint import Endpoint
from bench.schema import Config
from sparkforge.errors import ServerReplyError


@dataclass(frozen=True)
class Ask:
    """One request: a prompt (token ids, or text for a server that does not tokenize) and the answer's length."""

    prompt: list[int] | str
    prompt_tokens: int
    output_tokens: int


def make(endpoint: Endpoint, config: Config, text: str, count: int, seed: int) -> list[Ask]:
    """Return `count` requests drawn with `seed`: the tokens of `text` in random order, so that every id is valid.

    A server without /tokenize gets random words instead, as many as one measured request says make `isl` tokens.
    """
    rng = random.Random(seed)  # noqa: S311 (a load, no secret)
    tokens = endpoint.tokenize(text)
    lengths = [(_vary(rng, config.isl, config), _vary(rng, config.osl, config)) for _ in range(count)]
    if tokens is not None:
        return [Ask(rng.choices(tokens, k=isl), isl, osl) for isl, osl in lengths]
    words = sorted(set(text.split()))
    per_word = _tokens_per_word(endpoint, rng, words)
    return [Ask(" ".join(rng.choices(words, k=max(1, round(isl / per_word)))), isl, osl) for isl, osl in lengths]


def _vary(rng: random.Random, length: int, config: Config) -> int:
    """Return a length within the share around `length`, as vLLM 0.32.0 draws it (RandomDataset)."""
    share = config.random_range_ratio
    return max(1, rng.randint(round(length * (1 - share)), round(length * (1 + share))))


def _tokens_per_word(endpoint: Endpoint, rng: random.Random, words: list[str], count: int = 256) -> float:
    """Ask once how many tokens random words make. Raises ServerReplyError if the server does not count them."""
    answer = endpoint.complete(" ".join(rng.choices(words, k=count)), max_tokens=1, temperature=0)
    tokens = (answer.get("usage") or {}).get("prompt_tokens")
    if not isinstance(tokens, int) or tokens < count:
        why = f"{count} words are {tokens!r} tokens, it says"
        raise ServerReplyError("the server does not count prompts", why, "use a server that counts usage")
    return tokens / count
