"""`./inv qualify`: runs every part, continues a killed run, and writes one report."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from pydantic import Field

from sparkforge import __version__
from sparkforge.bench import context
from sparkforge.bench.report import make_table, write_page
from sparkforge.core import gpus
from sparkforge.core.console import echo, say
from sparkforge.core.files import read_json, write_json
from sparkforge.core.process import ProbeError
from sparkforge.core.redact import for_support
from sparkforge.core.tables import Record
from sparkforge.image.devices import GPU
from sparkforge.qualify import ledger
from sparkforge.qualify.ledger import Claim, Verdict
from sparkforge.qualify.parts import COULD_NOT_RUN, DIFFERS, HELD, PARTS, Outcome, Qualification, run

CAPABILITY = "12.1"  # of a GB10: reports of other GPUs settle nothing


class RowResult(Record):
    """A run's verdict on one claim of the ledger."""

    id: str
    verdict: Verdict
    evidence: str


class PartResult(Record):
    """The result of a part, and its duration."""

    outcomes: dict[str, Outcome]
    seconds: float


class Progress(Record):
    """The finished parts of a run with certain inputs, by name."""

    inputs: str
    parts: dict[str, PartResult]


class Report(Record):
    """A whole report, without a name, an address or a path of the machine. `seconds` are those of each part."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    version: str
    commit: str
    measured_at: str
    stack: str
    device: str
    gpu: dict[str, str]
    machine: dict[str, str | int]
    outcomes: dict[str, Outcome]
    rows: tuple[RowResult, ...]
    seconds: dict[str, float]

    def count(self, verdict: Verdict) -> int:
        """The number of claims with this verdict."""
        return sum(row.verdict == verdict for row in self.rows)


def judge(claim: Claim, outcomes: Mapping[str, Outcome], capability: str) -> RowResult:
    """Judge a claim by the outcomes; figures are compared only on a GPU of a Spark's capability."""
    outcome = outcomes.get(claim.settled_by)
    if outcome is None:
        return RowResult(id=claim.id, verdict=COULD_NOT_RUN, evidence=f"this device does not run {claim.settled_by}")
    verdict, evidence = outcome.verdict, outcome.evidence
    if claim.model and outcome.model and claim.model != outcome.model:
        verdict, evidence = COULD_NOT_RUN, f"measured with {outcome.model}: {evidence}"
    elif claim.between and capability != CAPABILITY:
        verdict, evidence = COULD_NOT_RUN, f"this machine is no Spark: {evidence}"
    elif claim.between and verdict == HELD:
        low, high = claim.between
        is_inside = outcome.figure is not None and low <= outcome.figure <= high
        verdict = HELD if is_inside else DIFFERS
    return RowResult(id=claim.id, verdict=verdict, evidence=evidence)


def qualify(qualification: Qualification, *, again: bool = False) -> Report:
    """Run every part that an earlier run with the same inputs has not finished; write report.json and report.html.

    Parts that could not run are run again. Raises the errors of preparing the device.
    """
    qualification.tiny.prepare()
    folder, facts = qualification.folder, context.facts()
    progress = folder / "progress.json"
    named = qualification.model.model if qualification.model else ""
    made_of = [facts["gpus"], facts["commit"], qualification.tiny.plan, qualification.tiny.python, named]
    inputs = hashlib.sha256(repr(made_of).encode()).hexdigest()
    finished: dict[str, PartResult] = {}
    with suppress(OSError, ValueError):  # none yet, or a damaged one
        earlier = Progress.model_validate(read_json(progress))
        finished = dict(earlier.parts) if earlier.inputs == inputs and not again else {}
    for name in PARTS:
        if name in finished:
            say(f"{name}: finished in an earlier run (--again runs it once more)")
            continue
        steps = qualification.tiny.steps
        steps.total = max(steps.total, len(steps.seconds) + 1)
        with steps.step(f"qualify {name}") as tell:
            outcomes = run(name, qualification)
            tell(f"{sum(outcome.verdict == HELD for outcome in outcomes.values())} of {len(outcomes)} held")
        finished[name] = PartResult(outcomes=outcomes, seconds=steps.seconds[f"qualify {name}"])
        kept = {
            key: part
            for key, part in finished.items()
            if any(outcome.verdict != COULD_NOT_RUN for outcome in part.outcomes.values())
        }
        write_json(progress, Progress(inputs=inputs, parts=kept).model_dump())
    all_outcomes = {name: outcome for part in finished.values() for name, outcome in part.outcomes.items()}
    claims = [claim for claim in ledger.load().claims if claim.settled_by]
    machine = {name: facts[name] for name in ("processor", "cores", "memory_bytes", "system", "python")}
    gpu: dict[str, str] = {}
    with suppress(ProbeError):
        if qualification.tiny.name == GPU:
            gpu = gpus.query("name", "compute_cap", "driver_version", env=os.environ)[0]
    whole = Report(
        version=__version__,
        commit=facts["commit"],
        measured_at=facts["measured_at"],
        stack=qualification.tiny.environment.name,
        device=qualification.tiny.name,
        gpu=gpu,
        machine=machine,
        outcomes=all_outcomes,
        rows=tuple(judge(claim, all_outcomes, gpu.get("compute_cap", "")) for claim in claims),
        seconds={name: part.seconds for name, part in finished.items()},
    )
    report = Report.model_validate(for_support(whole.model_dump(mode="json", by_alias=True)))
    write_json(folder / "report.json", report.model_dump(mode="json", by_alias=True))
    shown = ", ".join(report.gpu.values()) or "no GPU"
    results = [(name, o.verdict, o.evidence, o.model) for name, o in report.outcomes.items()]
    texts = {claim.id: claim.claim for claim in claims}
    rows = [(row.id, row.verdict, texts[row.id], row.evidence) for row in report.rows]
    write_page(
        folder / "report.html",
        (
            "Sparkforge qualification",
            f"{shown} · device {report.device} · stack {report.stack} · {report.measured_at} · {report.commit}",
            make_table("claims of the hardware ledger", ("id", "verdict", "claim", "evidence"), rows),
            make_table("outcomes", ("name", "verdict", "evidence", "model"), results),
            make_table("seconds of each part", ("part", "seconds"), report.seconds.items()),
        ),
    )
    return report


def print_report(report: Report) -> None:
    """Print the rows, and how many held."""
    width = max((len(row.id) for row in report.rows), default=0)
    for row in report.rows:
        echo(f"{row.verdict:<13} {row.id:<{width}}  {row.evidence}")
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in (HELD, DIFFERS, COULD_NOT_RUN))
    say(f"of {len(report.rows)} claims that `./inv qualify` tests: {counts}")
