"""Reads `baselines.toml`: sweeps, texts, thresholds, canaries and cited figures."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import Field

from sparkforge.bench.schema import Metrics, Ratio
from sparkforge.core import tables
from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.tables import Record

FOLDER = Path(__file__).parent
FILE = FOLDER / "baselines.toml"
LOWER_IS_BETTER = {"median_e2el_ms"}


class Sweep(Record):
    """The concurrencies to run for one shape."""

    isl: int
    osl: int
    concurrencies: list[int]


class Text(Record):
    """A text beside this file, its licence and its source."""

    name: str
    file: str
    sha256: str
    licence: str
    source: str

    def read(self) -> str:
        """Return it. Raises InputError if it is not the text that the thresholds were measured on."""
        data = (FOLDER / self.file).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise InputError(
                f"sparkforge/bench/{self.file} has changed",
                "its sha256 is not the recorded one, so thresholds mean nothing on it",
                f"git checkout sparkforge/bench/{self.file}",
                code="input.baselines",
            )
        return data.decode()


class AccuracyThreshold(Record):
    """What a model must reach on a text, or in an lm-eval task."""

    model: str
    text: str = ""
    task: str = ""
    at_most: dict[str, float] = Field(default={})
    at_least: dict[str, float] = Field(default={})
    sanity: bool = False
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")


class Canaries(Record):
    """The questions that a model must answer in the right form."""

    model: str
    ask: list[Literal["answers", "first_token", "content", "tool_call"]]
    why: str


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


class Baselines(Record):
    """The whole file."""

    schema_version: Literal[1] = Field(alias="schema")
    sweeps: list[Sweep]
    texts: list[Text]
    gates: list[AccuracyThreshold]
    canaries: list[Canaries]
    figures: list[CitedFigure]

    def concurrencies(self, isl: int, osl: int) -> list[int]:
        """Return the concurrencies of a shape. Raises UsageError for a shape without a row."""
        for sweep in self.sweeps:
            if (sweep.isl, sweep.osl) == (isl, osl):
                return sweep.concurrencies
        shapes = ", ".join(f"{s.isl}/{s.osl}" for s in self.sweeps)
        raise UsageError(f"no concurrencies are known for {isl}/{osl}", f"the table has {shapes}", "add --conc 4,8,16")

    def text(self, name: str) -> Text:
        """Return a text of the table. Raises UsageError."""
        for text in self.texts:
            if text.name == name:
                return text
        known = ", ".join(text.name for text in self.texts)
        raise UsageError(f"there is no text {name}", f"the table has {known}", "./inv bench.acc --text FILE")

    def threshold(self, model: str, text: str) -> AccuracyThreshold | None:
        """Return the threshold of a model on a text; the first row that matches counts."""
        matching = (row for row in self.gates if row.text == text and matches(row.model, model))
        return next(matching, None)

    def task_threshold(self, model: str, task: str) -> AccuracyThreshold | None:
        """Return the threshold of a model in an lm-eval task."""
        matching = (row for row in self.gates if row.task == task and matches(row.model, model))
        return next(matching, None)

    def canaries_of(self, model: str) -> list[str]:
        """Return the names of the canaries that a model must answer; the first row that matches counts."""
        return next((list(row.ask) for row in self.canaries if matches(row.model, model)), [])


def matches(pattern: str, model: str) -> bool:
    """Tell whether a served model's name, without its folder or organisation, fits a row's pattern."""
    return fnmatchcase(model.rstrip("/").rsplit("/", 1)[-1].lower(), pattern)


def load(path: Path = FILE) -> Baselines:
    """Read and check the file. Raises InputError."""
    try:
        return tables.load(path, Baselines)
    except InputError as error:
        raise InputError(error.what, error.why, error.fix, code="input.baselines") from error


def compute_ratios(metrics: Metrics, shape: tuple[int, int, int], figures: list[CitedFigure]) -> list[Ratio]:
    """Return ours over theirs for every figure of the very same shape (isl, osl, concurrency)."""
    ours = {
        "median_e2el_ms": metrics.e2el_ms.median,
        "interactivity": metrics.interactivity,
        "tput_per_gpu": metrics.tput_per_gpu,
        "output_throughput": metrics.output_throughput,
    }
    return [
        Ratio(
            figure=figure.name,
            quantity=quantity,
            measured=measured,
            cited=cited,
            ratio=measured / cited,
            better=measured < cited if quantity in LOWER_IS_BETTER else measured > cited,
            source=figure.source,
            date=figure.date,
        )
        for figure in figures
        if figure.shape == shape
        for quantity, cited in figure.values.items()
        if (measured := ours.get(quantity)) is not None and cited > 0
    ]
