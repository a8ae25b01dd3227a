"""Known vulnerabilities of a bill's components, from an OSV (Open Source Vulnerabilities) database on this machine.

Harmless findings are in vex.toml with their reasons; a new image's bill contains the reasons too (as CycloneDX's
VEX, Vulnerability Exploitability eXchange).
"""

import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from cyclonedx.model.impact_analysis import ImpactAnalysisJustification
from packageurl import PackageURL
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, Field, RootModel

from sparkforge.core import tables
from sparkforge.core.console import echo, say
from sparkforge.core.errors import IntegrityError, RefusalError, UsageError
from sparkforge.core.files import DocumentError, parse_json, read_bytes
from sparkforge.core.tables import Record, parse_record
from sparkforge.pins.table import Text

TABLE = Path(__file__).with_name("vex.toml")
DEBIAN = {"bookworm": "Debian:12", "trixie": "Debian:13"}  # a release as in a purl → OSV's ecosystem
LARGEST = 16 << 20  # bytes of one record


class Analysis(Record):
    """Why a vulnerability does no harm: CycloneDX's analysis."""

    packages: tuple[Text, ...] = Field(min_length=1)
    versions: tuple[Text, ...] = ()
    state: Literal["not_affected", "false_positive", "resolved_with_pedigree"]
    justification: ImpactAnalysisJustification | None = None
    reason: Text
    source: str = Field(pattern=r"^https://\S+$")

    def covers(self, names: set[str], version: str) -> bool:
        """Tell whether the analysis is about one of these packages in this version."""
        return not names.isdisjoint(self.packages) and (not self.versions or version in self.versions)


class Analyses(RootModel[dict[str, Analysis]]):
    """The whole of vex.toml, by CVE."""


class Interval(BaseModel):
    """The fields of a range of versions that we read."""

    type: str
    events: list[dict[str, str]]


class Affected(BaseModel):
    """The fields of OSV's `affected` that we read: a package, ranges of its versions, and versions by name."""

    package: dict[str, str] = Field(default_factory=dict)
    ranges: list[Interval] = Field(default_factory=list)
    versions: list[str] = Field(default_factory=list)


class OsvRecord(BaseModel):
    """The fields of a record of OSV's schema 1 that we read."""

    id: str
    aliases: list[str] = Field(default_factory=list)
    upstream: list[str] = Field(default_factory=list)
    summary: str = ""
    withdrawn: str = ""
    affected: list[Affected] = Field(default_factory=list)


def analyses() -> dict[str, Analysis]:
    """Return vex.toml. Raises InputError."""
    return tables.load(TABLE, Analyses).root


def check(bill: bytes, database: Path) -> None:
    """Print the known vulnerabilities of a bill's components. Raises RefusalError for any that vex.toml lacks.

    `database` is an OSV record, a .zip of records (as OSV exports each ecosystem), or a folder of both. Raises
    UsageError for an unreadable database, DocumentError for a malformed one, IntegrityError for an invalid bill.
    """
    try:
        packages = _packages(parse_json(bill, "the bill of materials")["components"])
    except (KeyError, ValueError) as error:  # the image's builder wrote it
        why = f"a component has no usable purl or version: {error}"
        fix = "./inv build --engine docker   # or name another image"
        raise IntegrityError("the bill of materials is refused", why, fix, code="integrity.image") from error
    table, records, explained, others = analyses(), 0, set[str](), dict[str, str]()
    for record in _records(database):
        records += 1
        cves = sorted({record.id, *record.aliases, *record.upstream}, key=lambda name: (name[:4] != "CVE-", name))
        for affected in record.affected if not record.withdrawn else ():
            ecosystem, package = affected.package.get("ecosystem", ""), affected.package.get("name", "")
            for name, version in packages.get((ecosystem, package), ()):
                line = f"{cves[0]} {name} {version}"
                if not _is_affected(affected, version):
                    continue
                entries = (table[cve] for cve in cves if cve in table)
                if known := next((entry for entry in entries if entry.covers({name, package}, version)), None):
                    explained.add(f"{line}: {known.state}: {known.reason} ({known.source})")
                else:
                    others[line] = f"{line}: {' '.join(record.summary.split())[:200] or record.id}"
    if not records:
        raise DocumentError(str(database), "there is no OSV record in it")
    for line in [*sorted(explained), *sorted(others.values())]:
        echo(line)
    say(f"{sum(map(len, packages.values()))} components, {records} records of {database}")
    if others:
        failure, why = f"{len(others)} known vulnerabilities", "; ".join(sorted(others)[:3])
        fix = "less sparkforge/image/vex.toml   # update the stack, or say there why it does no harm"
        raise RefusalError(failure, why, fix, code="validation.vulnerable")


def _packages(components: Iterable[dict[str, Any]]) -> Mapping[tuple[str, str], list[tuple[str, str]]]:
    """Return OSV's ecosystem and name (for Debian: the source package) → name and version of components."""
    packages = defaultdict[tuple[str, str], list[tuple[str, str]]](list)
    for component in components:
        purl = PackageURL.from_string(component["purl"]) if "purl" in component else None
        if purl and purl.type == "pypi":  # for a patched package, upstream's version
            packages["PyPI", purl.name].append((component["name"], Version(component["version"]).public))
        elif purl and purl.type == "deb":
            urls = [entry["url"] for entry in component.get("externalReferences", [])]
            source = next((PackageURL.from_string(url) for url in urls if url.startswith("pkg:deb/")), purl)
            release = re.search(r"\bdistro=(\w+)", component["purl"])
            ecosystem = DEBIAN.get(release[1] if release else "", "Debian")
            packages[ecosystem, source.name].append((component["name"], str(source.version)))
    return packages


def _records(database: Path) -> Iterator[OsvRecord]:
    files = sorted(database.rglob("*")) if database.is_dir() else [database]
    for path in (path for path in files if path == database or path.suffix in (".json", ".zip")):
        try:
            if path.suffix != ".zip":
                yield parse_record(read_bytes(path, largest=LARGEST), str(path), OsvRecord)
                continue
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    with archive.open(member) as file:
                        if len(data := file.read(LARGEST + 1)) > LARGEST:
                            raise DocumentError(str(path), f"a record has more than {LARGEST:,} bytes")
                    yield parse_record(data, f"{path}: {member.filename[:80]}", OsvRecord)
        except OSError as error:
            fix = "without --check-vulnerabilities   # or name a file or folder that can be read"
            raise UsageError(f"cannot read {path}", error.strerror or str(error), fix) from error
        except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise DocumentError(str(path), str(error)) from error


def _is_affected(affected: Affected, version: str) -> bool:
    """Tell whether a version is named or lies in a range, as OSV's schema says ("Evaluation")."""
    order: Any = _debian_order if affected.package["ecosystem"].startswith("Debian") else Version
    for interval in affected.ranges:
        vulnerable = False
        try:
            marks = sorted((order(mark), kind) for event in interval.events for kind, mark in event.items())
            ours = order(version)
        except InvalidVersion:
            continue  # `versions` lists such versions too
        for mark, kind in marks if interval.type == "ECOSYSTEM" else ():
            if kind == "introduced" and ours >= mark:
                vulnerable = True
            elif (kind == "fixed" and ours >= mark) or (kind == "last_affected" and ours > mark):
                vulnerable = False
        if vulnerable:
            return True
    return version in affected.versions


def _debian_order(version: str) -> Any:
    def letters(text: str) -> list[int]:
        return [*(-1 if sign == "~" else ord(sign) + 256 * (not sign.isalpha()) for sign in text), 0]

    epoch, _, rest = version.rpartition(":")
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "")
    parts = [re.findall(r"(\D*)(\d*)", part) for part in (upstream, revision)]
    return int(epoch) if epoch.isdecimal() else 0, [[(letters(a), int(n or 0)) for a, n in part] for part in parts]
