"""Reads `baselines.toml`: sweeps, texts, thresholds, canaries and cited figures."""

from __future__ import annotations

import hashlib
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from bench.schema import Metrics, Model, Ratio
from sparkforge.errors import BaselineError, UsageError

HERE = Path(__file__).parent
FILE = HERE / "baselines.toml"
LOWER_IS_BETTER = {"median_e2el_ms"}
EDIT = "correct bench/baselines.toml, then run the same command again"


class Sweep(Model):
    """The concurrencies to run for one shape."""

    isl: int
    osl: int
    concurrencies: list[int]


class Text(Model):
    """A text that lies beside this file, and whose it is."""

    name: str
    file: str
    sha256: str
    licence: str
    source: str

    def read(self) -> str:
        """Return it. Raises BaselineError if it is not the text that the thresholds were measured on."""
        data = (HERE / self.file).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise BaselineError(
                f"bench/{self.file} has changed",
                "its sha256 is not the recorded one, so thresholds mean nothing on it",
                f"git checkout bench/{self.file}",
            )
        return data.decode()


class Threshold(Model):
    """What a model must reach on a text, or in an lm-eval task."""

    model: str
    text: str = ""
    task: str = ""
    at_most: dict[str, float] = Field(default={})
    at_least: dict[str, float] = Field(default={})
    sanity: bool = False
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")


class Canaries(Model):
    """The questions that a model must answer in the right form."""

    model: str
    ask: list[Literal["answers", "first_token", "content", "tool_call"]]
    why: str


class Figure(Model):
    """Somebody else's figures. `shape` is isl, osl, concurrency; 0 is unknown."""

    name: str
    shape: tuple[int, int, int]
    values: dict[str, float]
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")

    @property
    def told_shape(self) -> str:
        """The shape for people."""
        isl, osl, conc = (str(n) if n else "?" for n in self.shape)
        return f"{isl}/{osl} c{conc}"


class Baselines(Model):
    """The whole file."""

    schema_version: Literal[1] = Field(alias="schema")
    sweeps: list[Sweep]
    texts: list[Text]
    gates: list[Threshold]
    canaries: list[Canaries]
    figures: list[Figure]

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

    def threshold(self, model: str, text: str) -> Threshold | None:
        """Return the threshold of a model on a text; the first row that matches counts."""
        matching = (row for row in self.gates if row.text == text and matches(row.model, model))
        return next(matching, None)

    def task_threshold(self, model: str, task: str) -> Threshold | None:
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
    """Read and check the file. Raises BaselineError."""
    try:
        return Baselines.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise BaselineError(f"{path.name} is no TOML", str(error), EDIT) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BaselineError(f"{path.name} is malformed", f"{where}: {first['msg']}", EDIT) from error


def ratios(metrics: Metrics, shape: tuple[int, int, int], figures: list[Figure]) -> list[Ratio]:
    """Return ours over theirs for every figure of the very same shape (isl, osl, concurrency)."""
    ours = {
        "median_e2el_ms": metrics.e2el_ms.median,
        "interactivity": metrics.interactivity,
        "tput_per_gpu": metrics.tput_per_gpu,
        "output_throughput": metrics.output_throughput,
    }
    made = []
    for figure in figures:
        for quantity, cited in figure.values.items():
            measured = ours.get(quantity)
            if figure.shape == shape and measured is not None and cited > 0:
                ratio = measured / cited
                better = ratio < 1 if quantity in LOWER_IS_BETTER else ratio > 1
                made.append(
                    Ratio(
                        figure=figure.name,
                        quantity=quantity,
                        measured=measured,
                        cited=cited,
                        ratio=ratio,
                        better=better,
                        source=figure.source,
                        date=figure.date,
                    )
                )
    return made
