"""Compares what a GPU's server makes of the random tiny checkpoint with what a CPU's server made of it.

`python -m lab.served.tiny_tokens record --url URL --out FILE` writes, on a CPU, the tokens generated
greedily and the log-probability of every token. `... check --url URL --against FILE --out FILE` asks
a server on a GPU for the same. It passes if the tokens are equal and log-probabilities agree within bfloat16's
precision.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from sparkforge.core.console import say
from sparkforge.core.files import write_json

GENERATED = 12
# Lengths below and above the sliding window of 128 tokens; 200006 begins a Harmony message. Of 624 prompts made so
# these are the most decisive: in float32 each of the 12 tokens is ahead of the next best by 0.22 or more, four times
# what bfloat16 moves a log-probability on average.
PROMPTS = [
    [200006, *((i * 7919 + seed * 104729) % 199998 for i in range(n))] for seed, n in ((195, 9), (73, 60), (30, 300))
]
MEAN = 0.15  # tests/integration/test_numerics.py holds vLLM in bfloat16 to the same bound against float32


def generate(client: httpx.Client, model: str, prompt: list[int]) -> list[int]:
    """Return the tokens that the server generates greedily after `prompt`."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": GENERATED, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    response = client.post("/v1/completions", json=body).raise_for_status().json()
    tokens: list[int] = response["choices"][0]["token_ids"]
    return tokens


def score(client: httpx.Client, model: str, tokens: list[int]) -> list[tuple[float, float]]:
    """Return for every token but the first its log-probability, and how far it is from the best at its place."""
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    response = client.post("/v1/completions", json=body).raise_for_status().json()
    scores = []
    for token, table in zip(tokens[1:], response["choices"][0]["prompt_logprobs"][1:], strict=True):
        own = table[str(token)]["logprob"]
        scores.append((own, max(entry["logprob"] for entry in table.values()) - own))
    return scores


def record(client: httpx.Client, model: str) -> list[dict[str, Any]]:
    """Return, per prompt, its tokens with those generated, and every token's log-probability."""
    results = []
    for prompt in PROMPTS:
        tokens = [*prompt, *generate(client, model, prompt)]
        results.append({"tokens": tokens, "logprobs": [own for own, _ in score(client, model, tokens)]})
    return results


def compare(client: httpx.Client, model: str, recorded: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how a server's answers differ from recorded ones, and whether they pass."""
    rows = []
    for prompt, past in zip(PROMPTS, recorded, strict=True):
        generated, recorded_tokens = generate(client, model, prompt), past["tokens"][len(prompt) :]
        scores = score(client, model, past["tokens"])
        agreement = next(
            (i for i, pair in enumerate(zip(generated, recorded_tokens, strict=True)) if pair[0] != pair[1]),
            len(recorded_tokens),
        )
        rows.append(
            {
                "prompt_tokens": len(prompt),
                "equal_tokens": agreement,
                "of": len(recorded_tokens),
                "worst_gap": max(gap for _, gap in scores[-len(recorded_tokens) :]),
                "mean_logprob_difference": statistics.fmean(
                    abs(own - before) for (own, _), before in zip(scores, past["logprobs"], strict=True)
                ),
            }
        )
    passed = all(row["equal_tokens"] == row["of"] and row["mean_logprob_difference"] < MEAN for row in rows)
    return {"passed": passed, "prompts": rows, "bounds": {"mean_logprob_difference": MEAN}}


def main(arguments: Sequence[str]) -> int:
    """Record or check; returns 0, or 1 if a check does not pass."""
    parser = argparse.ArgumentParser(prog="python -m lab.served.tiny_tokens", description=__doc__)
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--against", type=Path, help="what `record` wrote")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    with httpx.Client(base_url=options.url, timeout=300, trust_env=False) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        if options.action == "record":
            write_json(options.out, record(client, model))
            return 0
        if options.against is None:
            parser.error("check needs --against FILE")
        result = compare(client, model, json.loads(options.against.read_text(encoding="utf-8")))
    write_json(options.out, result)
    say(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
