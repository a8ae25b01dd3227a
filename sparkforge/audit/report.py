"""Audit binaries: the target GPU and content of all machine code, and the file's system requirements.

    files ─► host part, cubins (cuobjdump) ─► shapes ─► mnemonics (nvdisasm) ─► rules (rules.toml) ─► report

Labels prove nothing: a kernel that was compiled for compute_121 can have the label sm_121a and use software FP4. See
docs/concepts/audit.md.
"""

import hashlib
import lzma
import os
import re
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path, PurePath
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from rich.console import Console
from rich.table import Table

from sparkforge.audit.cubins import Binary, Cubin, Draft, Reader, Tools, compiles
from sparkforge.audit.rules import Rules, Violation, judge, judge_modules, load
from sparkforge.core.console import say
from sparkforge.core.errors import AuditError, CompileError, IntegrityError, UsageError
from sparkforge.core.files import CHUNK, sha256_file, write_json
from sparkforge.core.installed import LARGEST_RECORD, Installed, parse_record
from sparkforge.core.paths import state
from sparkforge.pins import verify
from sparkforge.pins.verify import ImageChanges, PatchedFile, load_patched
from sparkforge.sources.archive import MALFORMED

KINDS = re.compile(r"\.(cubin|o|so(\.\d+)*)$")
WHEEL_MACHINE = re.compile(r"_(x86_64|aarch64)\.whl$")
WIDE = 160  # columns if stdout is not a terminal
# Our own limits for a wheel; vLLM's has 321 MB packed, and its libraries have 637 MB (docs/concepts/audit.md).
LARGEST_MEMBER, LARGEST_WHEEL = 4 << 30, 16 << 30  # bytes after unpacking
MOST_MEMBERS = 200_000
EXPANSION, EXPANDED = 100, 64 << 20  # unpacked limit: the larger of EXPANDED bytes and EXPANSION times the packed size
LONGEST_NAME = 100  # characters of a member's file name that its temporary copy keeps
SHOWN = 20  # violations in the terminal; the JSON has all


@dataclass(frozen=True)
class AuditedFile:
    """One file to read: a single file, or a member of a wheel with its sha256 in the wheel's RECORD."""

    path: Path
    member: str = ""
    sha256: str = ""
    machine: str = ""
    size: int = 0  # bytes

    @property
    def name(self) -> str:
        """The file's name in the report."""
        return f"{self.path.name}/{self.member}" if self.member else str(self.path)


@dataclass(frozen=True)
class Coverage:
    """The machine code of one file for one target. `fp4` kernels have hardware FP4; `traps` have a BPT.TRAP somewhere.

    PTX has a target such as compute_120, does not count as a cubin, and `loads` if the driver can compile it.
    """

    file: str
    target: str
    loads: bool
    cubins: int
    kernels: int
    fp4: int
    block_scaled: int
    traps: int


@dataclass(frozen=True)
class AuditedWheel:
    """A patched wheel, or a package installed from one: its path, and the lock's file name, sha256 and RECORD.

    `problems` are the differences from the locked wheel; `wheel` is empty if the lock does not have it.
    """

    path: str
    wheel: str = ""
    sha256: str = ""
    record: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class AuditReport:
    """The audit of a set of files; `bytes` is their size before any unpacking of cubins.

    `wheels` are the patched wheels among them, and the packages installed from patched wheels.
    """

    binaries: tuple[Binary, ...]
    wheels: tuple[AuditedWheel, ...]
    coverage: tuple[Coverage, ...]
    violations: tuple[Violation, ...]
    bytes: int
    seconds: float

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        rate = self.bytes / 1e6 / self.seconds if self.seconds else 0.0
        return {
            "schema": 1, "bytes": self.bytes, "seconds": round(self.seconds, 3), "mb_per_second": round(rate, 1),
            "violations": [asdict(violation) for violation in self.violations],
            "wheels": [asdict(wheel) for wheel in self.wheels],
            "coverage": [asdict(row) for row in self.coverage],
            "files": [_as_document(binary) for binary in self.binaries],
        }  # fmt: skip

    def require_clean(self) -> None:
        """Raise AuditError with the first violation and the number of failing files, if there is a violation."""
        if not self.violations:
            return
        first, files = self.violations[0], {violation.file for violation in self.violations}
        rules = Counter(violation.rule for violation in self.violations)
        counts = ", ".join(f"{rule} x {number}" for rule, number in rules.most_common())
        all_files = {*files, *(binary.path for binary in self.binaries), *(wheel.path for wheel in self.wheels)}
        failure = f"{len(files)} of {len(all_files)} files fail the audit ({counts})"
        raise AuditError(failure, f"{first.file}: {first.detail} [{first.rule}]", first.fix)


def audit_files(
    paths: Sequence[Path],
    *,
    tools: Callable[[], Tools],
    modules: Sequence[str] = (),
    machine: str = "",
    rules: Rules | None = None,
    foreign: bool = False,
) -> AuditReport:
    """Read and judge every .cubin, .o, .so and .whl among `paths` and in the folders among them.

    `tools` locates NVIDIA's readers; it is called once, after the check of the arguments, because it may install
    them. `modules` are required, and `machine` (as `uname -m`) is the CPU that the files must be for. With `foreign`
    the rules of our image apply only to files that are built here or named in the table. Raises UsageError for an
    invalid path or module; bad files are violations, not errors.
    """
    rules, started = rules or load(), time.monotonic()
    if unknown := set(modules) - rules.modules.keys():
        why = f"choose from {', '.join(rules.modules)}"
        raise UsageError(f"no rule for module {', '.join(sorted(unknown))}", why, "./inv audit --help")
    broken = list[Violation]()
    if not paths:
        raise UsageError("there is nothing to audit", "an audit of no files would pass", "./inv audit --help")
    sources = [source for path in paths for source in _sources(path, machine, rules, broken)]
    binaries, violations = [], broken
    for source, binary, swapped in _read(sources, Reader(tools(), rules.watch())):
        binaries.append(binary)
        if swapped:
            violations.append(Violation("swapped-library", source.name, swapped, rules.fix("swapped-library")))
        ours = not foreign or source.path.resolve().is_relative_to(state().resolve()) or rules.names(source.name)
        violations += judge(binary, rules, machine=source.machine, ours=ours)
    binaries.sort(key=lambda binary: binary.path)
    violations += judge_modules(binaries, modules, rules)
    wheels = tuple(audit_patched(paths))
    fix = rules.fix("patched-wheel")
    violations += [Violation("patched-wheel", wheel.path, why, fix) for wheel in wheels for why in wheel.problems]
    coverage = tuple(row for binary in binaries for row in _coverage(binary, rules))
    size = sum(binary.size for binary in binaries)
    return AuditReport(tuple(binaries), wheels, coverage, tuple(violations), size, time.monotonic() - started)


def _sources(path: Path, machine: str, rules: Rules, broken: list[Violation]) -> Iterator[AuditedFile]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and (KINDS.search(file.name) or file.suffix == ".whl"):
                yield from _sources(file, machine, rules, broken)
    elif not path.is_file():
        failure = f"cannot audit {path}"
        raise UsageError(failure, "it is not there", "--help   # name .cubin, .o, .so or .whl files, or folders")
    elif path.suffix == ".whl":
        try:
            yield from _members(path, machine)
        except IntegrityError as error:
            broken.append(Violation("damaged", str(path), f"{error.what}: {error.why}", rules.fix("damaged")))
        except (*MALFORMED, lzma.LZMAError, OSError) as error:
            broken.append(Violation("damaged", str(path), str(error), rules.fix("damaged")))
    elif KINDS.search(path.name):
        yield AuditedFile(path, machine=machine, size=path.stat().st_size)
    else:
        failure = f"cannot audit {path}"
        raise UsageError(failure, "its name does not end in .cubin, .o, .so or .whl", "--help   # name such a file")


def _members(wheel: Path, machine: str) -> list[AuditedFile]:
    tag = WHEEL_MACHINE.search(wheel.name)
    with zipfile.ZipFile(wheel) as opened:
        members = opened.infolist()
        names = Counter(member.filename for member in members)
        if len(members) > MOST_MEMBERS:
            raise ValueError(f"it lists {len(members)} members")
        if twice := [name for name, number in names.items() if number > 1]:
            raise ValueError(f"{twice[0]} is in it {names[twice[0]]} times")
        for member in members:
            if member.file_size > min(LARGEST_MEMBER, max(EXPANDED, EXPANSION * member.compress_size)):
                sizes = f"its {member.compress_size} bytes become {member.file_size}"
                raise ValueError(f"{member.filename} expands too far: {sizes}")
        if (together := sum(member.file_size for member in members)) > LARGEST_WHEEL:
            raise ValueError(f"its members have {together} bytes once they are unpacked")
        record = next((member for member in members if member.filename.endswith(".dist-info/RECORD")), None)
        if record is None:
            raise ValueError("no RECORD in it")
        with opened.open(record) as packed:
            data = packed.read(LARGEST_RECORD + 1)
        if len(data) > LARGEST_RECORD:
            raise ValueError(f"{record.filename} has more than {LARGEST_RECORD} bytes")
        hashes = {line.path: line.sha256 for line in parse_record(data.decode(), record.filename, strict=False)}
    wanted = machine or (tag[1] if tag else "")
    return [
        AuditedFile(wheel, member.filename, hashes.get(member.filename, "absent"), wanted, member.file_size)
        for member in members if KINDS.search(member.filename)
    ]  # fmt: skip


def _read(sources: Sequence[AuditedFile], reader: Reader) -> Iterator[tuple[AuditedFile, Binary, str]]:
    """Read files in threads, which also unpack wheels, and large cubins in processes; the largest file comes first.

    Yields each file, its content, and its difference from the wheel's RECORD.
    """
    sources = sorted(sources, key=lambda source: source.size, reverse=True)
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool, ThreadPoolExecutor(workers) as threads:
        reader.pool = pool  # the pool starts processes at the first large file
        try:
            drafts = list(threads.map(lambda source: _draft(source, reader), sources))
        except BrokenExecutor as error:
            why = f"{workers} ran at once, and most likely too little memory was left"
            fix = "again   # stop other programs, or audit fewer files at once"
            raise CompileError("a process that reads cubins was killed", why, fix, code="compile.memory") from error
    binaries = reader.finished([draft for draft, _ in drafts])
    yield from zip(sources, binaries, (swapped for _, swapped in drafts), strict=True)


def _draft(source: AuditedFile, reader: Reader) -> tuple[Draft, str]:
    """Read one file; return it with its difference from the wheel's RECORD, empty if there is none."""
    if not source.member:
        return reader.draft(source.path, source.name), ""
    with tempfile.TemporaryDirectory(prefix="sparkforge-wheel-") as folder:
        file, digest = Path(folder) / Path(source.member).name[-LONGEST_NAME:], hashlib.sha256()
        try:
            with zipfile.ZipFile(source.path) as opened, opened.open(source.member) as packed, file.open("wb") as out:
                while chunk := packed.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    if out.tell() > source.size:
                        raise zipfile.BadZipFile(f"it has more than the {source.size} bytes that the wheel lists")
        except (*MALFORMED, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of this machine, such as a full disk; bz2's and gzip's errors have no errno
            return Draft(Binary(source.name, source.size, damage=f"member {source.member}: {error}")), ""
        swapped = digest.hexdigest() != source.sha256
        reason = f"its sha256 is not the one in RECORD ({source.sha256})" if swapped else ""
        return reader.draft(file, source.name), reason


def _coverage(binary: Binary, rules: Rules) -> Iterator[Coverage]:
    targets: dict[str, list[Cubin]] = {}
    for cubin in binary.cubins:
        targets.setdefault(cubin.label, []).append(cubin)
    for target, cubins in sorted(targets.items()):
        kernels = [kernel for cubin in cubins for kernel in cubin.kernels]
        yield Coverage(
            binary.path, target, cubins[0].loads, len(cubins), sum(cubin.kernel_count for cubin in cubins),
            fp4=sum(kernel.count(rules.sass.fp4) > 0 for kernel in kernels),
            block_scaled=sum(kernel.count(rules.sass.block_scaled) > 0 for kernel in kernels),
            traps=sum(kernel.count(rules.sass.trap) > 0 for kernel in kernels),
        )  # fmt: skip
    for target in sorted(set(binary.host.ptx)) if binary.host else ():
        loads = compiles(target, rules.capability)
        yield Coverage(binary.path, target, loads, 0, 0, fp4=0, block_scaled=0, traps=0)


def _as_document(binary: Binary) -> Mapping[str, Any]:
    document = asdict(binary)
    if binary.host:
        document["host"]["exports"] = len(binary.host.exports)  # thousands of names that no rule uses
        document["host"]["ptx"] = dict(Counter(binary.host.ptx))
    return document


def run_audit(
    paths: Sequence[Path],
    *,
    tools: Callable[[], Tools],
    modules: Sequence[str] = (),
    machine: str = "",
    output: Path | None = None,
    foreign: bool = False,
) -> None:
    """Audit, print the table, write JSON to `output`. Raises AuditError for a broken rule, UsageError without files."""
    report = audit_files(paths, tools=tools, modules=modules, machine=machine, foreign=foreign)
    if not (report.binaries or report.wheels or report.violations):
        places = ", ".join(map(str, paths))
        why = "no .cubin, .o, .so or .whl file is there"
        raise UsageError(f"nothing to audit in {places}", why, "./inv audit --help")
    if output:
        write_json(output, report.document())
    width = None if sys.stdout.isatty() else WIDE
    Console(file=sys.stdout, highlight=False, width=width).print(table(report, load().capability))
    for violation in report.violations[:SHOWN]:
        say(f"✗ {violation.rule}: {violation.file}: {violation.detail}")
    if len(report.violations) > SHOWN:
        say(f"… and {len(report.violations) - SHOWN} more; --output FILE has all")
    codeless = sum(not binary.cubins for binary in report.binaries)
    amount = f"{report.bytes / 1e6:.0f} MB in {report.seconds:.1f} s"
    for wheel in report.wheels:
        if not wheel.problems:
            say(f"✓ {wheel.path}: {wheel.wheel} of locks/patched.toml, sha256 {wheel.sha256}")
    say(f"{len(report.binaries)} files ({codeless} without machine code), {amount}")
    report.require_clean()


def table(report: AuditReport, capability: str) -> Table:
    """Return the coverage as a table: a row for each file and target."""
    columns = ("file", "target", f"loads on {capability}", "cubins", "kernels", "FP4", "block-scaled MMA", "traps")
    rows = Table(*columns, box=None)
    for row in report.coverage:
        counts = (row.kernels, row.fp4, row.block_scaled, row.traps) if row.loads and row.cubins else ("-",) * 4
        loads = "no" if not row.loads else "yes" if row.cubins else "compiled by the driver"
        target = row.target if row.cubins else f"{row.target} (PTX)"
        rows.add_row(PurePath(row.file).name, target, loads, str(row.cubins), *map(str, counts))
    return rows


def audit_patched(paths: Sequence[Path]) -> list[AuditedWheel]:
    """Compare wheels among `paths` and installed packages that we patch with the lock. Raises InputError."""
    lock: Mapping[str, PatchedFile] | None = None
    audited = list[AuditedWheel]()
    candidates = list[Path]()
    for path in paths:
        is_searched = path.is_dir() and path.suffix != ".dist-info"
        candidates += sorted([*path.rglob("*.whl"), *path.rglob("*.dist-info")]) if is_searched else [path]
    for path in (path for path in candidates if verify.is_patched(_version(path))):
        lock = load_patched() if lock is None else lock
        if not path.is_file():
            audited.append(audit_installed(path, lock))
        elif wheel := next((wheel for wheel in lock.values() if wheel.file == path.name), None):
            sha256 = sha256_file(path)
            problems = () if sha256 == wheel.sha256 else (f"its sha256 is {sha256}, and {wheel.sha256} is locked",)
            audited.append(AuditedWheel(str(path), wheel.file, wheel.sha256, str(wheel.record), problems))
        else:
            audited.append(AuditedWheel(str(path), problems=("locks/patched.toml has no such wheel",)))
    return audited


def audit_installed(info: Path, lock: Mapping[str, PatchedFile], changes: ImageChanges | None = None) -> AuditedWheel:
    """Compare an installed package, by its dist-info folder, with the lock: version, RECORD, and every file."""
    try:
        installed = Installed.read(info)
        wheel = verify.require_locked(installed, lock)
    except IntegrityError as error:
        return AuditedWheel(str(info), problems=(f"{error.what}: {error.why}",))
    problems = verify.differences(installed, changes or ImageChanges())
    return AuditedWheel(str(info), wheel.file, wheel.sha256, str(wheel.record), tuple(problems))


def _version(path: Path) -> str:
    if path.suffix != ".whl":
        return path.stem.partition("-")[2] if path.suffix == ".dist-info" else ""
    try:
        return str(parse_wheel_filename(path.name)[1])
    except InvalidWheelFilename:
        return ""
