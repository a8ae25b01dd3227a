"""Reads the hardware ledger (hardware.toml)."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from sparkforge.core import tables
from sparkforge.core.tables import Record

FILE = Path(__file__).with_name("hardware.toml")
How = Literal["compiled", "faked", "binary", "SM90", "emulated", "x86-64", "source", "cited", "open"]
Verdict = Literal["held", "differs", "could not run"]


class SparkAnswer(Record):
    """The verdict of a Spark's report on a claim; `report` is the first half of the report's sha256."""

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


def load(file: Path = FILE) -> Ledger:
    """Return the ledger. Raises InputError."""
    return tables.load(file, Ledger)
