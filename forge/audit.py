"""Audit binaries: for which GPU each piece of machine code is, what it holds, and what the file asks of a machine.

    files ─► host part, cubins (cuobjdump) ─► shapes ─► mnemonics (nvdisasm) ─► rules (audit_rules.toml) ─► report

Labels prove nothing: a kernel that was compiled for compute_121 can be called sm_121a and hold software. See
docs/audit.md.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path, PurePath
from typing import Any

from rich.console import Console
from rich.table import Table

from forge import toolchain
from forge.archive import MALFORMED
from forge.audit_rules import Rules, Violation, judge, judge_modules, load
from forge.cubins import Binary, Cubin, Draft, Reader, Tools
from sparkforge.console import say
from sparkforge.errors import AuditError, UsageError
from sparkforge.files import CHUNK, write_json

KINDS = re.compile(r"\.(cubin|o|so(\.\d+)*)$")
WHEEL_MACHINE = re.compile(r"_(x86_64|aarch64)\.whl$")
WIDE = 160  # columns where stdout is no terminal
SHOWN = 20  # violations in the terminal; the JSON has all


@dataclass(frozen=True)
class Source:
    """One file to read: on its own, or a member of a wheel with the sha256 that the wheel's RECORD gives it."""

    path: Path
    member: str = ""
    sha256: str = ""
    machine: str = ""
    size: int = 0  # bytes

    @property
    def name(self) -> str:
        """What the report calls it."""
        return f"{self.path.name}/{self.member}" if self.member else str(self.path)


@dataclass(frozen=True)
class Coverage:
    """What one file holds for one target. `fp4` kernels have hardware FP4; `stubs` only trap and are no support."""

    file: str
    target: str
    loads: bool
    cubins: int
    kernels: int
    fp4: int
    block_scaled: int
    stubs: int


@dataclass(frozen=True)
class Report:
    """The audit of a set of files; `bytes` is their size before any unpacking of cubins."""

    binaries: tuple[Binary, ...]
    coverage: tuple[Coverage, ...]
    violations: tuple[Violation, ...]
    bytes: int
    seconds: float

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        rate = self.bytes / 1e6 / self.seconds if self.seconds else 0.0
        return {
            "schema": 1, "bytes": self.bytes, "seconds": round(self.seconds, 3), "mb_per_second": round(rate, 1),
            "violations": [asdict(one) for one in self.violations],
            "coverage": [asdict(one) for one in self.coverage],
            "files": [_as_document(one) for one in self.binaries],
        }  # fmt: skip

    def require_clean(self) -> None:
        """Raise AuditError, with the first violation and how many more there are, unless there is none."""
        if not self.violations:
            return
        first, files = self.violations[0], {one.file for one in self.violations}
        rules = Counter(one.rule for one in self.violations)
        told = ", ".join(f"{rule} x {number}" for rule, number in rules.most_common())
        raise AuditError(
            f"{len(files)} of {len(self.binaries)} files fail the audit ({told})",
            f"{first.file}: {first.detail} [{first.rule}]",
            first.fix,
        )


def audit(
    paths: Sequence[Path],
    *,
    modules: Sequence[str] = (),
    machine: str = "",
    tools: Tools | None = None,
    rules: Rules | None = None,
) -> Report:
    """Read and judge every .cubin, .o, .so and .whl among `paths` and in the folders among them.

    `modules` names what must be there, `machine` (as `uname -m`) the CPU. Raises UsageError for a path or module that
    has no meaning; bad files are violations, not errors.
    """
    rules, begun = rules or load(), time.monotonic()
    if unknown := set(modules) - rules.modules.keys():
        known = ", ".join(rules.modules)
        raise UsageError(f"no rule for module {', '.join(sorted(unknown))}", f"known are {known}", "./inv audit --help")
    broken = list[Violation]()
    if not paths:
        raise UsageError("nothing is named to audit", "it would pass whatever there is", "./inv audit PATH[,PATH]")
    sources = [one for path in paths for one in _sources(path, machine, rules, broken)]
    tools = tools or Tools(toolchain.program("cuobjdump"), toolchain.program("nvdisasm"))
    binaries, violations = [], broken
    for source, binary, told in _read(sources, Reader(tools, rules.watch())):
        binaries.append(binary)
        violations += [Violation("swapped-library", source.name, told, rules.fix("swapped-library"))] if told else []
        violations += judge(binary, rules, machine=source.machine)
    binaries.sort(key=lambda one: one.path)
    violations += judge_modules(binaries, modules, rules)
    coverage = [row for one in binaries for row in _coverage(one, rules)]
    size = sum(one.size for one in binaries)
    return Report(tuple(binaries), tuple(coverage), tuple(violations), size, time.monotonic() - begun)


def _sources(path: Path, machine: str, rules: Rules, broken: list[Violation]) -> Iterator[Source]:
    """Find the files under one path; a wheel that cannot be opened becomes a violation."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and (KINDS.search(file.name) or file.suffix == ".whl"):
                yield from _sources(file, machine, rules, broken)
    elif not path.is_file():
        raise UsageError(f"cannot audit {path}", "it is not there", "name .cubin, .o, .so or .whl files, or folders")
    elif path.suffix == ".whl":
        try:
            yield from _members(path, machine)
        except (*MALFORMED, OSError, StopIteration) as error:
            broken.append(Violation("damaged", str(path), str(error) or "no RECORD in it", rules.fix("damaged")))
    elif KINDS.search(path.name):
        yield Source(path, machine=machine, size=path.stat().st_size)
    else:
        raise UsageError(f"cannot audit {path}", "its name is none of .cubin, .o, .so, .whl", "name such a file")


def _members(wheel: Path, machine: str) -> list[Source]:
    """Return a wheel's libraries, with their hashes (PEP 376: sha256=, URL-safe base64 without padding)."""
    tag = WHEEL_MACHINE.search(wheel.name)
    with zipfile.ZipFile(wheel) as opened:
        record = next(name for name in opened.namelist() if name.endswith(".dist-info/RECORD"))
        rows = csv.reader(io.TextIOWrapper(opened.open(record), encoding="utf-8"))
        hashes = {row[0]: row[1].removeprefix("sha256=") for row in rows if len(row) > 1}
        found = [(one.filename, one.file_size) for one in opened.infolist() if KINDS.search(one.filename)]
    wanted = machine or (tag[1] if tag else "")
    return [Source(wheel, name, hashes.get(name, "absent"), wanted, size) for name, size in found]


def _read(sources: Sequence[Source], reader: Reader) -> Iterator[tuple[Source, Binary, str]]:
    """Read files in threads, which unpack wheels, and large cubins in processes; the largest first."""
    sources = sorted(sources, key=lambda one: one.size, reverse=True)
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool, ThreadPoolExecutor(workers) as threads:
        reader.pool = pool  # its processes start with the first file that is worth it
        drafts = list(threads.map(lambda one: _one(one, reader), sources))
    binaries = reader.finished([draft for draft, _ in drafts])
    yield from zip(sources, binaries, (told for _, told in drafts), strict=True)


def _one(source: Source, reader: Reader) -> tuple[Draft, str]:
    """Read one source; return it with what its wheel says against it."""
    if not source.member:
        return reader.draft(source.path, source.name), ""
    with tempfile.TemporaryDirectory(prefix="sparkforge-wheel-") as place:
        file, digest = Path(place) / Path(source.member).name, hashlib.sha256()
        try:
            with zipfile.ZipFile(source.path) as opened, opened.open(source.member) as packed, file.open("wb") as out:
                while chunk := packed.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
        except (*MALFORMED, OSError) as error:
            return Draft(Binary(source.name, file.stat().st_size, damage=str(error))), ""
        got = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
        told = "" if got == source.sha256 else f"its sha256 is not the one in RECORD ({source.sha256})"
        return reader.draft(file, source.name), told


def _coverage(binary: Binary, rules: Rules) -> Iterator[Coverage]:
    targets: dict[str, list[Cubin]] = {}
    for cubin in binary.cubins:
        targets.setdefault(cubin.target or "unknown", []).append(cubin)
    for target, cubins in sorted(targets.items()):
        kernels = [kernel for cubin in cubins for kernel in cubin.kernels]
        yield Coverage(
            binary.path, target, cubins[0].loads, len(cubins), sum(cubin.kernel_count for cubin in cubins),
            fp4=sum(kernel.count(rules.sass.fp4) > 0 for kernel in kernels),
            block_scaled=sum(kernel.count(rules.sass.block_scaled) > 0 for kernel in kernels),
            stubs=sum(rules.stub(kernel) for kernel in kernels),
        )  # fmt: skip


def _as_document(binary: Binary) -> Mapping[str, Any]:
    document = asdict(binary)
    if binary.host:
        document["host"]["exports"] = len(binary.host.exports)  # thousands of names that no rule asks for
        document["host"]["ptx"] = dict(Counter(binary.host.ptx))
    return document


def show(paths: Sequence[Path], *, modules: Sequence[str] = (), machine: str = "", output: Path | None = None) -> None:
    """Audit, print the table to stdout, write the JSON to `output`. Raises AuditError if a rule is broken."""
    report = audit(paths, modules=modules, machine=machine)
    if output:
        write_json(output, report.document())
    width = None if sys.stdout.isatty() else WIDE
    Console(file=sys.stdout, highlight=False, width=width).print(table(report, load().capability))
    for one in report.violations[:SHOWN]:
        say(f"✗ {one.rule}: {one.file}: {one.detail}")
    if len(report.violations) > SHOWN:
        say(f"… and {len(report.violations) - SHOWN} more; --output FILE has all")
    codeless = sum(not one.cubins for one in report.binaries)
    amount = f"{report.bytes / 1e6:.0f} MB in {report.seconds:.1f} s"
    say(f"{len(report.binaries)} files ({codeless} without machine code), {amount}")
    report.require_clean()


def table(report: Report, capability: str) -> Table:
    """Return the coverage as a table: a row for each file and target."""
    columns = ("file", "target", f"loads on {capability}", "cubins", "kernels", "FP4", "block-scaled MMA", "stubs")
    made = Table(*columns, box=None)
    for one in report.coverage:
        counts = (one.kernels, one.fp4, one.block_scaled, one.stubs) if one.loads else ("-",) * 4
        name = PurePath(one.file).name
        made.add_row(name, one.target, "yes" if one.loads else "no", str(one.cubins), *map(str, counts))
    return made
