"""The hardware ledger (hardware.toml): its reader, its page, and what a report from a Spark adds to it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from sparkforge.core import tables
from sparkforge.core.files import write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.core.tables import Record

FILE = Path(__file__).with_name("hardware.toml")
PAGE = ROOT / "docs" / "hardware.md"
NONE_RUN = "**Nothing in this ledger was verified on a real DGX Spark.** We had none."
OPEN = "open"
How = Literal["compiled", "faked", "binary", "SM90", "emulated", "x86-64", "source", "cited", "open"]
Verdict = Literal["held", "differs", "could not run"]


class SparkAnswer(Record):
    """What a report from a Spark says of a claim; `report` is the first half of its sha256."""

    verdict: Literal["held", "differs"]
    evidence: str
    report: str = Field(pattern=r"^[0-9a-f]{32}$")
    date: str


class Claim(Record):
    """A row of the ledger; the head of the file explains the keys."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    claim: str = Field(min_length=1)
    how: How
    source: str = ""
    date: str = Field(default="", pattern=r"^(\d{4}-\d{2}(-\d{2})?)?$")
    settled_by: str = ""
    between: tuple[float, float] | None = None
    model: str = ""
    spark: SparkAnswer | None = None

    @model_validator(mode="after")
    def _is_backed(self) -> Claim:
        if not (self.source or (self.how == OPEN and self.settled_by)):
            raise ValueError(f"{self.id} has neither a source nor what would settle it")
        return self


class Section(Record):
    """A heading of the page with its text and claims."""

    title: str
    level: int = 2
    text: str = ""
    rows: tuple[Claim, ...] = ()


class Ledger(Record):
    """The whole file."""

    schema_: Literal[1] = Field(alias="schema")
    head: str
    tail: str
    sections: tuple[Section, ...]

    @property
    def claims(self) -> list[Claim]:
        """The rows of all sections."""
        return [row for section in self.sections for row in section.rows]

    @model_validator(mode="after")
    def _names_each_once(self) -> Ledger:
        names = [row.id for row in self.claims]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two rows have the id {min(repeated)}")
        return self


def load(file: Path = FILE) -> Ledger:
    """Read the ledger. Raises InputError."""
    return tables.load(file, Ledger)


def render(ledger: Ledger) -> str:
    """Return docs/hardware.md."""
    answered = [row for row in ledger.claims if row.spark]
    verified = NONE_RUN
    if answered:
        verified = f"**{len(answered)} of {len(ledger.claims)} claims were run on a DGX Spark** (*12.1*)."
    parts = [ledger.head.strip().replace("{verified}", verified)]
    for section in ledger.sections:
        parts.append(f"{'#' * section.level} {section.title}")
        parts += [section.text.strip()] if section.text else []
        parts += ["\n".join(map(_line, section.rows))] if section.rows else []
    return "\n\n".join([*parts, ledger.tail.strip()]) + "\n"


def _line(row: Claim) -> str:
    origin = ", ".join(filter(None, (row.source or f"`{row.settled_by}` settles it", row.date)))
    line = f"- {row.claim}. *{row.how}*: {origin}"
    if row.spark:
        origin = f"report {row.spark.report[:12]}, {row.spark.date}"
        line += f". *12.1*: {row.spark.verdict}, {row.spark.evidence} ({origin})"
    return line


def write_answers(answers: Mapping[str, SparkAnswer], file: Path = FILE, page: Path = PAGE) -> None:
    """Write what a report says of the claims with these ids into the ledger, and make the page anew. Raises InputError.

    An earlier answer to the same claim is replaced; everything else in the file stays as it is.
    """
    text = file.read_text(encoding="utf-8")
    for name, answer in answers.items():
        line = "spark = {" + ", ".join(f"{key} = {_quoted(value)}" for key, value in answer) + "}\n"
        row = re.compile(rf"^id = '{re.escape(name)}'\n(?:(?!spark = )[a-z_]+ = .*\n)*", re.MULTILINE)
        if found := row.search(text):
            rest = re.sub(r"\Aspark = .*\n", "", text[found.end() :])
            text = text[: found.end()] + line + rest
    ledger = Ledger.model_validate(tomllib.loads(text))
    write_atomic(file, text)
    write_atomic(page, render(ledger))


def _quoted(text: str) -> str:
    """Return a TOML string on one line."""
    cleaned = "".join(char if char.isprintable() else " " for char in text)
    return '"' + cleaned.replace("\\", "\\\\").replace('"', '\\"') + '"'
