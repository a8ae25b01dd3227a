"""Send prompts of random tokens to a server whose model has random weights, and measure rates and times."""

from __future__ import annotations

import random
import statistics
from typing import Any

from sparkforge.bench.load import Prompt, require_answers, send
from sparkforge.core.openai import Endpoint

VOCABULARY = 199998  # ordinary tokens of gpt-oss; the special ones lie above


def measure(
    endpoint: Endpoint,
    concurrency: int,
    requests: int,
    input_tokens: int,
    output_tokens: int,
    seconds: float,
) -> dict[str, Any]:
    """Keep `concurrency` requests in flight until `requests` are done; return rates and median times in ms.

    Prompts of different concurrencies or lengths have no common prefix, so that a prefix cache does not help.
    Raises ServerError if a request fails or is not answered within `seconds`.
    """
    rng = random.Random(f"measured {concurrency} {input_tokens}")  # noqa: S311 (prompts, not secrets)
    prompts = [Prompt([rng.randrange(VOCABULARY) for _ in range(input_tokens)], output_tokens) for _ in range(requests)]
    load = require_answers(send(endpoint, prompts, concurrency, seconds))
    return {
        "concurrency": concurrency,
        "requests": requests,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "seconds": round(load.duration, 3),
        "output_tokens_per_s": round(sum(sample.output_tokens for sample in load.samples) / load.duration, 1),
        "ttft_ms": round(1000 * statistics.median(sample.ttft for sample in load.samples), 2),
        "tpot_ms": round(1000 * statistics.median(s.tpot for s in load.samples if s.tpot is not None), 3),
        "complete": all(sample.output_tokens == output_tokens for sample in load.samples),
    }
