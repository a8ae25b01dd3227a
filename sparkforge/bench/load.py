"""Sends a load to a server by the protocol of `vllm bench serve`, without vLLM.

`conc` requests run at any moment, all streamed, with temperature 0 and ignore_eos; when one ends, the next is sent.
Prompts have a known length, share no prefix, and are the same for the same seed. No request is repeated; a refused
request has failed. Silence, the whole load, and the number of pieces are bounded.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from sparkforge import __version__
from sparkforge.bench import accuracy
from sparkforge.bench.samples import FinishedLoad, Sample
from sparkforge.bench.schema import Client, Config
from sparkforge.core import http
from sparkforge.core.errors import ServerError
from sparkforge.core.files import parse_json
from sparkforge.core.openai import Endpoint

CLIENT = Client(name="sparkforge", version=__version__)
MARGIN = 16  # pieces beyond twice the requested tokens, before a stream counts as endless
Progress = Callable[[], None]


class StreamError(Exception):
    """A stream is not a complete answer; the message has the reason in a few words."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, as token ids or as text, and its answer's length in tokens."""

    content: list[int] | str
    output_tokens: int


def run(endpoint: Endpoint, config: Config, text: str, seconds: float, progress: Progress) -> FinishedLoad:
    """Warm up, then measure unless every warm-up request failed; `progress` is called for each finished request.

    `seconds` is the time limit of the warm-up and of the load. Raises ServerError.
    """
    if config.warmups:
        prompts = draw_prompts(endpoint, config, text, config.warmups, config.seed + 1)
        warmup = send(endpoint, prompts, config.conc, seconds)
        if all(sample.error for sample in warmup.samples):
            return warmup  # no load for a server that answers nothing
    prompts = draw_prompts(endpoint, config, text, config.num_prompts, config.seed)
    before = endpoint.generated()
    load = send(endpoint, prompts, config.conc, seconds, progress)
    return replace(load, counted=endpoint.generated_since(before))


def draw_prompts(endpoint: Endpoint, config: Config, text: str, count: int, seed: int) -> list[Prompt]:
    """Return `count` prompts drawn with `seed`: `text`'s tokens in random order, all valid ids. Raises ServerError."""
    rng = random.Random(seed)  # noqa: S311 (a load, no secret)

    def length(tokens: int) -> int:
        """Vary a length as vLLM 0.32.0 does (RandomDataset)."""
        share = config.random_range_ratio
        return max(1, rng.randint(round(tokens * (1 - share)), round(tokens * (1 + share))))

    tokens = accuracy.tokenize(endpoint, text)
    lengths = [(length(config.isl), length(config.osl)) for _ in range(count)]
    return [Prompt(rng.choices(tokens, k=isl), osl) for isl, osl in lengths]


def send(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    concurrency: int,
    seconds: float,
    progress: Progress = lambda: None,
) -> FinishedLoad:
    """Send all prompts, `concurrency` at a time, within `seconds`; a failed request is a sample with an error."""
    return asyncio.run(_send(endpoint, prompts, concurrency, seconds, progress))


def require_answers(load: FinishedLoad) -> FinishedLoad:
    """Return the load if every request was answered. Raises ServerError with the first error."""
    if errors := [sample.error for sample in load.samples if sample.error]:
        summary = f"{len(errors)} of {len(load.samples)} requests failed"
        raise ServerError(summary, errors[0], "./inv logs   # or the log of the server at --url", code="server.reply")
    return load


async def _send(
    endpoint: Endpoint, prompts: Sequence[Prompt], concurrency: int, seconds: float, progress: Progress
) -> FinishedLoad:
    slots, samples = asyncio.Semaphore(concurrency), [Sample(wanted_tokens=prompt.output_tokens) for prompt in prompts]
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    start = time.perf_counter()
    async with httpx.AsyncClient(**endpoint.options, limits=limits) as http:

        async def answer(prompt: Prompt, sample: Sample) -> None:
            """Wait for a free slot, then send; the sample's start is the time after the wait, in seconds."""
            async with slots:
                sample.start = time.perf_counter() - start
                await _answer(http, endpoint.model, prompt, sample)
                progress()

        tasks = [asyncio.create_task(answer(*pair)) for pair in zip(prompts, samples, strict=True)]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task, sample in zip(tasks, samples, strict=True):
        if task in late:
            sample.error = f"not answered within {seconds:.0f} s"
        else:
            task.result()  # raises unexpected errors of `_answer`, such as a missing package
    ends = [sample.start + sample.latency for sample in samples if not sample.error]
    return FinishedLoad(samples, max(ends, default=time.perf_counter() - start))


async def _answer(http: httpx.AsyncClient, model: str, prompt: Prompt, sample: Sample) -> None:
    body = {
        "model": model,
        "prompt": prompt.content,
        "max_tokens": prompt.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            await _read_stream(response, start, prompt, sample)
    except StreamError as error:
        sample.error = str(error)
    except httpx.TimeoutException:
        sample.error = "silence for too long"
    except (httpx.HTTPError, httpx.StreamError) as error:
        sample.error = f"the stream broke off ({type(error).__name__})"


async def _read_stream(response: httpx.Response, start: float, prompt: Prompt, sample: Sample) -> None:
    if not response.is_success:
        raise StreamError(f"HTTP {response.status_code}")
    last = start
    async for message in http.aevents(response):
        if message.data == "[DONE]":
            break
        event = _event(message.data)
        if event.get("choices"):
            now = time.perf_counter()
            if sample.pieces:
                sample.gaps.append(now - last)
            else:
                sample.ttft = now - start
            sample.pieces, sample.latency, last = sample.pieces + 1, now - start, now
            if sample.pieces > 2 * prompt.output_tokens + MARGIN:
                raise StreamError(f"more than {sample.pieces - 1} pieces for {prompt.output_tokens} tokens")
        if usage := event.get("usage"):
            sample.prompt_tokens, sample.output_tokens = _counts(usage)
    else:
        raise StreamError("the stream ended without [DONE]")
    if not sample.pieces:
        raise StreamError("HTTP 200 without a token")
    if not sample.output_tokens:
        raise StreamError("no usage counts at the stream's end")


def _counts(usage: Any) -> tuple[int, int]:
    try:
        return int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    except (KeyError, TypeError, ValueError):
        raise StreamError("usage has no counts") from None


def _event(data: str) -> dict[str, Any]:
    try:
        event = parse_json(data, "a stream event")
    except ValueError:
        raise StreamError("a stream event is not JSON") from None
    if not isinstance(event, dict):
        raise StreamError("a stream event is not an object")
    if "error" in event:
        raise StreamError(f"the server stopped the answer: {str(event['error'])[:120]}")
    return event
