"""Sends a load to a server by the protocol of `vllm bench serve`, without vLLM, and computes and checks its figures.

`conc` requests run at any moment, all streamed, with temperature 0 and ignore_eos; when one ends, the next is sent.
Prompts have a known length, share no prefix, and are the same for the same seed. No request is repeated; a refused
request counts as failed. Silence, the whole load, and the number of an answer's pieces (stream events) have limits.

The figures follow `vllm bench serve` (vllm/benchmarks/serve.py, 0.32.0). ttft: time from sending a request to its first
piece. itl: time between two pieces. e2el: time to the last piece. tpot: (e2el - ttft) / (tokens - 1). Times start when
a request is sent; the wait for a slot is not included.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from sparkforge import __version__
from sparkforge.bench import accuracy
from sparkforge.bench.schema import Client, Config, Metrics, Request, ResultCheck, Spread
from sparkforge.core import http
from sparkforge.core.errors import ServerError
from sparkforge.core.files import parse_json
from sparkforge.core.openai import Endpoint

CLIENT = Client(name="sparkforge", version=__version__)
MARGIN = 16  # pieces beyond twice the requested tokens, before a stream counts as endless
Progress = Callable[[], None]
PROMPT_SLACK = 0.05  # text prompts are tokenized again, and a template or a first token may be added
MOST_TOKENS_A_PIECE = 16  # speculative decoding sends several at once; above this, itl is meaningless


@dataclass
class Sample:
    """The client's measurements of a request, in seconds; `start` is relative to the load's start."""

    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    pieces: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    wanted_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def row(self) -> Request:
        """Return the request's row in a result, in milliseconds."""
        return Request(
            start_ms=round(self.start * 1000, 3),
            ttft_ms=round(self.ttft * 1000, 3),
            tpot_ms=None if self.tpot is None else round(self.tpot * 1000, 4),
            e2el_ms=round(self.latency * 1000, 3),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )


@dataclass(frozen=True)
class FinishedLoad:
    """A finished load: its samples and the seconds from its first request to its last piece."""

    samples: list[Sample]
    duration: float
    counted: float | None = None  # increase of the server's own token counter


def spread(seconds: Sequence[float]) -> Spread | None:
    """Return mean, median and 99th percentile in milliseconds; None for no value."""
    if not seconds:
        return None
    # Linear interpolation, which is numpy's default.
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    mean, median = statistics.fmean(seconds), statistics.median(seconds)
    return Spread(mean=mean * 1000, median=median * 1000, p99=p99 * 1000)


def compute_metrics(load: FinishedLoad, config: Config) -> Metrics | None:
    """Return the figures over the requests that finished; None if none did or no time passed."""
    answered = [sample for sample in load.samples if not sample.error]
    first, latency = spread([s.ttft for s in answered]), spread([s.latency for s in answered])
    if first is None or latency is None or load.duration <= 0:
        return None
    per_token = spread([s.tpot for s in answered if s.tpot is not None])
    sent, received = sum(s.prompt_tokens for s in answered), sum(s.output_tokens for s in answered)
    output, total = received / load.duration, (sent + received) / load.duration
    return Metrics(
        completed=len(answered),
        failed=len(load.samples) - len(answered),
        duration_s=load.duration,
        total_input_tokens=sent,
        total_output_tokens=received,
        output_throughput=output,
        total_token_throughput=total,
        tput_per_gpu=total / config.tp,
        output_tput_per_gpu=output / config.tp,
        interactivity=1000 / per_token.median if per_token and per_token.median > 0 else None,
        ttft_ms=first,
        tpot_ms=per_token,
        itl_ms=spread([gap for s in answered for gap in s.gaps]),
        e2el_ms=latency,
    )


def check_load(load: FinishedLoad, config: Config) -> list[ResultCheck]:
    """Return every check of a load; the load passed if all checks are ok."""
    checks = list[ResultCheck]()

    def check(name: str, fault: str, detail: str, **figures: float) -> None:
        checks.append(ResultCheck.model_validate({"name": name, "ok": not fault, "told": fault or detail, **figures}))

    answered = [sample for sample in load.samples if not sample.error]
    errors = Counter(sample.error for sample in load.samples if sample.error)
    failed = errors.total() + config.num_prompts - len(load.samples)
    fault = f"{failed} of {config.num_prompts} requests failed" if failed else ""
    fault += f"; most often: {errors.most_common(1)[0][0]}" if errors else ""
    check("every request was answered", fault, f"{config.num_prompts} of them", value=failed, limit=0)
    if not answered:
        return checks

    # ignore_eos is set, so every answer has the requested number of tokens.
    received = sum(sample.output_tokens for sample in answered)
    wrong = [sample for sample in answered if sample.output_tokens != sample.wanted_tokens]
    fault = f"{len(wrong)} answers have the wrong length: " if wrong else ""
    fault += f"{wrong[0].output_tokens} tokens, not {wrong[0].wanted_tokens}" if wrong else ""
    check("every answer has the length asked for", fault, f"{received} tokens")

    wanted, sent = config.isl * len(answered), sum(sample.prompt_tokens for sample in answered)
    far = abs(sent - wanted) > max(PROMPT_SLACK, config.random_range_ratio) * wanted
    fault = f"the server counted {sent} prompt tokens where {wanted} were sent" if far else ""
    check("every prompt has its length", fault, f"{sent} tokens", value=sent, limit=wanted)

    # A piece has at least one token, except for the last piece, and at most MOST_TOKENS_A_PIECE tokens.
    wrong = [s for s in answered if s.output_tokens > MOST_TOKENS_A_PIECE * s.pieces or s.pieces > s.output_tokens + 1]
    counts = f"{wrong[0].output_tokens} tokens and sent {wrong[0].pieces} pieces" if wrong else ""
    fault = f"the server counted {counts} ({len(wrong)} answers)" if wrong else ""
    check("pieces and counted tokens agree", fault, f"{sum(sample.pieces for sample in answered)} pieces")

    longest = load.duration * 1.01 + 0.1
    possible = load.duration > 0 and all(0 < sample.ttft <= sample.latency <= longest for sample in answered)
    fault = "" if possible else f"a latency does not fit into {load.duration:.3f} s"
    check("times are possible", fault, f"{load.duration:.2f} s")

    if load.counted is not None:
        rise = f"its counter rose by {load.counted:.0f}"
        fault = f"{rise}, its answers claim {received}" if load.counted < received else ""
        check("the server's own counter agrees", fault, rise, value=received, limit=load.counted)
    return checks


class StreamError(Exception):
    """The stream was not a complete answer; the message is the reason in a few words."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, as token ids or as text, and its answer's length in tokens."""

    content: list[int] | str
    output_tokens: int


def run(endpoint: Endpoint, config: Config, text: str, seconds: float, progress: Progress) -> FinishedLoad:
    """Warm up, then measure unless every warm-up request failed; `progress` is called for each finished request.

    `seconds` is the time limit of the warm-up and of the load. Raises ServerError for a server that does not tokenize.
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
    endpoint: Endpoint, prompts: Sequence[Prompt], concurrency: int, seconds: float, progress: Progress = lambda: None
) -> FinishedLoad:
    """Send all prompts, `concurrency` at a time, within `seconds`; a failed request is a sample with an error."""
    late = f"not answered within {seconds:.0f} s"
    samples = [Sample(wanted_tokens=prompt.output_tokens, error=late) for prompt in prompts]
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    pending, start = zip(prompts, samples, strict=True), time.perf_counter()

    async def send_all() -> None:
        async with httpx.AsyncClient(**endpoint.options, limits=limits) as client:

            async def work() -> None:
                """Send one request after the other."""
                for prompt, sample in pending:
                    sample.start = time.perf_counter() - start
                    sample.error = await _answer(client, endpoint.model, prompt, sample)
                    progress()

            done, late = await asyncio.wait([asyncio.create_task(work()) for _ in range(concurrency)], timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()  # raises unexpected errors of `_answer`, such as a missing package

    asyncio.run(send_all())
    ends = [sample.start + sample.latency for sample in samples if not sample.error]
    return FinishedLoad(samples, max(ends, default=time.perf_counter() - start))


def require_answers(load: FinishedLoad) -> FinishedLoad:
    """Return the load if every request was answered. Raises ServerError with the first error."""
    if errors := [sample.error for sample in load.samples if sample.error]:
        summary = f"{len(errors)} of {len(load.samples)} requests failed"
        raise ServerError(summary, errors[0], "./inv logs   # or the log of the server at --url", code="server.reply")
    return load


async def _answer(client: httpx.AsyncClient, model: str, prompt: Prompt, sample: Sample) -> str:
    """Send a prompt and read its answer into `sample`; return the reason if the answer is incomplete, else ""."""
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
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await _read_stream(response, start, prompt, sample)
    except StreamError as error:
        return str(error)
    except httpx.TimeoutException:
        return "silence for too long"
    except (httpx.HTTPError, httpx.StreamError) as error:
        return f"the stream broke off ({type(error).__name__})"
    return ""


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
