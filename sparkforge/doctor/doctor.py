"""`./inv doctor`: print the problems, causes first, and the next command. It changes nothing.

`--bundle` writes a support archive for other people, without names, addresses and secrets: its content is redacted by
`sparkforge.core.redact.for_support`. Only the beginning and the end of a long log are kept. The same evidence gives the
same bytes: members are sorted, times and owners are zero.
"""

import gzip
import io
import json
import platform
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from sparkforge import __version__
from sparkforge.core import events, paths
from sparkforge.core.console import console, echo, echo_json, say, without_passwords
from sparkforge.core.errors import RefusalError, SparkforgeError, StorageError, UsageError, on
from sparkforge.core.events import Event, Line
from sparkforge.core.files import atomic_file
from sparkforge.core.git import checkout_commit
from sparkforge.core.redact import for_support
from sparkforge.core.tables import Record
from sparkforge.doctor import evidence as evidences
from sparkforge.doctor import signatures
from sparkforge.doctor.evidence import Evidence
from sparkforge.doctor.signatures import AUDIT, ENGINE, EVERY, LAST, UNKNOWN, Seen, Severity, Signature
from validate.checks.finding import Status
from validate.gate import one_line

# A finding's status in a validation report → its severity here; a check that was skipped counts only if it is required.
VERDICTS = {
    str(Status.FAIL): (Severity.FATAL, "failed"),
    str(Status.SKIPPED): (Severity.FATAL, "was not run"),
    str(Status.WARN): (Severity.HARMLESS, "warns"),
}
SCHEMA = 2  # 2: severities are fatal, slow, harmless; places have a context
MARKS = {Severity.FATAL: "✗", Severity.SLOW: "!", Severity.HARMLESS: "·"}
PLACES = 3  # of a problem that are printed
BLOB = re.compile(r"\s*[\w+/=-]{20,}\s*")  # such a line may be part of a key, and does not help a diagnosis
LONGEST = 400  # characters of a text that comes from a file
# The groups of a problem that is found by facts: the command that prints this checkout's logs.
LOGS = {"log": "./inv logs"}
CHECK = "validation-check"  # a signature's id, too: logs and reports show the same problem
TOP = "sparkforge-support"
MAX_TOTAL = 16 << 20  # bytes of logs, before compression
UNIT_LOGS = 20  # the newest logs of compilers; a kernel build leaves hundreds
ABOUT = """A support archive of Sparkforge.

doctor.json       what `./inv doctor` found, and what it read
facts.json        versions, the machine, and the other facts that signatures use
reports/          the validator's reports
manifests/        inputs and outputs of each build stage, with hashes
logs/             the beginning and the end of each log
docker/           the container as `docker inspect` shows it, cut; values of unknown variables left out

Tokens, keys, user and host names, homes, addresses and hardware ids were taken out by rules. Rules miss
things: look through it before you send it.
"""


class Place(Record):
    """The place of a problem: a log and a line number, or the source of a fact; the text there, and its occurrences.

    `context` has the lines around a fault, redacted.
    """

    source: str
    line: int = 0
    text: str
    count: int = 1
    context: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.source}:{self.line}" if self.line else self.source
        return f"{where} · {self.text}" + (f" (and {self.count - 1} more)" if self.count > 1 else "")


class Problem(Record):
    """One problem, its reason and the next command. `causes` are the ids of other problems that lead to it."""

    id: str
    severity: Severity
    what: str
    why: str
    fix: str
    places: tuple[Place, ...] = ()
    follows: tuple[str, ...] = ()
    seen: tuple[Seen, ...] = ()
    causes: tuple[str, ...] = ()


def main(*, log: str, state: str, as_json: bool, bundle: str) -> None:
    """Print the problems, and write the archive `bundle` if it is named.

    Raises RefusalError for a problem that is not harmless, UsageError if `state` is not a folder or `bundle` is not an
    archive's name, StorageError for a log that cannot be read or an archive that cannot be written.
    """
    archive = paths.typed(bundle) if bundle else None
    if archive and (not archive.name.endswith((".tar.gz", ".tgz")) or archive.is_dir()):
        raise UsageError(f"--bundle {bundle} is no archive's name", "it ends with .tar.gz", "--bundle support.tar.gz")
    evidence = gather(log, state)
    problems = ranked(examine(evidence, signatures.load()))
    if as_json:
        echo_json(document(problems, evidence))
    else:
        for source in evidence.sources:
            say(f"{'read' if source.read else 'not read'}: {source.name} · {one_line(source.note)}")
        for line in lines(problems):
            echo(line)
        if not problems:
            echo("nothing that is known to go wrong was found")
        elif all(problem.severity is Severity.HARMLESS for problem in problems):
            echo("none of this is a fault: the server runs with it")
    if archive:
        write_archive(archive, document(problems, evidence), evidence)
    worst = [problem for problem in problems if problem.severity is not Severity.HARMLESS]
    if worst:
        count = f"{len(worst)} problems were found; first" if len(worst) > 1 else "one problem was found"
        raise RefusalError(f"{count}: {worst[0].what}", worst[0].why, worst[0].fix, code="validation.problems")


def gather(log: str, state: str) -> Evidence:
    """Return the evidence: a single log, or the state folder, the Docker engine and the machine.

    Raises UsageError if `state` is not a folder, StorageError for a log that cannot be read.
    """
    folder = paths.typed(state).absolute() if state else paths.state()
    if state and not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "--state names one like .sparkforge", "./inv doctor")
    log_file = evidences.open_log(log) if log else None
    if log_file and not state:
        return Evidence(logs=[log_file], sources=[evidences.EvidenceSource(log_file.name, "the log that you named")])
    evidence = evidences.collect_state(folder)
    from sparkforge.doctor import container  # noqa: PLC0415 - the Docker SDK takes half a second to load

    container.add_container(evidence)
    if log_file:
        evidence.logs.append(log_file)
        evidence.add_source(log_file.name, "the log that you named")
    evidences.add_machine(evidence)
    return evidence


def examine(evidence: Evidence, known: Sequence[Signature]) -> list[Problem]:
    """Return every problem that the evidence shows, in the order of the stages of a build or start."""
    problems = [
        *_refused_audits(evidence),
        *_failed_checks(evidence),
        *_in_logs(evidence, known),
        *_in_facts(evidence, known),
        *(_of_error(ENGINE, error, question) for question, error in evidence.errors),
    ]
    if failed := evidence.failure:  # an effect of the other problems, or the only known problem
        error = SparkforgeError(str(failed.what), str(failed.why), str(failed.fix))
        if error.fix.startswith("./inv doctor"):  # that command runs already
            error.fix = "./inv logs"
        problems.append(_of_error(LAST, error, f"./inv up, {evidences.ago(failed.ended)}"))
    merged: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        key = (problem.id, problem.what)
        earlier = merged[key].places if key in merged else ()
        merged[key] = problem.model_copy(update={"places": (*earlier, *problem.places)})
    return list(merged.values())


def ranked(problems: Sequence[Problem]) -> list[Problem]:
    """Sort by severity, then causes before effects, then by discovery. A cause ranks as high as its worst effect."""
    linked = [problem.model_copy(update={"causes": _causes(problem, problems)}) for problem in problems]
    direct = {name: {cause for p in linked if p.id == name for cause in p.causes} for name in (p.id for p in linked)}
    roots = {name: causes - {name} for name, causes in direct.items()}  # direct and indirect causes
    for _ in roots:
        roots = {name: causes.union(*(direct[cause] for cause in causes)) - {name} for name, causes in roots.items()}

    def order(problem: Problem) -> tuple[int, int]:
        effects = [p.severity.rank for p in linked if problem.id in roots[p.id]]
        return min([problem.severity.rank, *effects]), len(roots[problem.id])

    return sorted(linked, key=order)


def document(problems: Sequence[Problem], evidence: Evidence) -> dict[str, Any]:
    """Return the problems as JSON values (docs/guide/troubleshooting.md)."""
    return {
        "schema": SCHEMA,
        "sparkforge": __version__,
        "problems": [problem.model_dump(mode="json") for problem in problems],
        "sources": [{"name": s.name, "told": s.note, "read": s.read} for s in evidence.sources],
    }


def lines(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the problems as text."""
    numbers = {problem.id: number for number, problem in reversed(list(enumerate(problems, 1)))}
    for number, problem in enumerate(problems, 1):
        yield f"{number:>2} {MARKS[problem.severity]} {problem.what}   [{problem.id}]"
        yield f"     why:  {problem.why}"
        yield from (f"     at:   {occurrence}" for occurrence in problem.places[:PLACES])
        if problem.id == UNKNOWN:
            yield from (f"     | {text}" for text in problem.places[0].context)
        yield f"     next: {problem.fix}"
        if problem.causes:
            yield f"     follows from {', '.join(str(numbers[cause]) for cause in problem.causes)}, most likely"
        yield from (f"     read: {seen}" for seen in problem.seen)


def _in_logs(evidence: Evidence, known: Sequence[Signature]) -> Iterator[Problem]:
    for log in evidence.logs:
        with console().status(f"reading {log.name}"):
            event = events.read(log.chunks())
            hits, unknown = signatures.recognise(event, known)
        for hit in hits:
            place = _place(log, event, hit.line, hit.count)
            given = {**hit.groups, "log": log.command}
            yield _of_signature(hit.signature, given, place)
        if unknown and log.kind != evidences.UNIT:  # the build reports a failed unit
            again = f"./inv doctor --log {shlex.quote(log.name)}" if log.kind == evidences.NAMED else "./inv doctor"
            yield Problem(
                id=UNKNOWN,
                severity=Severity.FATAL,
                what=f"unknown: {_short(for_support(unknown.told))}",
                why="no known problem has this error, and nothing else in the log explains it",
                fix=f"{again} --bundle support.tar.gz   # attach it to a bug report in this repository's issues",
                places=(_place(log, event, unknown, unknown.count),),
            )
        if log.broken:
            evidence.add_source(log.name, f"read to byte {log.size} only: {log.broken}", read=False)


def _in_facts(evidence: Evidence, known: Sequence[Signature]) -> Iterator[Problem]:
    for signature in known:
        if signature.holds(evidence.facts):
            text = ", ".join(f"{name} = {evidence.facts[name]}" for name in signature.facts)
            source = one_line(evidence.fact_sources[next(iter(signature.facts))])
            yield _of_signature(signature, LOGS, Place(source=source, text=_short(text)))


def _place(log: evidences.Log, event: Event, line: Line, count: int) -> Place:
    """Return the place of a line; a fault's context has the exceptions that led to it and the neighbouring lines."""
    context: tuple[str, ...] = ()
    if line.is_fault or line.are_last_words:
        chain = [entry.shown for entry in event.chain(line)[:-1]]
        quoted = for_support("\n".join((*chain, *line.before, line.text, *line.after)))
        context = tuple(_short(text) for text in quoted.split("\n") if text and not BLOB.fullmatch(text))
    return Place(source=log.name, line=line.number, text=_short(line.shown), count=count, context=context)


def _of_signature(signature: Signature, groups: Mapping[str, str], occurrence: Place) -> Problem:
    def filled(text: str) -> str:
        """Replace each `{name}` by the group of that name; a group that did not match is empty."""
        return _short(re.sub(r"\{(\w+)\}", lambda match: groups.get(match[1], ""), text))

    return Problem(
        id=signature.id,
        severity=signature.severity,
        what=filled(signature.what),
        why=filled(signature.why) or "the log gives no reason",
        fix=filled(signature.fix),
        places=(occurrence,),
        follows=signature.follows,
        seen=signature.seen,
    )


def _failed_checks(evidence: Evidence) -> Iterator[Problem]:
    for name, report in evidence.reports.items():
        findings = report.get("findings")
        for finding in findings if isinstance(findings, list) else []:
            if not isinstance(finding, dict):
                continue
            check, status = _short(finding.get("check")), str(finding.get("status"))
            if status not in VERDICTS or (status == Status.SKIPPED and finding.get("required") is not True):
                continue
            severity, verb = VERDICTS[status]
            yield Problem(
                id=CHECK,
                severity=severity,
                what=f"the validator's check {check} {verb}",
                why=_short(finding.get("evidence")),
                fix=_short(finding.get("fix")),
                places=(Place(source=name, text=f"{check}: {_short(status)}"),),
            )


def _refused_audits(evidence: Evidence) -> Iterator[Problem]:
    for name, audit in evidence.documents.items():
        violations = audit.get("violations")
        if isinstance(violations, list) and violations and isinstance(first := violations[0], dict):
            rule = _short(first.get("rule"))
            yield Problem(
                id=AUDIT,
                severity=Severity.FATAL,
                what=f"the audit refused what was built: {len(violations)} times, first {rule}",
                why=_short(first.get("detail")),
                fix=_short(first.get("fix")) or "./inv build",
                places=(Place(source=name, text=_short(first.get("file"))),),
            )


def _of_error(name: str, error: SparkforgeError, source: str) -> Problem:
    return Problem(
        id=name,
        severity=Severity.FATAL,
        what=_short(error.what),
        why=_short(error.why),
        fix=_short(error.fix),
        places=(Place(source=source, text="failed" if name == LAST else type(error).__name__),),
        follows=(EVERY,) if name == LAST else (),
    )


def _causes(problem: Problem, problems: Sequence[Problem]) -> tuple[str, ...]:
    """Return the ids of the problems that lead to `problem`; EVERY means each fatal one that does not follow EVERY."""
    causes = {*problem.follows} - {EVERY, problem.id}
    if EVERY in problem.follows:
        causes |= {p.id for p in problems if p.severity is Severity.FATAL and EVERY not in p.follows}
    return tuple(dict.fromkeys(p.id for p in problems if p.id in causes))


def _short(value: Any) -> str:
    """Return a file's text as one line without control characters and passwords in URLs, at most LONGEST characters."""
    return without_passwords(one_line(str("" if value is None else value)))[:LONGEST]


def write_archive(path: Path, document: Mapping[str, Any], evidence: Evidence) -> None:
    """Write the archive in one step and list its content. Raises StorageError."""
    files = dict(sorted(members(document, evidence).items()))
    try:
        with (
            atomic_file(path, mode=0o600) as file,
            gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, data in files.items():
                member = tarfile.TarInfo(f"{TOP}/{name}")
                member.size, member.mode = len(data), 0o644
                archive.addfile(member, io.BytesIO(data))
    except OSError as error:
        raise StorageError(
            f"cannot write {path}", error.strerror or str(error), on("ls -ld", path.parent), code="storage.access"
        ) from error
    say(f"{path} ({evidences.size(path.stat().st_size)}) holds:")
    for name, data in files.items():
        say(f"  {name} · {evidences.size(len(data))}")
    say(f"tokens, names, homes and addresses were taken out; look before you send it: tar -xOf {path} | less")


def members(document: Mapping[str, Any], evidence: Evidence) -> dict[str, bytes]:
    """Return the archive's files by name, redacted."""
    commit = checkout_commit(paths.ROOT)
    versions = {
        "sparkforge": __version__,
        "python": platform.python_version(),
        **({"commit": commit} if commit else {}),
    }
    other_facts = {name: value for name, value in evidence.facts.items() if name not in evidence.machine}
    files = {
        "README.txt": ABOUT.encode(),
        "doctor.json": _json(document),
        "facts.json": _json({"versions": versions, "machine": evidence.machine, "found": other_facts}),
    }
    for folder, table in (("reports", evidence.reports), ("manifests", evidence.documents)):
        for name, value in table.items():
            files[f"{folder}/{_name(name)}"] = _json(value)
    if evidence.inspected:
        files["docker/inspect.json"] = _json(evidence.inspected)
    units = sorted(
        (log for log in evidence.logs if log.kind == evidences.UNIT), key=lambda log: log.written, reverse=True
    )
    free = MAX_TOTAL
    for log in evidence.logs:
        if log in units[UNIT_LOGS:]:
            continue
        data = for_support(log.excerpt().decode("utf-8", "replace")).encode()
        if 0 < len(data) <= free:
            free -= len(data)
            files[f"logs/{_name(log.name)}"] = data
    return files


def _json(value: Any) -> bytes:
    # Conversion to JSON turns tuples into lists, which `for_support` redacts.
    plain = json.loads(json.dumps(value, default=str))
    return json.dumps(for_support(plain), indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _name(source: str) -> str:
    """Return a redacted file name for a source; CONTAINER:PATH gives the container and the last part of the path."""
    container, colon, path = source.partition(":")
    source = f"{container}_{PurePosixPath(path).name}" if colon else source
    return re.sub(r"[^\w.-]+", "_", for_support(source)).strip("_.") or "unnamed"
