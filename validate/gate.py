"""The gate: gathers facts, judges every check of a profile, and says whether the server may start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from sparkforge.errors import SparkforgeError, ValidationFailedError, ValidationIncompleteError
from validate import checkpoint, deep, facts, gpu, machine, measured, numerics, software
from validate.checks import CHECKS
from validate.facts import Fact, Facts
from validate.finding import Check, Finding, Status, evaluate, skipped
from validate.profiles import Profile, named
from validate.scene import Options, Scene

GROUPS = (
    machine.READINGS,
    gpu.SMI_READINGS,
    gpu.CUDA_READINGS,
    software.READINGS,
    checkpoint.READINGS,
    measured.READINGS,
)


class Verdict(StrEnum):
    """Whether the server may start."""

    SERVE = "serve"
    REFUSE = "refuse"
    INCOMPLETE = "incomplete"  # nothing failed, but a required check was skipped: not green


@dataclass(frozen=True)
class Report:
    """All that a validation found. `seconds` has `facts`, `deep`, `numerics` and `checks`."""

    profile: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    facts: Facts
    seconds: Mapping[str, float]
    timestamp: str
    origin: str

    def of(self, *statuses: Status, required: bool | None = None) -> list[Finding]:
        """Findings with one of `statuses`, and of the given severity if one is given."""
        return [f for f in self.findings if f.status in statuses and required in (None, f.required)]

    def error(self) -> SparkforgeError | None:
        """The error that stands for this report; None if the server may start."""
        if self.verdict is Verdict.REFUSE:
            worst = self.of(Status.FAIL)
            return ValidationFailedError(
                f"{len(worst)} of {len(self.findings)} checks failed in profile {self.profile}",
                "; ".join(f"{f.check}: {f.evidence}" for f in worst[:3]),
                worst[0].fix,
            )
        if self.verdict is Verdict.INCOMPLETE:
            left = self.of(Status.SKIPPED, required=True)
            return ValidationIncompleteError(
                f"{len(left)} required checks of profile {self.profile} were skipped",
                "; ".join(f"{f.check}: {f.evidence}" for f in left[:3]),
                left[0].fix,
            )
        return None

    def require_green(self) -> None:
        """Raise ValidationFailedError or ValidationIncompleteError unless the server may start."""
        if (error := self.error()) is not None:
            raise error


def run(profile: str, options: Options) -> Report:
    """Validate this machine for `profile`. Raises UsageError for an unknown profile and nothing else.

    Deep facts are gathered only if `options.deep` and a check of the profile needs one.
    """
    chosen = named(profile)
    scene = Scene(options, chosen.stack)
    begun = time.monotonic()
    found: dict[str, Fact] = facts.gather(scene, GROUPS)
    shallow = time.monotonic()
    if options.deep and _asks(chosen, "deep."):
        found |= deep.gather(scene)
    deepened = time.monotonic()
    if options.deep and _asks(chosen, "numerics."):
        found |= numerics.gather(scene)
    computed = time.monotonic()
    findings = tuple(_judge(chosen, found, with_deep=options.deep))
    seconds = {
        "facts": shallow - begun,
        "deep": deepened - shallow,
        "numerics": computed - deepened,
        "checks": time.monotonic() - computed,
    }
    return _report(chosen, findings, found, seconds, "this machine")


def rehearse(profile: str, sheet: Facts, origin: str) -> Report:
    """Judge a recorded sheet as `profile` would; nothing of this machine is looked at. Raises UsageError as `run`."""
    chosen = named(profile)
    begun = time.monotonic()
    findings = tuple(_judge(chosen, sheet, with_deep=True))
    seconds = {"facts": 0.0, "deep": 0.0, "numerics": 0.0, "checks": time.monotonic() - begun}
    return _report(chosen, findings, sheet, seconds, origin)


def _asks(profile: Profile, kind: str) -> bool:
    """Whether a check of the profile needs a fact whose name begins with `kind`."""
    names = (*profile.required, *profile.advised)
    return any(need.startswith(kind) for name in names for need in CHECKS[name].needs)


def _judge(profile: Profile, found: Facts, *, with_deep: bool) -> list[Finding]:
    chosen = {**dict.fromkeys(profile.required, True), **dict.fromkeys(profile.advised, False)}
    return [_one(check, found, chosen[name], with_deep) for name, check in CHECKS.items() if name in chosen]


def _one(check: Check, found: Facts, required: bool, with_deep: bool) -> Finding:
    if check.deep and not with_deep:
        return skipped(check, "asks torch and vllm, and --no-deep was given", "leave out --no-deep", required=required)
    if any(name.startswith("model.") for name in check.needs) and _no_model(found):
        return skipped(check, "no model directory was given", "add --model DIR", required=required)
    return evaluate(check, found, required=required)


def _no_model(found: Facts) -> bool:
    fact = found.get("model.path")
    return fact is not None and fact.value is None and fact.error is None


def _report(
    profile: Profile,
    findings: tuple[Finding, ...],
    found: Facts,
    seconds: Mapping[str, float],
    origin: str,
) -> Report:
    if not findings or any(f.status is Status.FAIL for f in findings):
        verdict = Verdict.REFUSE
    elif any(f.status is Status.SKIPPED and f.required for f in findings):
        verdict = Verdict.INCOMPLETE
    else:
        verdict = Verdict.SERVE
    rounded = {name: round(value, 3) for name, value in seconds.items()}
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    return Report(profile.name, verdict, findings, dict(found), rounded, stamp, origin)
