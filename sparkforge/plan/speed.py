"""Compare speeds with a device's bounds: this machine's newest benchmark result, and published figures."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sparkforge.core.tables import Record, load
from sparkforge.plan import cluster, forecast, roofline
from sparkforge.plan.architecture import BF16, Architecture, DenseFormat, Draft
from sparkforge.plan.budget import BATCHED_TOKENS, Workload
from sparkforge.plan.devices import Device

FILE = Path(__file__).with_name("plan.toml")
NAMES = ("Spark, ", "Two Sparks, ")  # prefixes of the names of figures of one Spark, and of two
ANY_PROMPT = 1024  # tokens, for a source that does not give the prompt's length


class SpeedThreshold(Record):
    """The bound for a warning about a speed, its reason, and usual causes; below `refuse` the speed is an error."""

    value: float = Field(gt=0)
    refuse: float = Field(default=0, ge=0)
    why: str = Field(min_length=1)
    causes: str = Field(min_length=1)


Form = Literal["bf16", "fp8", "mxfp8", "mxfp4", "q8_0"]


class CitedFormat(Record):
    """A cited server: its formats of attention projections (`dense`), LM head and KV cache, step size and machines."""

    name: str
    dense: Form
    head: Form
    kv: Literal["bf16", "fp8"]
    chunk: int = Field(default=BATCHED_TOKENS, ge=1)
    nodes: int = Field(default=1, ge=1)
    source: str = Field(min_length=1)

    @property
    def formats(self) -> DenseFormat:
        """Both dense formats."""
        return DenseFormat(self.dense, self.head)


class SpeedThresholds(Record):
    """Thresholds for decoding and for the first token; a key of `decode` is a word of the GPU's name, or `other`."""

    decode: dict[str, SpeedThreshold]
    first_token: SpeedThreshold


class Cited(Record):
    """The model to which the cited figures apply, and a word in the GPU's name."""

    model: str
    gpu: str


class Judging(Record):
    """The whole file."""

    cited: Cited
    thresholds: SpeedThresholds
    formats: tuple[CitedFormat, ...]
    drafts: dict[str, Draft]  # for any model; recipes have their own


@dataclass(frozen=True)
class Measured:
    """A result of `./inv bench.perf`: tokens per request, and median times in milliseconds.

    `ttft_ms` is the time to the first token, `tpot_ms` the time per further token (None for answers of one token).
    `where` names the result in messages, if it is not the current one.
    """

    prompt: int
    answer: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float | None
    where: str = ""


class Comparison(Record):
    """A measured figure and its computed bound, with a sentence about both; `causes` only if they differ widely."""

    told: str
    measured: float
    computed: float
    causes: str = ""
    refused: bool = False


def judging() -> Judging:
    """Return the content of plan.toml. Raises InputError."""
    return load(FILE, Judging)


def ceiling(model: Architecture, device: Device, batch: int, load: Workload) -> float | None:
    """Most tokens a second that each of `batch` sequences can decode, with even routing; None if not known."""
    seconds = roofline.time(roofline.decode(model, batch, load), device).seconds
    return 1.0 / seconds if seconds else None


def compare(model: Architecture, device: Device, measured: Measured, served: Workload) -> Iterator[Comparison]:
    """Compare the decode speed per sequence (tokens a second) and the time to the first token (ms) with their bounds.

    `served` has the formats of the server's KV cache and dense layers, and its --max-num-batched-tokens. Raises
    InputError for a malformed `plan.toml`.
    """
    bounds = judging().thresholds
    load = replace(served, context=measured.prompt + measured.answer // 2)
    best, whose = ceiling(model, device, measured.concurrency, load), measured.where and f"{measured.where}: "
    if best and measured.tpot_ms:
        speed = 1000.0 / measured.tpot_ms
        kept = "" if load.dense == BF16 else f" with dense layers in {load.dense.name}"
        sentence = f"decode {speed:.1f} tok/s each, {speed / best:.0%} of the computed ceiling of {best:.1f}{kept}"
        bound = next((bounds.decode[name] for name in device.names if name in bounds.decode), bounds.decode["other"])
        causes = bound.causes if speed < bound.value * best else ""
        refused = speed < bound.refuse * best
        yield Comparison(told=whose + sentence, measured=speed, computed=best, causes=causes, refused=refused)
    if floor := roofline.first_token_seconds(model, device, measured.prompt, measured.concurrency, load):
        times = measured.ttft_ms / 1000.0 / floor
        sentence = f"first token {measured.ttft_ms:.0f} ms, {times:.1f} times the computed floor of {floor * 1000:.0f}"
        causes = bounds.first_token.causes if times > bounds.first_token.value else ""
        yield Comparison(told=whose + sentence, measured=measured.ttft_ms, computed=floor * 1000, causes=causes)


class CitedFigure(Record):
    """Figures that others published. `shape` is input tokens, output tokens, concurrency; 0: unknown."""

    name: str
    shape: tuple[int, int, int]
    values: dict[str, float]
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")


class Against(Record):
    """A cited figure and its computed bound, in tokens a second; `share` is cited over computed.

    `forecast` is the speed that is expected of our kernels in the same formats; None: not computed.
    """

    whose: str
    shape: str
    quantity: str
    cited: float
    computed: float
    share: float
    forecast: float | None
    dense: str
    kv: str
    source: str
    date: str


def against(model: Architecture, device: Device, figures: Iterable[CitedFigure]) -> list[Against]:
    """Return the comparison of each figure of a Spark with its bound. Raises InputError for a malformed `plan.toml`."""
    formats = {row.name: row for row in judging().formats}
    comparisons = []
    for figure in figures:
        if not figure.name.startswith(NAMES) or not (kept := formats.get(figure.name)):
            continue
        prompt, answer, concurrency = figure.shape[0] or ANY_PROMPT, figure.shape[1], figure.shape[2] or 1
        load = Workload(prompt + answer // 2, kv=kept.kv, dense=kept.formats, batched=kept.chunk)
        total = cluster.total(model, device, load, kept.nodes, concurrency, "tensor")
        link = cluster.link_seconds(model, device.link, concurrency, kept.nodes, "tensor") if device.link else 0.0
        step = forecast.step(model, device, cluster.split(model, load, concurrency, kept.nodes), link)
        bounds = {
            "interactivity": (total and total / concurrency, 1 / step.seconds if step else None),
            "output_throughput": (total, concurrency / step.seconds if step else None),
        }
        if kept.nodes == 1:
            first = roofline.first_token_seconds(model, device, prompt, 1, load)
            read = forecast.prefill_seconds(model, device, prompt, load)
            bounds["prefill"] = (first and prompt / first, read and prompt / read)
        about: dict[str, Any] = {
            "whose": figure.name, "shape": f"{figure.shape[0] or '?'}/{figure.shape[1] or '?'} c{concurrency}",
            "dense": kept.formats.name, "kv": kept.kv, "source": figure.source, "date": figure.date,
        }  # fmt: skip
        for quantity, value in figure.values.items():
            bound, ours = bounds.get(quantity, (None, None))
            if bound:
                about |= {"quantity": quantity, "cited": value, "computed": bound, "share": value / bound}
                comparisons.append(Against(**about, forecast=ours))
    return comparisons
