"""What is known to go wrong: `serve/signatures.toml`, a table of signs, what they mean, and the next command.

[[signature]]
id = "kebab-case"
severity = "error"          # error: does not serve, or answers wrongly; warning: serves worse; note: worth knowing
signs = ["text"]            # a line of a log shows it if it holds one of these, as it stands (bytes are compared: fast)
regex = '''…(?P<name>…)'''  # left out, or what such a line must match as well; its groups may stand in what, why, fix
until = "text"              # from the first line that holds this on, it is no problem: a server's orderly end
block = true                # the lines behind it hold `why:` and `next:`, which become groups (our own errors)
facts = {"container.oom_killed" = true, "container.restarts" = {at_least = 2}}   # or all of these hold
what = "what failed"
why = "the cause"
fix = "the next command"
follows = ["id", …]         # what brings it about: it is told after these; ["*"]: after every other error
examples = ["a line"]       # each must show this signature (tests)
[[signature.seen]]
where = "URL of an upstream issue, or a page of ours"
date = 2026-11-21           # when that was written
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparkforge.errors import SignatureError

TABLE = Path(__file__).with_name("signatures.toml")
EVERY = "*"
AUDIT, ENGINE, LAST = "audit", "docker-engine", "last-up"  # findings that come from no signature (serve/doctor.py)
TEXTS = {"id", "severity", "regex", "until", "what", "why", "fix"}
KEYS = TEXTS | {"signs", "block", "facts", "follows", "examples", "seen"}
OPERATORS = ("is", "at_least", "below")


class Severity(StrEnum):
    """How bad a problem is, worst first."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Seen:
    """Where a problem is described: a URL or a page of ours, and the date of that description."""

    where: str
    date: str


@dataclass(frozen=True)
class Condition:
    """One fact and what it must be: equal to `value`, at least that number, or below it."""

    fact: str
    operator: str
    value: Any

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Tell whether it is so; an unknown fact, or one of another type, is not."""
        found = facts.get(self.fact)
        if self.operator == "is":
            return type(found) is type(self.value) and bool(found == self.value)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return False
        return bool(found >= self.value) if self.operator == "at_least" else bool(found < self.value)


@dataclass(frozen=True)
class Signature:
    """One known problem. `signs` are bytes of a line; `pattern` is what the line must match as well."""

    id: str
    severity: Severity
    signs: tuple[bytes, ...]
    pattern: re.Pattern[str] | None
    until: bytes
    block: bool
    facts: tuple[Condition, ...]
    what: str
    why: str
    fix: str
    follows: tuple[str, ...]
    examples: tuple[str, ...]
    seen: tuple[Seen, ...]

    def match(self, line: str) -> dict[str, str] | None:
        """Return the named groups of a line that holds a sign; None if the line is not about this."""
        if self.pattern is None:
            return {}
        found = self.pattern.search(line)
        return None if found is None else {name: value or "" for name, value in found.groupdict().items()}

    def shows_in(self, line: str) -> bool:
        """Tell whether a line of a log shows this."""
        return any(sign in line.encode() for sign in self.signs) and self.match(line) is not None

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Tell whether the facts show this."""
        return bool(self.facts) and all(condition.holds(facts) for condition in self.facts)


def load(table: Path = TABLE) -> tuple[Signature, ...]:
    """Read every signature. Raises SignatureError for a file that cannot be read or is malformed."""
    try:
        found = tuple(_signature(entry) for entry in tomllib.loads(table.read_text(encoding="utf-8"))["signature"])
        _refuse_unknown_causes(found)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise SignatureError(
            f"cannot use {table.name}", f"{type(error).__name__}: {error}", f"git diff serve/{table.name}"
        ) from error
    return found


def table() -> str:
    """Return the table of docs/doctor.md, which a test compares with the page."""
    rows = ["| id | what it says | read on |", "| --- | --- | --- |"]
    for each in load():
        mark = "" if each.severity is Severity.ERROR else f" *({each.severity})*"
        links = ", ".join(_link(seen) for seen in each.seen)
        what = re.sub(r"\{\w+\}(?:\{\w+\})*", "…", each.what)
        rows.append(f"| `{each.id}`{mark} | {what} | {links} |")
    return "\n".join(rows)


def _link(seen: Seen) -> str:
    if thread := re.fullmatch(r"https://github\.com/[\w.-]+/([\w.-]+)/\w+/(\d+)", seen.where):
        return f"[{thread[1]} {thread[2]}]({seen.where}) ({seen.date})"
    return f"[{seen.where.rpartition('/')[2]}]({seen.where.removeprefix('docs/')})"


def _signature(entry: dict[str, Any]) -> Signature:
    name = str(entry["id"])
    if unknown := sorted(entry.keys() - KEYS):
        raise ValueError(f"{name}: unknown key {unknown[0]!r}")
    made = Signature(
        id=name,
        severity=Severity(entry["severity"]),
        signs=tuple(_text(sign).encode() for sign in entry.get("signs", [])),
        pattern=re.compile(entry["regex"]) if "regex" in entry else None,
        until=_text(entry.get("until", "")).encode(),
        block=bool(entry.get("block", False)),
        facts=tuple(each for fact, wanted in entry.get("facts", {}).items() for each in _conditions(fact, wanted)),
        what=_text(entry["what"]),
        why=_text(entry["why"]),
        fix=_text(entry["fix"]),
        follows=tuple(_text(each) for each in entry.get("follows", [])),
        examples=tuple(_text(each) for each in entry.get("examples", [])),
        seen=tuple(_seen(each) for each in entry.get("seen", [])),
    )
    if not made.signs and not made.facts:
        raise ValueError(f"{name} has neither signs nor facts")
    if b"" in made.signs:
        raise ValueError(f"{name} has an empty sign, which every line holds")
    _refuse_unknown_groups(made)
    return made


def _conditions(fact: str, wanted: Any) -> list[Condition]:
    bounds = wanted if isinstance(wanted, dict) else {"is": wanted}
    if unknown := sorted(bounds.keys() - set(OPERATORS)):
        raise ValueError(f"{fact}: unknown operator {unknown[0]!r}")
    return [Condition(fact, operator, value) for operator, value in bounds.items()]


def _seen(entry: dict[str, Any]) -> Seen:
    if not isinstance(entry["date"], date):
        raise TypeError(f"{entry['where']}: {entry['date']!r} is no date")
    return Seen(_text(entry["where"]), entry["date"].isoformat())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _refuse_unknown_groups(made: Signature) -> None:
    """A name in braces that no group fills would be a KeyError when somebody needs the answer."""
    groups = {*(made.pattern.groupindex if made.pattern else ()), *(("why", "next") if made.block else ())}
    for text in (made.what, made.why, made.fix):
        if unknown := sorted(set(re.findall(r"\{(\w*)\}", text)) - groups):
            raise ValueError(f"{made.id}: no group fills {{{unknown[0]}}}")


def _refuse_unknown_causes(found: tuple[Signature, ...]) -> None:
    names = [signature.id for signature in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{twice[0]} is there twice")
    for signature in found:
        if unknown := sorted(set(signature.follows) - {*names, EVERY, AUDIT, ENGINE, LAST}):
            raise ValueError(f"{signature.id} follows {unknown[0]!r}, which is no signature")


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
