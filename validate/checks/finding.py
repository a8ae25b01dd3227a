"""Checks and findings of a machine or a cluster. A check is a pure function of facts; if it raises, it has failed."""

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from packaging.version import InvalidVersion, Version

from validate.facts.fact import Fact, Facts, Value

DOC = "docs/reference/checks.md"
MODEL_FIX = "./inv pull REPOSITORY   # resumes; --model DIR names a complete folder"
READABLE = "chmod -R a+rX it (of a container: the mounted one), or run as its owner"
ACCESS_FIX = f"./inv list   # shows the model's folder: {READABLE}"


class Status(StrEnum):
    """The status of a check."""

    PASS = "pass"  # noqa: S105 - a verdict, no password
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckResult:
    """A check's result: its status, the evidence as a sentence, and a fix if the check's default fix does not apply."""

    status: Status
    evidence: str
    fix: str = ""


class FactMissing(Exception):  # noqa: N818 - control flow inside this module, never seen by a user
    """A fact is unknown or of the wrong type; `fix` is the next command, or empty for the check's default fix."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.fix = fix


class View:
    """Typed access to facts. Each method raises FactMissing for an unknown fact or one of another type."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def text(self, name: str) -> str:
        """Return a fact that is a non-empty text."""
        return str(self._typed(name, "text", str, bool))

    def number(self, name: str) -> float:
        """Return a fact that is a finite number, not a boolean."""
        return float(
            self._typed(name, "a number", (int, float), lambda value: type(value) is not bool and abs(value) < 1e18)
        )

    def flag(self, name: str) -> bool:
        """Return a fact that is a boolean."""
        return bool(self._typed(name, "true or false", bool))

    def names(self, name: str) -> list[str]:
        """Return a fact that is a list of texts."""
        return list(
            self._typed(name, "a list of texts", list, lambda value: all(isinstance(item, str) for item in value))
        )

    def table(self, name: str) -> dict[str, Value]:
        """Return a fact that is a table of values by name."""
        return dict(self._typed(name, "a table", dict))

    def numbers(self, name: str) -> dict[str, float]:
        """Return a fact that is a non-empty table of numbers by name."""
        table = self.table(name)
        if not table or not all(isinstance(value, (int, float)) for value in table.values()):
            raise _of_type(name, table, "a table of numbers")
        return table

    def version(self, name: str) -> Version:
        """Return a fact that is a version; only its leading numbers if it is not Python's form (9.20-1ubuntu)."""
        text = self.text(name)
        with suppress(InvalidVersion):
            return Version(text)
        if not (match := re.match(r"v?(\d{1,9}(?:\.\d{1,9})*)", text)):
            raise _of_type(name, text, "a version")
        return Version(match[1])

    def is_none(self, name: str) -> bool:
        """Return whether the fact is known to have no value (an unset variable, no limit)."""
        return self._entry(name).value is None

    def _entry(self, name: str) -> Fact:
        fact = self._facts.get(name)
        if fact is None:
            raise FactMissing(f"{name} is not on the sheet")
        if fact.error is not None:
            denied = fact.error.startswith(os.strerror(errno.EACCES))
            fix = (ACCESS_FIX if denied else MODEL_FIX) if name.startswith("model.") else ""
            raise FactMissing(f"{name} is unknown: {fact.error} (asked: {fact.source})", fix)
        return fact

    def _typed(
        self, name: str, wanted: str, types: type | tuple[type, ...], fits: Callable[[Any], bool] = lambda _value: True
    ) -> Any:
        fact = self._entry(name)
        if fact.value is None:
            raise FactMissing(f"{name} is not set (asked: {fact.source})")
        if not isinstance(fact.value, types) or not fits(fact.value):
            raise _of_type(name, fact.value, wanted)
        return fact.value


def _of_type(name: str, value: Value, wanted: str) -> FactMissing:
    return FactMissing(f"{name} is {repr(value)[:80]}, which is not {wanted}")


FactSource = TypeVar("FactSource")  # View for a machine, ClusterFacts for a cluster
Judge = Callable[[FactSource], CheckResult]


@dataclass(frozen=True)
class Check(Generic[FactSource]):
    """One check: its meaning, the facts that it needs, and the next command if it fails.

    `needs` are the first words of the facts' names: `memory` includes `memory.total_bytes` and others.
    `doc` is the page that explains the check; its text is in lab/checks.toml.
    """

    name: str
    meaning: str
    needs: tuple[str, ...]
    judge: Judge[FactSource]
    fix: str
    doc: str = DOC

    @property
    def deep(self) -> bool:
        """Whether the check needs facts from torch and vllm, which a child process gathers."""
        return not {"deep", "numerics", "layers"}.isdisjoint(self.needs)


class CheckList(list[Check[FactSource]]):
    """The checks of one subject, in the order in which they are defined; `doc` is the page that explains them."""

    def __init__(self, doc: str = DOC) -> None:
        super().__init__()
        self.doc = doc

    def add(
        self, *, fix: str, needs: tuple[str, ...] = (), name: str = "", meaning: str = ""
    ) -> Callable[[Judge[FactSource]], Judge[FactSource]]:
        """Return a decorator that adds a check, by default with its function's name and docstring as meaning."""

        def register(judge: Judge[FactSource]) -> Judge[FactSource]:
            own = judge.__name__.strip("_").replace("_", "-")
            self.append(Check(name or own, meaning or judge.__doc__ or "", needs, judge, fix, self.doc))
            return judge

        return register


@dataclass(frozen=True)
class Finding:
    """A check's result in a profile. A check with `required` False can only warn."""

    check: str
    status: Status
    required: bool
    evidence: str
    fix: str
    doc: str


def evaluate(check: Check[FactSource], facts: FactSource, *, required: bool = True) -> Finding:
    """Return a check's finding. An unknown fact or a bug in the check is a failure; an advised check only warns."""
    try:
        judgement = check.judge(facts)
    except FactMissing as error:
        judgement = failed(f"cannot be judged: {error}", error.fix)
    except Exception as error:  # noqa: BLE001 - fails closed: a bug in a check must not let the server start
        fix = "report this with the JSON report; nothing on this machine needs to change"
        judgement = failed(f"internal error in this check: {type(error).__name__}: {error}", fix)
    status = Status.WARN if judgement.status is Status.FAIL and not required else judgement.status
    fix = judgement.fix or check.fix if status is not Status.PASS else ""
    return Finding(check.name, status, required, judgement.evidence, fix, f"{check.doc}#{check.name}")


def skipped(check: Check[Any], reason: str, fix: str = "", *, required: bool = True) -> Finding:
    """Return the finding of a check that was not run."""
    return Finding(check.name, Status.SKIPPED, required, reason, fix, f"{check.doc}#{check.name}")


def passed(evidence: str) -> CheckResult:
    """Return the result of a check that passed."""
    return CheckResult(Status.PASS, evidence)


def warned(evidence: str, fix: str = "") -> CheckResult:
    """Return a warning: the server can start, but the user should see the evidence."""
    return CheckResult(Status.WARN, evidence, fix)


def failed(evidence: str, fix: str = "") -> CheckResult:
    """Return a failure: the server must not start."""
    return CheckResult(Status.FAIL, evidence, fix)


def judged(fine: bool, evidence: str, fix: str = "") -> CheckResult:
    """Return a passed check if `fine`, else a failed one."""
    return passed(evidence) if fine else failed(evidence, fix)


Table = Mapping[str, Check[View]]


def join(*groups: Sequence[Check[View]]) -> Table:
    """Join groups of checks by name. Raises ValueError for a name that occurs twice."""
    checks = [check for group in groups for check in group]
    table = {check.name: check for check in checks}
    if len(table) != len(checks):
        raise ValueError("two checks have one name")
    return table
