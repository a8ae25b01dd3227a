"""The gate: gathers facts, judges every check of a profile, and decides whether the server may start.

The report has a form for a container's log, in lines, and one for programs, in JSON.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sparkforge.core import paths
from sparkforge.core.errors import RefusalError, SparkforgeError
from validate.checks import CHECKS
from validate.checks.finding import Check, Finding, Status, View, evaluate, skipped
from validate.facts import checkpoint, child, gpu, machine, patches, software
from validate.facts.fact import SCHEMA, Fact, Facts, as_json, gather
from validate.facts.target import Options, Target
from validate.profiles import Profile, named

PROGRAMS = {"deep": child.DEEP, "numerics": child.NUMERICS, "layers": child.LAYERS}
GROUPS = (machine.READINGS, *gpu.GROUPS, software.READINGS, patches.READINGS, checkpoint.READINGS)
MARKS = {Status.PASS: "ok  ", Status.WARN: "WARN", Status.FAIL: "FAIL", Status.SKIPPED: "skip"}
WORDS = {Status.PASS: "passed", Status.WARN: "warned", Status.FAIL: "failed", Status.SKIPPED: "skipped"}


class ValidationVerdict(StrEnum):
    """Whether the server may start."""

    SERVE = "serve"
    REFUSE = "refuse"
    INCOMPLETE = "incomplete"  # nothing failed, but a required check was skipped, so the server must not start


CLOSING = {
    ValidationVerdict.SERVE: "the server may start",
    ValidationVerdict.REFUSE: "the server must not start",
    ValidationVerdict.INCOMPLETE: "not everything was checked, so the server must not start",
}


@dataclass(frozen=True)
class ValidationReport:
    """The result of a validation. `seconds` has `facts`, `imports`, `deep`, `numerics`, `layers` and `checks`."""

    profile: str
    verdict: ValidationVerdict
    findings: tuple[Finding, ...]
    facts: Facts
    seconds: Mapping[str, float]
    timestamp: str
    origin: str

    def of(self, *statuses: Status, required: bool | None = None) -> list[Finding]:
        """Return the findings with one of `statuses`; `required` selects required (True) or advised (False) checks."""
        return [f for f in self.findings if f.status in statuses and required in (None, f.required)]

    def error(self) -> SparkforgeError | None:
        """Return the error with the reason why the server must not start; None if it may start."""
        if self.verdict is ValidationVerdict.SERVE:
            return None
        if self.verdict is ValidationVerdict.REFUSE:
            findings, code = self.of(Status.FAIL), "validation.failed"
            failure = f"{len(findings)} of {len(self.findings)} checks failed in profile {self.profile}"
        else:
            findings, code = self.of(Status.SKIPPED, required=True), "validation.incomplete"
            failure = f"{len(findings)} required checks of profile {self.profile} were skipped"
        why = "; ".join(f"{finding.check}: {finding.evidence}" for finding in findings[:3])
        return RefusalError(failure, why, findings[0].fix, code=code)


def run(profile: str, options: Options, sheet: Facts | None = None) -> ValidationReport:
    """Validate this machine for `profile`. Raises UsageError for an unknown profile and nothing else.

    `sheet` has the facts that need no child process; without `sheet` they are gathered. The facts of child processes
    are gathered only if the options and a check of the profile require them.
    """
    chosen = named(profile).foreign() if options.foreign else named(profile)
    if options.layers and "layers" not in chosen.severities:
        chosen = chosen.model_copy(update={"advised": (*chosen.advised, "layers")})
    needs = {need for name in chosen.severities for need in CHECKS[name].needs}
    target = Target(options, options.stack or chosen.stack)
    start = time.monotonic()
    facts: dict[str, Fact] = gather(target, GROUPS) if sheet is None else dict(sheet)
    seconds = {"facts": time.monotonic() - start}
    wanted = {name: module for name, module in PROGRAMS.items() if options.deep and name in needs}
    start = time.monotonic()
    asked, each = child.gather(target, *wanted.values())
    facts |= asked
    seconds |= {**dict.fromkeys(PROGRAMS, 0.0), **dict(zip(wanted, each, strict=True))}
    seconds["imports"] = max(0.0, time.monotonic() - start - sum(each))
    return _judge(chosen, facts, seconds, "this machine", with_deep=options.deep)


def rehearse(profile: str, sheet: Facts, origin: str) -> ValidationReport:
    """Judge a recorded sheet for `profile`, without facts of this machine. Raises UsageError for an unknown profile."""
    seconds = dict.fromkeys(("facts", "imports", *PROGRAMS), 0.0)
    return _judge(named(profile), sheet, seconds, origin, with_deep=True)


def _judge(
    profile: Profile, facts: Facts, seconds: Mapping[str, float], origin: str, *, with_deep: bool
) -> ValidationReport:
    start = time.monotonic()
    severities = profile.severities
    chosen = [(check, severities[name]) for name, check in CHECKS.items() if name in severities]
    findings = tuple(_evaluate(check, facts, required=required, with_deep=with_deep) for check, required in chosen)
    if not findings or any(f.status is Status.FAIL for f in findings):
        verdict = ValidationVerdict.REFUSE
    elif any(f.status is Status.SKIPPED and f.required for f in findings):
        verdict = ValidationVerdict.INCOMPLETE
    else:
        verdict = ValidationVerdict.SERVE
    rounded = {name: round(value, 3) for name, value in {**seconds, "checks": time.monotonic() - start}.items()}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return ValidationReport(profile.name, verdict, findings, dict(facts), rounded, now, origin)


def _evaluate(check: Check[View], facts: Facts, *, required: bool, with_deep: bool) -> Finding:
    if check.deep and not with_deep:
        reason, fix = "queries torch and vllm, and --no-deep was given", "./inv validate   # without --no-deep"
        return skipped(check, reason, fix, required=required)
    model = facts.get("model.path")
    no_model = model is not None and model.value is None and model.error is None
    if no_model and "model" in check.needs:
        fix = "./inv validate   # checks the tiny model; --model names another one"
        return skipped(check, "no model directory was given", fix, required=required)
    return evaluate(check, View(facts), required=required)


def lines(report: ValidationReport) -> Iterator[str]:
    """Yield the report as lines for a log: a title, the lines of the findings, and the verdict with counts."""
    yield f"validate · profile {report.profile} · {report.origin} · {report.timestamp}"
    yield from finding_lines(report.findings)
    counts = ", ".join(f"{len(report.of(status))} {word}" for status, word in WORDS.items())
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
    yield f"{report.verdict}: {CLOSING[report.verdict]} · {counts} · {times}"


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each finding; below each warning, failure or skipped required check, its fix and its page."""
    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        yield f"{MARKS[finding.status]} {finding.check:<{width}}  {one_line(finding.evidence)}"
        if finding.status in (Status.WARN, Status.FAIL) or (finding.status is Status.SKIPPED and finding.required):
            yield f"       next: {one_line(paths.where_it_runs(finding.fix))}"
            yield f"       read: {finding.doc}"


def one_line(text: str) -> str:
    """Return `text` without line ends and control characters, so that a recorded text cannot forge lines of the log."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def as_document(report: ValidationReport) -> dict[str, Any]:
    """Return the report as JSON values (docs/concepts/validation.md, "JSON report"). --facts can read them."""
    return {
        "schema": SCHEMA, "profile": report.profile, "verdict": str(report.verdict), "exit_code": exit_code(report),
        "timestamp": report.timestamp, "origin": report.origin, "seconds": dict(report.seconds),
        "findings": [{**asdict(finding), "status": str(finding.status)} for finding in report.findings],
        "facts": as_json(report.facts),
    }  # fmt: skip


def exit_code(report: ValidationReport) -> int:
    """Return 0 if the server may start, else the exit code of the report's error."""
    error = report.error()
    return 0 if error is None else error.exit_code
