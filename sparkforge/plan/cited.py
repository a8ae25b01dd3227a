"""Other people's figures and the computed bound of the same shape and formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from sparkforge.core.tables import Record
from sparkforge.plan import roofline, speed
from sparkforge.plan.architecture import Architecture
from sparkforge.plan.devices import Device

NAMES = "Spark"  # how the figures' names begin that are of a Spark
ANY_PROMPT = 1024  # tokens, where a source does not say how many


class CitedRow(Protocol):
    """What is read of a figure (sparkforge.bench.baselines). `shape` is prompt, answer, concurrency; 0: not known."""

    @property
    def name(self) -> str:
        """Whose it is."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens of a prompt and of an answer, and requests at once."""

    @property
    def values(self) -> Mapping[str, float]:
        """The figures by quantity."""

    @property
    def source(self) -> str:
        """Where it was published."""

    @property
    def date(self) -> str:
        """When it was read there."""


class Against(Record):
    """A cited figure and the bound that it could reach. All in tokens a second; `share` is cited over computed."""

    whose: str
    shape: str
    quantity: str
    cited: float
    computed: float
    share: float
    dense: str
    kv: str
    source: str
    date: str


def against(model: Architecture, device: Device, figures: Iterable[CitedRow]) -> list[Against]:
    """Compare every figure of a Spark with its bound. Raises InputError for a malformed `plan.toml`."""
    formats = {row.name: row for row in speed.judging().formats}
    return [
        comparison
        for figure in figures
        if figure.name.startswith(NAMES) and figure.name in formats
        for comparison in _compare(model, device, figure, formats[figure.name])
    ]


def _compare(model: Architecture, device: Device, figure: CitedRow, formats: speed.CitedFormat) -> list[Against]:
    prompt, answer, concurrency = figure.shape
    prompt, concurrency = prompt or ANY_PROMPT, concurrency or 1
    decoding = speed.ceiling(model, device, concurrency, prompt + answer // 2, formats.kv, formats.formats)
    first = roofline.first_token_seconds(model, device, prompt, 1, formats.chunk, formats.kv, formats.formats)
    bounds = {
        "interactivity": decoding,
        "output_throughput": decoding * concurrency if decoding else None,
        "prefill": prompt / first if first else None,
    }
    shape = "/".join(str(n) if n else "?" for n in figure.shape[:2]) + f" c{concurrency}"
    return [
        Against(
            whose=figure.name,
            shape=shape,
            quantity=quantity,
            cited=value,
            computed=bound,
            share=value / bound,
            dense=formats.formats.name,
            kv=formats.kv,
            source=figure.source,
            date=figure.date,
        )
        for quantity, value in figure.values.items()
        if (bound := bounds.get(quantity))
    ]
