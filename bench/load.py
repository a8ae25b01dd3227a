"""The load, by our own client: the protocol of `vllm bench serve` where vllm is not installed.

`conc` requests under way at any moment, all streamed, temperature 0, ignore_eos, a request sent as soon as a place is
free. Nothing is tried again: a refused request is a failed one. Every wait has an end: silence, the whole load, and the
number of pieces are bounded.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from bench import prompts
from bench.endpoint import Endpoint
from bench.prompts import Ask
from bench.samples import Load, Sample
from bench.schema import Client, Config
from sparkforge import __version__, sse

NAME = "sparkforge"
MARGIN = 16  # pieces beyond twice the tokens asked for, before a stream counts as endless
Progress = Callable[[int], None]


class StreamError(Exception):
    """A stream that is none: its text says why, in a few words."""


def client() -> Client:
    """Return what the result says of this client."""
    return Client(name=NAME, version=__version__)


def run(endpoint: Endpoint, config: Config, text: str, seconds: float, progress: Progress) -> Load:
    """Warm up, then measure, unless every warm-up fails.

    `seconds` bounds each of the two; `progress` is told of each finished request.
    """
    if config.warmups:
        warm = prompts.make(endpoint, config, text, config.warmups, config.seed + 1)
        warmed = asyncio.run(_all(endpoint, config, warm, seconds, lambda _: None))
        if all(sample.error for sample in warmed.samples):
            return warmed  # a server that answers nothing need not be asked for the rest
    asks = prompts.make(endpoint, config, text, config.num_prompts, config.seed)
    before = endpoint.generated()
    load = asyncio.run(_all(endpoint, config, asks, seconds, progress))
    after = endpoint.generated() if before is not None else None
    counted = after - before if before is not None and after is not None else None
    return Load(load.samples, load.duration, counted)


async def _all(endpoint: Endpoint, config: Config, asks: Sequence[Ask], seconds: float, progress: Progress) -> Load:
    places, samples = asyncio.Semaphore(config.conc), [Sample(wanted_tokens=ask.output_tokens) for ask in asks]
    limits = httpx.Limits(max_connections=config.conc, max_keepalive_connections=config.conc)
    begun = time.perf_counter()
    async with httpx.AsyncClient(**endpoint.options, limits=limits) as http:

        async def one(ask: Ask, sample: Sample) -> None:
            """Wait for a free place, then ask; the sample starts behind the wait, in seconds since the load began."""
            async with places:
                sample.start = time.perf_counter() - begun
                await _answer(http, endpoint.model, ask, sample)
                progress(1)

        tasks = [asyncio.create_task(one(ask, sample)) for ask, sample in zip(asks, samples, strict=True)]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task, sample in zip(tasks, samples, strict=True):
        if task in late:
            sample.error = f"not answered within {seconds:.0f} s"
    ends = [sample.start + sample.latency for sample in samples if not sample.error]
    return Load(samples, max(ends, default=time.perf_counter() - begun))


async def _answer(http: httpx.AsyncClient, model: str, ask: Ask, sample: Sample) -> None:
    """Send one request and fill its sample; whatever goes wrong becomes the sample's error."""
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            await _pieces(reply, begun, ask, sample)
        _finish(sample)
    except StreamError as error:
        sample.error = str(error)
    except httpx.TimeoutException:
        sample.error = "silence for too long"
    except (httpx.HTTPError, httpx.StreamError) as error:
        sample.error = f"the stream broke off ({type(error).__name__})"


async def _pieces(reply: httpx.Response, begun: float, ask: Ask, sample: Sample) -> None:
    """Read the stream's events up to [DONE]. Raises StreamError."""
    if not reply.is_success:
        raise StreamError(f"HTTP {reply.status_code}")
    last = begun
    async for line in sse.alines(reply):
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = _event(data)
        if event.get("choices"):
            now = time.perf_counter()
            if sample.pieces:
                sample.gaps.append(now - last)
            else:
                sample.ttft = now - begun
            sample.pieces, sample.latency, last = sample.pieces + 1, now - begun, now
            if sample.pieces > 2 * ask.output_tokens + MARGIN:
                raise StreamError(f"more than {sample.pieces - 1} pieces for {ask.output_tokens} tokens")
        if usage := event.get("usage"):
            sample.prompt_tokens, sample.output_tokens = _counts(usage)
    raise StreamError("the stream ended without [DONE]")


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise StreamError("a stream event is no JSON") from None
    if not isinstance(event, dict):
        raise StreamError("a stream event is no object")
    if "error" in event:
        raise StreamError(f"the server stopped the answer: {str(event['error'])[:120]}")
    return event


def _counts(usage: Any) -> tuple[int, int]:
    try:
        return int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    except (KeyError, TypeError, ValueError):
        raise StreamError("usage has no counts") from None


def _finish(sample: Sample) -> None:
    """Refuse a stream that ended well and holds nothing."""
    if not sample.pieces:
        raise StreamError("HTTP 200 without a token")
    if not sample.output_tokens:
        raise StreamError("no usage counts at the stream's end")
