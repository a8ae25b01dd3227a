"""Reads `baselines.toml`: sweeps, texts, thresholds, canaries and cited figures."""

import hashlib
import lzma
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sparkforge.bench.accuracy import Score
from sparkforge.bench.schema import CompetitionBaseline, Metrics, Ratio
from sparkforge.core import tables
from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.openai import last_part
from sparkforge.core.tables import Record
from sparkforge.plan.speed import CitedFigure

FOLDER = Path(__file__).parent
FILE = FOLDER / "baselines.toml"
LOWER_IS_BETTER = {"median_e2el_ms"}


class Text(Record):
    """A text beside this file, its licence and its source."""

    name: str
    file: str
    sha256: str
    licence: str
    source: str

    def read(self) -> str:
        """Return the text. Raises InputError if it is not the text of the thresholds."""
        data = (FOLDER / self.file).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            failure = f"sparkforge/bench/{self.file} has changed"
            why = "its sha256 is not the recorded one, so the thresholds do not apply"
            raise InputError(failure, why, f"git checkout sparkforge/bench/{self.file}", code="input.baselines")
        return data.decode()


class Reference(Record):
    """A checkpoint's score on a text: `nats` is the negative sum of logprobs, `within` the tolerance as a share."""

    precision: str = Field(min_length=1)
    nats: float = Field(gt=0)
    tokens: int = Field(gt=0)
    size: int = Field(gt=0)
    within: float = Field(gt=0, lt=1)
    why: str = Field(min_length=1)
    weights_sha256: str = ""

    def metrics(self, factor: float) -> dict[str, float]:
        """Return the figures for `factor` times `nats`. All limits are computed from this sum, so they agree."""
        return Score(-self.nats * factor, self.tokens, self.size).metrics


class AccuracyThreshold(Record):
    """The score that a model must reach on a text: its own reference, or the weaker score of a compressor.

    With `packed` the gate computes the compressor's score, for a text that is not in this repository.
    """

    model: str
    text: str
    reference: Reference | None = None
    at_most: dict[str, float] = Field(default={})
    packed: bool = False
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")

    @property
    def limits(self) -> str:
        """The kind of limits, in words."""
        if known := self.reference:
            return f"the model's own reference in {known.precision}, ± {known.within:.1%} of its nats ({known.why})"
        if not (self.packed or self.at_most):
            return "none, nothing was compared"
        return "no reference of this model is known: weaker limits, it must predict better than xz compresses"

    def bounds(self, text: str) -> list[tuple[str, float, bool]]:
        """Return each figure's limit on `text`, and whether it is an upper limit."""
        if known := self.reference:
            upper = [(name, limit, True) for name, limit in known.metrics(1 + known.within).items()]
            return [*upper, ("bits_per_byte", known.metrics(1 - known.within)["bits_per_byte"], False)]
        limits = self.at_most
        if self.packed:
            data, filters = text.encode(), [{"id": lzma.FILTER_LZMA2, "preset": 9}]
            packed = lzma.compress(data, format=lzma.FORMAT_RAW, filters=filters)
            limits = {"bits_per_byte": 8 * len(packed) / len(data)}
        return [(name, limit, True) for name, limit in limits.items()]


class Canaries(Record):
    """The test requests that a model must answer in the right form; `ask` has their names in gate.py."""

    model: str
    ask: list[Literal["answers", "first_token", "content", "tool_call"]]
    why: str


class Competition(Record):
    """The requirements of the gpt-oss competition's boards: one model, one text, and limits.

    `baseline` names cited figures. `boards` has the URLs by shape: input and output length in tokens, isl/osl.
    """

    model: str
    text: str
    at_most: dict[str, float]
    baseline: str
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")
    boards: dict[str, Annotated[str, Field(pattern=r"^https://")]]


class Baselines(Record):
    """The whole file. `sweeps` are concurrencies by isl/osl, `default_texts` texts by pattern of the model's name."""

    schema_version: Literal[1] = Field(alias="schema")
    sweeps: dict[str, list[int]]
    texts: list[Text]
    default_texts: dict[str, str]
    gates: list[AccuracyThreshold]
    canaries: list[Canaries]
    competition: Competition
    figures: list[CitedFigure]

    def concurrencies(self, isl: int, osl: int) -> list[int]:
        """Return the concurrencies of a shape. Raises UsageError for a shape without a row."""
        if f"{isl}/{osl}" in self.sweeps:
            return self.sweeps[f"{isl}/{osl}"]
        why = f"the table has {', '.join(self.sweeps)}"
        raise UsageError(f"no concurrencies are known for {isl}/{osl}", why, "--conc 4,8,16")

    def competition_figure(self, isl: int, osl: int, conc: int) -> CitedFigure | None:
        """Return the competition's reference figure for a configuration; None if it has none."""
        figures = (figure for figure in self.figures if figure.name == self.competition.baseline)
        return next((figure for figure in figures if figure.shape == (isl, osl, conc)), None)

    def threshold(self, model: str, text: str) -> AccuracyThreshold | None:
        """Return the threshold of a model on a text; the first row that matches counts."""
        matching = (row for row in self.gates if row.text == text and matches(row.model, model))
        return next(matching, None)


def compare_with_competition(metrics: Metrics, figure: CitedFigure | None) -> dict[str, Any]:
    """Return the fields of a `Result` that the competition's result files also have; empty without its figure."""
    if figure is None:
        return {}
    median_e2e, throughput = figure.values["median_e2el_ms"], figure.values["tput_per_gpu"]
    return {
        "b200_baseline_nv1126": CompetitionBaseline(b200_median_e2e_1126=median_e2e, b200_tput_pergpu_1126=throughput),
        "tput_per_gpu_ratio_vs_b200_1126": metrics.tput_per_gpu / throughput,
        "median_e2e_ratio_vs_b200_1126": metrics.e2el_ms.median / median_e2e,
    }


def matches(pattern: str, model: str) -> bool:
    """Return whether a served model's name, without its folder or organisation, matches a row's pattern."""
    return fnmatchcase(last_part(model), pattern)


def load(path: Path = FILE) -> Baselines:
    """Read and check the file. Raises InputError."""
    return tables.load(path, Baselines)


def compute_ratios(metrics: Metrics, shape: tuple[int, int, int], figures: list[CitedFigure]) -> list[Ratio]:
    """Return the ratio of our figure to each cited figure of the same shape (isl, osl, concurrency)."""
    ours = {name: getattr(metrics, name) for name in ("interactivity", "tput_per_gpu", "output_throughput")}
    ours["median_e2el_ms"], ratios = metrics.e2el_ms.median, []
    for figure in figures:
        about: dict[str, Any] = {"figure": figure.name, "source": figure.source, "date": figure.date}
        for quantity, cited in figure.values.items() if figure.shape == shape else ():
            if (measured := ours.get(quantity)) is not None and cited > 0:
                better = measured < cited if quantity in LOWER_IS_BETTER else measured > cited
                about |= {"measured": measured, "cited": cited, "ratio": measured / cited, "better": better}
                ratios.append(Ratio(quantity=quantity, **about))
    return ratios
