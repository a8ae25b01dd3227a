"""Other people's figures and the computed bound of the same shape and formats."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from sparkforge.core.tables import Record
from sparkforge.plan import roofline, speed
from sparkforge.plan.architecture import Architecture
from sparkforge.plan.budget import Workload
from sparkforge.plan.devices import Device

NAMES = "Spark"  # how the figures' names begin that are of a Spark
ANY_PROMPT = 1024  # tokens, where a source does not say how many


class CitedFigure(Record):
    """Figures that others published. `shape` is isl, osl, concurrency; 0 is unknown."""

    name: str
    shape: tuple[int, int, int]
    values: dict[str, float]
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")

    @property
    def shape_text(self) -> str:
        """The shape as a result's `Config.shape` writes it."""
        isl, osl, conc = (str(n) if n else "?" for n in self.shape)
        return f"{isl}/{osl} c{conc}"


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


def against(model: Architecture, device: Device, figures: Iterable[CitedFigure]) -> list[Against]:
    """Compare every figure of a Spark with its bound. Raises InputError for a malformed `plan.toml`."""
    formats = {row.name: row for row in speed.judging().formats}
    comparisons = []
    for figure in figures:
        if not figure.name.startswith(NAMES) or not (kept := formats.get(figure.name)):
            continue
        prompt, answer, concurrency = figure.shape[0] or ANY_PROMPT, figure.shape[1], figure.shape[2] or 1
        load = Workload(prompt + answer // 2, kv=kept.kv, dense=kept.formats, batched=kept.chunk)
        decoding = speed.ceiling(model, device, concurrency, load)
        first = roofline.first_token_seconds(model, device, prompt, 1, load)
        bounds = {
            "interactivity": decoding,
            "output_throughput": decoding * concurrency if decoding else None,
            "prefill": prompt / first if first else None,
        }
        comparisons += [
            Against(
                whose=figure.name,
                shape=f"{figure.shape_text.partition(' ')[0]} c{concurrency}",
                quantity=quantity,
                cited=value,
                computed=bound,
                share=value / bound,
                dense=kept.formats.name,
                kv=kept.kv,
                source=figure.source,
                date=figure.date,
            )
            for quantity, value in figure.values.items()
            if (bound := bounds.get(quantity))
        ]
    return comparisons
