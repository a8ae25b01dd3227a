"""`./inv qualify.accept REPORT`: write the results of a Spark's report into the hardware ledger and its page."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from sparkforge.core.console import say
from sparkforge.core.errors import InputError, RefusalError
from sparkforge.core.files import write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.core.program import exit_code
from sparkforge.core.tables import first_fault
from sparkforge.qualify import ledger
from sparkforge.qualify.ledger import Claim, Ledger, SparkAnswer
from sparkforge.qualify.report import CAPABILITY, COULD_NOT_RUN, DIFFERS, HELD, Report

PAGE = ROOT / "docs" / "hardware.md"
NONE_RUN = "**Nothing in this ledger was verified on a real DGX Spark.** We had no Spark."


def render(known: Ledger) -> str:
    """Return docs/hardware.md."""
    answered = [row for row in known.claims if row.spark]
    verified = NONE_RUN
    if answered:
        verified = f"**{len(answered)} of {len(known.claims)} claims were run on a DGX Spark** (*12.1*)."
    parts = [known.head.strip().replace("{verified}", verified)]
    for section in known.sections:
        parts.append(f"{'#' * section.level} {section.title}")
        parts += [section.text.strip()] if section.text else []
        parts += ["\n".join(map(_line, section.rows))] if section.rows else []
    return "\n\n".join([*parts, known.tail.strip()]) + "\n"


def _line(row: Claim) -> str:
    origin = ", ".join(filter(None, (row.source or f"test `{row.settled_by}`", row.date)))
    line = f"- {row.claim}. *{row.how}*: {origin}"
    if row.spark:
        origin = f"report {row.spark.report[:12]}, {row.spark.date}"
        line += f". *12.1*: {row.spark.verdict}, {row.spark.evidence} ({origin})"
    return line


def write_answers(answers: Mapping[str, SparkAnswer], file: Path, page: Path) -> None:
    """Write a report's answers, by id of the claim, into the ledger, and regenerate the page. Raises InputError.

    An earlier answer to the same claim is replaced; everything else in the file stays as it is.
    """
    text = file.read_text(encoding="utf-8")
    for name, answer in answers.items():
        line = "spark = {" + ", ".join(f"{key} = {_quoted(value)}" for key, value in answer) + "}\n"
        row = re.compile(rf"^id = '{re.escape(name)}'\n(?:(?!spark = )[a-z_]+ = .*\n)*", re.MULTILINE)
        if found := row.search(text):
            rest = re.sub(r"\Aspark = .*\n", "", text[found.end() :])
            text = text[: found.end()] + line + rest
    known = Ledger.model_validate(tomllib.loads(text))
    write_atomic(file, text)
    write_atomic(page, render(known))


def _quoted(text: str) -> str:
    """Return a TOML string on one line."""
    cleaned = "".join(char if char.isprintable() else " " for char in text)
    return '"' + cleaned.replace("\\", "\\\\").replace('"', '\\"') + '"'


def accept(path: Path, file: Path = ledger.FILE, page: Path = PAGE) -> int:
    """Write the answers of a Spark's report into the ledger, and return their number.

    Raises InputError for a file that is no report, RefusalError for a report of another GPU or with nothing to accept.
    """
    again = "./inv qualify   # on a DGX Spark"
    try:
        data = path.read_bytes()
        report = Report.model_validate(json.loads(data))
    except OSError as error:
        raise InputError(f"cannot read {path}", error.strerror or str(error), again, code="input.table") from error
    except ValidationError as error:
        why = first_fault(error)
        raise InputError(f"{path} is no report of ./inv qualify", why, again, code="input.table") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON", " ".join(str(error).split()), again, code="input.table") from error
    if (capability := report.gpu.get("compute_cap", "none")) != CAPABILITY:
        name = report.gpu.get("name", "a machine without a GPU")
        why = f"it is of {name}, compute capability {capability}; the ledger is about {CAPABILITY}"
        raise RefusalError("this report settles nothing", why, again)
    known = {claim.id for claim in ledger.load(file).claims}
    answers = {
        row.id: SparkAnswer(
            verdict=HELD if row.verdict == HELD else DIFFERS,
            evidence=row.evidence,
            report=hashlib.sha256(data).hexdigest()[:32],
            date=report.measured_at[:10],
        )
        for row in report.rows
        if row.verdict != COULD_NOT_RUN and row.id in known
    }
    if not answers:
        raise RefusalError("this report settles nothing", "none of the ledger's claims could be run", again)
    write_answers(answers, file, page)
    return len(answers)


def main() -> None:
    """Accept the report of the command line. Raises as `accept` does."""
    parser = argparse.ArgumentParser(prog="python -m lab.ledger", description=__doc__)
    parser.add_argument("report", type=Path, help="report.json of a DGX Spark")
    say(f"{accept(parser.parse_args().report)} claims have an answer now: git diff docs/hardware.md")


if __name__ == "__main__":
    sys.exit(exit_code(main))
