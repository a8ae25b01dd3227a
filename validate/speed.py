"""Whether a measured speed is far under what the memory and the arithmetic of a device allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from validate import roofline
from validate.architecture import Architecture
from validate.budget import BATCHED_TOKENS
from validate.devices import Device
from validate.tables import Record, load

FILE = Path(__file__).with_name("plan.toml")


class Threshold(Record):
    """A bound, why it is that, and what usually lies behind a speed beyond it."""

    value: float = Field(gt=0)
    why: str = Field(min_length=1)
    causes: str = Field(min_length=1)


class Format(Record):
    """How a cited server keeps what gpt-oss has in bf16 (`dense`: attention, head), its KV cache and prefill step."""

    name: str
    dense: Literal["bf16", "fp8", "mxfp4", "q8_0"]
    kv: Literal["bf16", "fp8"]
    chunk: int = Field(default=BATCHED_TOKENS, ge=1)
    source: str = Field(min_length=1)


class Thresholds(Record):
    """Both bounds."""

    decode: Threshold
    first_token: Threshold


class Judging(Record):
    """The whole file."""

    thresholds: Thresholds
    formats: tuple[Format, ...]


@dataclass(frozen=True)
class Measured:
    """What `./inv bench.perf` measured: medians in milliseconds; `tpot_ms` None for answers of one token."""

    prompt: int
    answer: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float | None
    kv: str = "bf16"
    batched: int = BATCHED_TOKENS


@dataclass(frozen=True)
class Comparison:
    """One measured figure against its computed bound; `ratio` is measured over computed. `causes`: it is far under."""

    told: str
    measured: float
    computed: float
    causes: str = ""

    @property
    def ratio(self) -> float:
        """Measured over computed."""
        return self.measured / self.computed


def judging(path: Path = FILE) -> Judging:
    """Read the table. Raises PlanTableError."""
    return load(path, Judging)


def ceiling(model: Architecture, device: Device, batch: int, context: int, kv: str, dense: str) -> float | None:
    """Tokens a second that each of `batch` sequences can decode at most, by even routing; None if not known."""
    seconds = roofline.time(roofline.decode(model, batch, context, kv, dense), device).seconds
    return 1.0 / seconds if seconds else None


def compare(model: Architecture, device: Device, measured: Measured) -> Iterator[Comparison]:
    """Yield the decode speed a sequence (tokens a second) and the first token's time (ms) against their bounds."""
    bounds = judging().thresholds
    context = measured.prompt + measured.answer // 2
    best = ceiling(model, device, measured.concurrency, context, measured.kv, "bf16")
    if best and measured.tpot_ms:
        speed = 1000.0 / measured.tpot_ms
        told = f"decode {speed:.1f} tok/s each, {speed / best:.0%} of the computed ceiling of {best:.1f}"
        yield Comparison(told, speed, best, bounds.decode.causes if speed < bounds.decode.value * best else "")
    floor = roofline.first_token_seconds(
        model, device, measured.prompt, measured.concurrency, measured.batched, measured.kv
    )
    if floor:
        times = measured.ttft_ms / 1000.0 / floor
        told = f"first token {measured.ttft_ms:.0f} ms, {times:.1f} times the computed floor of {floor * 1000:.0f}"
        slow = times > bounds.first_token.value
        yield Comparison(told, measured.ttft_ms, floor * 1000, bounds.first_token.causes if slow else "")
