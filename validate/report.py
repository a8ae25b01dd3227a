"""A report as lines for a container's log and as JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sparkforge.core import paths
from validate.checks.finding import Finding, Status
from validate.facts.fact import SCHEMA, as_json
from validate.gate import ValidationReport, ValidationVerdict

MARKS = {Status.PASS: "ok  ", Status.WARN: "WARN", Status.FAIL: "FAIL", Status.SKIPPED: "skip"}
WORDS = {Status.PASS: "passed", Status.WARN: "warned", Status.FAIL: "failed", Status.SKIPPED: "skipped"}
CLOSING = {
    ValidationVerdict.SERVE: "the server may start",
    ValidationVerdict.REFUSE: "the server must not start",
    ValidationVerdict.INCOMPLETE: "not everything was checked, so the server must not start",
}


def lines(report: ValidationReport) -> Iterator[str]:
    """One line per check with its evidence; below each check that did not pass, its fix and its page."""
    yield f"validate · profile {report.profile} · {report.origin} · {report.timestamp}"
    yield from finding_lines(report.findings)
    counts = ", ".join(f"{len(report.of(status))} {word}" for status, word in WORDS.items())
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
    yield f"{report.verdict}: {CLOSING[report.verdict]} · {counts} · {times}"


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each finding; below each finding that did not pass, its fix and its page."""
    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        yield f"{MARKS[finding.status]} {finding.check:<{width}}  {one_line(finding.evidence)}"
        if finding.status in (Status.WARN, Status.FAIL) or (finding.status is Status.SKIPPED and finding.required):
            yield f"       next: {one_line(paths.where_it_runs(finding.fix))}"
            yield f"       read: {finding.doc}"


def one_line(text: str) -> str:
    """Replace line ends and control characters, so that a recorded text cannot forge lines of the log."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def as_document(report: ValidationReport) -> dict[str, Any]:
    """The report as JSON values (docs/concepts/validation.md, "JSON report"). --facts can read it."""
    return {
        "schema": SCHEMA, "profile": report.profile, "verdict": str(report.verdict), "exit_code": exit_code(report),
        "timestamp": report.timestamp, "origin": report.origin, "seconds": dict(report.seconds),
        "findings": [{**asdict(finding), "status": str(finding.status)} for finding in report.findings],
        "facts": as_json(report.facts),
    }  # fmt: skip


def exit_code(report: ValidationReport) -> int:
    """0 if the server may start, else the exit code of its error."""
    error = report.error()
    return 0 if error is None else error.exit_code
