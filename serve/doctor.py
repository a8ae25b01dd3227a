"""`./inv doctor`: what is wrong, the first cause first, and the next command. Reads much, changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from serve import evidence, logscan, signatures
from serve.evidence import Evidence
from serve.signatures import AUDIT, ENGINE, EVERY, LAST, Seen, Severity, Signature
from sparkforge import __version__, paths
from sparkforge.console import console, say
from sparkforge.errors import ProblemsFoundError, SparkforgeError, UsageError
from validate.finding import Status
from validate.report import one_line

SCHEMA = 1
MARKS = {Severity.ERROR: "✗", Severity.WARNING: "!", Severity.NOTE: "·"}
PLACES = 3  # of a problem that are shown
LONGEST = 400  # characters of a text that comes from a file
CHECK = "validation-check"  # a signature's id, too: logs and reports tell the same


@dataclass(frozen=True)
class Place:
    """Where a problem shows: a log and its line, or what told a fact; the text there, and how often it comes."""

    source: str
    line: int
    text: str
    count: int = 1

    def __str__(self) -> str:
        where = f"{self.source}:{self.line}" if self.line else self.source
        return f"{where} · {self.text}" + (f" (and {self.count - 1} more)" if self.count > 1 else "")


@dataclass(frozen=True)
class Problem:
    """One finding in the house form. `causes` are the ids of other findings that bring it about."""

    id: str
    severity: Severity
    what: str
    why: str
    fix: str
    places: tuple[Place, ...] = ()
    follows: tuple[str, ...] = ()
    seen: tuple[Seen, ...] = ()
    causes: tuple[str, ...] = field(default=())


def main(*, log: str, state: str, as_json: bool, bundle: str) -> None:
    """Look, tell, and write the archive if asked. Raises ProblemsFoundError for anything worse than a note.

    Raises UsageError for a folder that is none or a wrong archive name, StorageError for a log that cannot be read.
    """
    place = _archive(bundle) if bundle else None
    found = gather(log, state)
    problems = ranked(examine(found, signatures.load()))
    if as_json:
        print(json.dumps(document(problems, found), indent=2, ensure_ascii=False))
    else:
        _tell(problems, found)
    if place:
        from serve import support  # noqa: PLC0415 - only for an archive

        support.write(place, document(problems, found), found)
    worst = [problem for problem in problems if problem.severity is not Severity.NOTE]
    if worst:
        count = f"{len(worst)} problems were found; first" if len(worst) > 1 else "one problem was found"
        raise ProblemsFoundError(f"{count}: {worst[0].what}", worst[0].why, worst[0].fix)


def gather(log: str, state: str) -> Evidence:
    """Return what there is to look at: a log alone if only that is named, else a state folder, engine and machine."""
    folder = paths.typed(state).absolute() if state else paths.state()
    if state and not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "--state names one like .sparkforge", "./inv doctor")
    named = evidence.of_log(log) if log else None
    if named and not state:
        return Evidence(logs=[named], sources=[evidence.Source(named.name, "the log that you named")])
    found = evidence.of_state(folder)
    from serve import container_evidence  # noqa: PLC0415 - the Docker SDK takes half a second to load

    container_evidence.look(found)
    if named:
        found.logs.append(named)
        found.say(named.name, "the log that you named")
    evidence.of_machine(found)
    return found


def examine(found: Evidence, known: Sequence[Signature]) -> list[Problem]:
    """Return every problem that the evidence shows, those that come earlier in a build or start first."""
    engine = [_of_error(ENGINE, error, asked) for asked, error in found.errors]
    in_files = [*_audits(found), *_checks(found), *_in_logs(found, known)]
    return _merged([*in_files, *_in_facts(found, known), *engine, *_last(found)])


def ranked(problems: Sequence[Problem]) -> list[Problem]:
    """Sort by severity, and causes before what they bring about; the order of discovery decides the rest.

    A cause counts as severe as the worst that follows from it.
    """
    linked = [replace(problem, causes=_causes(problem, problems)) for problem in problems]
    depths = {problem.id: _depth(problem.id, linked, ()) for problem in linked}
    return sorted(linked, key=lambda problem: (_rank(problem, linked, ()), depths[problem.id]))


def document(problems: Sequence[Problem], found: Evidence) -> dict[str, Any]:
    """Return the findings as JSON values (docs/doctor.md)."""
    return {
        "schema": SCHEMA,
        "sparkforge": __version__,
        "problems": [asdict(problem) for problem in problems],
        "sources": [asdict(source) for source in found.sources],
    }


def lines(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the findings for a person."""
    numbers = {problem.id: number for number, problem in reversed(list(enumerate(problems, 1)))}
    for number, problem in enumerate(problems, 1):
        yield f"{number:>2} {MARKS[problem.severity]} {problem.what}   [{problem.id}]"
        yield f"     why:  {problem.why}"
        yield from (f"     at:   {place}" for place in problem.places[:PLACES])
        yield f"     next: {problem.fix}"
        if problem.causes:
            yield f"     follows from {', '.join(str(numbers[cause]) for cause in problem.causes)}, most likely"
        yield from (f"     read: {seen.where} ({seen.date})" for seen in problem.seen)


def _tell(problems: Sequence[Problem], found: Evidence) -> None:
    for source in found.sources:
        say(f"{'read' if source.read else 'not read'}: {source.name} · {one_line(source.told)}")
    for line in lines(problems):
        print(line)
    if not problems:
        print("nothing that is known to go wrong was found")


def _archive(name: str) -> Path:
    path = paths.typed(name)
    if not path.name.endswith((".tar.gz", ".tgz")) or path.is_dir():
        raise UsageError(f"--bundle {name} is no archive's name", "it ends with .tar.gz", "--bundle support.tar.gz")
    return path


def _in_logs(found: Evidence, known: Sequence[Signature]) -> Iterator[Problem]:
    """Read every log to its end, and yield what it shows."""
    for log in found.logs:
        with console().status(f"reading {log.name}"):
            hits = logscan.scan(log.chunks(), known)
        for hit in hits:
            place = Place(log.name, hit.line, one_line(hit.text), hit.count)
            yield _of_signature(hit.signature, hit.groups, place)
        if log.broken:
            found.say(log.name, f"read to byte {log.size} only: {log.broken}", read=False)


def _in_facts(found: Evidence, known: Sequence[Signature]) -> Iterator[Problem]:
    for signature in known:
        if signature.holds(found.facts):
            names = list(dict.fromkeys(condition.fact for condition in signature.facts))
            told = ", ".join(f"{name} = {found.facts[name]}" for name in names)
            yield _of_signature(signature, {}, Place(one_line(found.where[names[0]]), 0, _short(told)))


def _of_signature(signature: Signature, groups: Mapping[str, str], place: Place) -> Problem:
    def filled(text: str) -> str:
        """Put the groups into `{name}`; one that did not match is empty."""
        return _short(re.sub(r"\{(\w+)\}", lambda found: groups.get(found[1], ""), text))

    return Problem(
        id=signature.id,
        severity=signature.severity,
        what=filled(signature.what),
        why=filled(signature.why) or "it does not say why",
        fix=filled(signature.fix),
        places=(place,),
        follows=signature.follows,
        seen=signature.seen,
    )


def _checks(found: Evidence) -> Iterator[Problem]:
    """Yield what a validator found, from its reports: required checks that failed or were skipped, and warnings."""
    for name, report in found.reports.items():
        findings = report.get("findings")
        for each in findings if isinstance(findings, list) else []:
            if isinstance(each, dict) and (severity := _severity(each)):
                check, status = _short(each.get("check")), _short(each.get("status"))
                verb = {"fail": "failed", "warn": "warns"}.get(status, "was not run")
                what = f"the validator's check {check} {verb}"
                place = Place(name, 0, f"{check}: {status}")
                yield Problem(CHECK, severity, what, _short(each.get("evidence")), _short(each.get("fix")), (place,))


def _severity(finding: Mapping[str, Any]) -> Severity | None:
    status, required = finding.get("status"), finding.get("required") is True
    if status == Status.FAIL or (status == Status.SKIPPED and required):
        return Severity.ERROR
    return Severity.NOTE if status == Status.WARN else None


def _audits(found: Evidence) -> Iterator[Problem]:
    """Yield what the audits of builds refused."""
    for name, audit in found.documents.items():
        violations = audit.get("violations")
        first = violations[0] if isinstance(violations, list) and violations else None
        if isinstance(first, dict) and isinstance(violations, list):
            what = f"the audit refused what was built: {len(violations)} times, first {_short(first.get('rule'))}"
            place = Place(name, 0, _short(first.get("file")))
            fix = _short(first.get("fix")) or "./inv build"
            yield Problem(AUDIT, Severity.ERROR, what, _short(first.get("detail")), fix, (place,))


def _last(found: Evidence) -> Iterator[Problem]:
    """Yield how the last `./inv up` failed: what the others bring about, or the only thing that is known."""
    if failed := found.failure:
        error = SparkforgeError(str(failed.what), str(failed.why), str(failed.fix))
        if error.fix.startswith("./inv doctor"):  # one is here already
            error.fix = "./inv logs"
        yield _of_error(LAST, error, f"./inv up, {evidence.ago(failed.ended)}", (EVERY,))


def _of_error(name: str, error: SparkforgeError, asked: str, follows: tuple[str, ...] = ()) -> Problem:
    place = Place(asked, 0, type(error).__name__ if name != LAST else "failed")
    return Problem(name, Severity.ERROR, _short(error.what), _short(error.why), _short(error.fix), (place,), follows)


def _merged(problems: Iterable[Problem]) -> list[Problem]:
    """Put together what several sources tell in the same words."""
    kept: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        key = (problem.id, problem.what)
        former = kept.get(key)
        kept[key] = replace(former, places=(*former.places, *problem.places)) if former else problem
    return list(kept.values())


def _causes(problem: Problem, among: Sequence[Problem]) -> tuple[str, ...]:
    """Return the ids of the findings that bring this one about; `*` stands for every error that is not such itself."""
    named = {*problem.follows} - {EVERY, problem.id}
    if EVERY in problem.follows:
        named |= {each.id for each in among if each.severity is Severity.ERROR and EVERY not in each.follows}
    return tuple(dict.fromkeys(each.id for each in among if each.id in named))


def _depth(name: str, among: Sequence[Problem], above: tuple[str, ...]) -> int:
    """Return how many steps a finding is away from a cause that nothing explains; a circle ends at its begin."""
    causes = {cause for problem in among if problem.id == name for cause in problem.causes} - {*above, name}
    return 1 + max(_depth(cause, among, (*above, name)) for cause in causes) if causes else 0


def _rank(problem: Problem, among: Sequence[Problem], above: tuple[str, ...]) -> int:
    """Return the rank of the worst of a finding and all that follows from it."""
    seen = (*above, problem.id)
    followers = [each for each in among if problem.id in each.causes and each.id not in seen]
    return min([problem.severity.rank, *(_rank(each, among, seen) for each in followers)])


def _short(value: Any) -> str:
    """Return a text of a file as one line that cannot disturb a terminal."""
    return one_line(str("" if value is None else value))[:LONGEST]
