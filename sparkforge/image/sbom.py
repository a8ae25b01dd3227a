"""An image's bill of materials, CycloneDX 1.6: made in its build from pins, locks, RECORDs, the audit and dpkg's list.

The same image gives the same bytes: the bill has no time, and its serial number is a hash of the rest. A component has
a hash if a pin or a lock names exactly one file. A lock names all files of a Python release, so a Python package has
its RECORD as a child, with the hash of RECORD in the image.
"""

import json
import re
import sys
import tarfile
import uuid
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType, Diff, Patch, PatchClassification, Pedigree
from cyclonedx.model.impact_analysis import ImpactAnalysisState
from cyclonedx.model.license import DisjunctiveLicense, License
from cyclonedx.model.vulnerability import BomTarget, Vulnerability, VulnerabilityAdvisory, VulnerabilityAnalysis
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

from sparkforge.core.errors import ProcessError
from sparkforge.core.files import read_json, sha256_file
from sparkforge.core.paths import ROOT
from sparkforge.image import vulnerabilities
from sparkforge.image.devices import CUDA, OCI_MACHINES
from sparkforge.pins import Component as Pin
from sparkforge.pins import Pins
from sparkforge.pins.verify import ORIGIN, WheelOrigin, load_patched
from sparkforge.pins.wheels import TargetMachine, choose_pinned
from sparkforge.sources.offline import INDEX

LONGEST_LICENCE = 80  # characters; some packages have the whole text in the field for the licence's name
SOURCES = ("source", "source code", "repository", "github", "code", "homepage")  # labels of Project-URL, best first
VAGUE = re.compile(r"unknown|copyright|see |licen[cs]e$|other", re.IGNORECASE)


def make(
    packages: Path,
    manifest: Mapping[str, Any],
    audit: Mapping[str, Any],
    table: Pins,
    debian: Path | None = None,
    only: Collection[str] = (),
) -> str:
    """Return the bill of the image with `packages` as its site-packages, as JSON.

    `manifest` is the image's manifest without its audit, `audit` the report on its machine code, and `debian`
    the root of a file system that has the image's Debian packages. Without `debian` this is the bill of a kernel pack,
    whose modules were compiled from the distributions `only`.
    """
    root = Component(
        name="sparkforge/vllm" if debian else "sparkforge/kernels",
        type=ComponentType.CONTAINER if debian else ComponentType.LIBRARY,
        bom_ref="image", version=manifest["key"],
        properties=_properties(
            stack=manifest["stack"], machine=manifest["machine"], python=manifest["python"],
            **{f"lock:{name}": digest for name, digest in manifest["lock"].items()},
            **{f"queue:{name}": digest for name, digest in manifest["patches"].items()},
        ),
    )  # fmt: skip
    components = [
        *(_pinned(table, manifest) if debian else ()),
        *_python(packages, table, manifest, only),
        *(_debian(debian, manifest) if debian else ()),
        *_kernels(packages, manifest, audit),
    ]
    return _bill(root, components)


def of_bundle(file: Path, stack: str, table: Pins) -> str:
    """Return the bill of a bundle of this checkout: each member with its hash; members of a package index by purl."""
    pins: dict[tuple[str, str], Pin] = {}
    pins |= {(canonicalize_name(pin.package or ""), pin.version): pin for pin in table.components()}
    components = []
    with tarfile.open(file) as tar:
        index = json.loads(tar.extractfile(INDEX).read())  # type: ignore[union-attr]
        for path, member in index["members"].items():
            if not path.startswith("files/"):
                components.append(_component(path, "", None, ComponentType.FILE, member["sha256"]))
                continue
            filename = path.rpartition("/")[2]
            parse = parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename
            name, version = map(str, parse(filename)[:2])
            licences = [pin.licence] if (pin := pins.get((name, version))) else []
            with suppress(zipfile.BadZipFile), zipfile.ZipFile(tar.extractfile(path)) as wheel:  # type: ignore[arg-type]
                names = [entry for entry in wheel.namelist() if entry.endswith(".dist-info/METADATA")]
                headers = [HeaderParser().parsestr(wheel.read(entry).decode(errors="replace")) for entry in names]
                licences = licences or [licence for entry in headers for licence in _licence_names(entry)]
            purl = PackageURL("pypi", None, name, version, {"file_name": filename})
            components.append(_component(name, version, purl, sha256=member["sha256"], licences=licences))
    properties = _properties(stack=stack, target=index["target"])
    return _bill(Component(name="sparkforge/bundle", bom_ref="bundle", properties=properties), components)


def _bill(root: Component, components: list[Component]) -> str:
    bill = Bom(components=components, serial_number=uuid.UUID(int=0, version=4))
    bill.metadata.component, bill.metadata.timestamp = root, None  # type: ignore[assignment]
    bill.register_dependency(root, components)
    bill.vulnerabilities = _analysed(components)
    bill.serial_number = uuid.uuid5(uuid.NAMESPACE_OID, _written(bill))
    return _written(bill) + "\n"


def _written(bill: Bom) -> str:
    return make_outputter(bill, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)


def _analysed(components: list[Component]) -> Iterator[Vulnerability]:
    """Yield the entries of vex.toml for components, by their names and those of Debian's source packages."""
    names = {}
    for component in components:
        sources = [str(entry.url) for entry in component.external_references if str(entry.url).startswith("pkg:deb/")]
        names[component] = {component.name, *(PackageURL.from_string(source).name for source in sources)}
    for cve, entry in vulnerabilities.analyses().items():
        covered = [part for part in components if entry.covers(names[part], part.version or "")]
        affected = [BomTarget(ref=str(component.bom_ref.value)) for component in covered]
        if affected:
            state = ImpactAnalysisState(entry.state)
            analysis = VulnerabilityAnalysis(state=state, justification=entry.justification, detail=entry.reason)
            source = VulnerabilityAdvisory(url=XsUri(entry.source))
            yield Vulnerability(bom_ref=cve, id=cve, analysis=analysis, affects=affected, advisories=[source])


def _pinned(table: Pins, manifest: Mapping[str, Any]) -> Iterator[Component]:
    """Yield the base image, this project, and the git repositories from which vLLM's extensions were compiled."""
    stack = table.stack(manifest["stack"])
    for pin in stack.components.values():
        if pin.kind == "image":
            digest = str(pin.digest)
            purl = PackageURL("oci", None, str(pin.image).rpartition("/")[2], digest, {"tag": pin.version})
            yield _component(str(pin.image), pin.version, purl, ComponentType.CONTAINER, digest[7:], [pin.licence])
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    version = project[1] if project else "0"
    yield _component("sparkforge", version, PackageURL("generic", None, "sparkforge", version), licences=["Apache-2.0"])
    for name, source in stack.git.items() if manifest.get("compiled") else ():
        purl = PackageURL("generic", None, name, source.commit, {"vcs_url": f"git+{source.repository}@{source.commit}"})
        reference = _reference(ExternalReferenceType.VCS, source.repository)
        yield _component(name, source.tag, purl, licences=[source.licence], external_references=[reference])


def _python(packages: Path, table: Pins, manifest: Mapping[str, Any], only: Collection[str]) -> Iterator[Component]:
    """Yield each distribution; a patched one has upstream's as its ancestor and the patches in its pedigree."""
    pins: dict[tuple[str, str], Pin] = {}
    for pin in table.stack(manifest["stack"]).components.values():
        if pin.package and any(name.endswith(".whl") for name in pin.files):
            pins[canonicalize_name(pin.package), pin.version] = pin
    target, patched = TargetMachine(manifest["machine"], sys.version_info[:2]), load_patched()
    for info in sorted(packages.glob("*.dist-info")):
        stem, _, version = info.name.removesuffix(".dist-info").partition("-")
        name = canonicalize_name(stem)
        if only and name not in only:
            continue
        pinned, sha256, pedigree = pins.get((name, version)), "", None
        if (info / ORIGIN).is_file():
            origin = WheelOrigin.model_validate(read_json(info / ORIGIN))
            pinned = pins.get((name, origin.version))
            sha256 = patched[origin.filename].sha256 if origin.filename in patched else ""
            upstream = PackageURL("pypi", None, name, origin.version)
            # The patch itself is in the image; its sha256 follows the #.
            urls = [XsUri(f"{info.name}/patches/{patch.name}#{patch.sha256}") for patch in origin.patches]
            patches = [Patch(type=PatchClassification.UNOFFICIAL, diff=Diff(url=url)) for url in urls]
            ancestor = _component(name, origin.version, upstream, sha256=origin.sha256, bom_ref=f"upstream:{upstream}")
            pedigree = Pedigree(ancestors=[ancestor], patches=patches)
        elif pinned:
            with suppress(ProcessError):  # pinned only for another machine; here it comes from the lock
                sha256 = choose_pinned(pinned, target).sha256
        file = info / "METADATA"
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        metadata = HeaderParser().parsestr(text)
        lines = [line.partition(",") for line in metadata.get_all("Project-URL") or []]
        links = {label.strip().lower(): url.strip() for label, _, url in lines}
        source = next((links[label] for label in SOURCES if label in links), metadata.get("Home-page", ""))
        record, files = info / "RECORD", list[Component]()
        if record.is_file():
            files = [_component(f"{info.name}/RECORD", "", None, ComponentType.FILE, sha256_file(record))]
        yield _component(
            name, version, PackageURL("pypi", None, name, version), sha256=sha256, pedigree=pedigree,
            licences=[pinned.licence] if pinned else _licence_names(metadata),
            external_references=[_reference(ExternalReferenceType.VCS, source)] if source else [],
            components=files,
        )  # fmt: skip


def _licence_names(metadata: Message) -> list[str]:
    """Return a distribution's licence as it names it: an SPDX expression, a short name, or its classifiers."""
    for field in ("License-Expression", "License"):
        name = str(metadata.get(field, "")).strip().partition("\n")[0].strip(" \"'")
        if name and len(name) <= LONGEST_LICENCE and not VAGUE.match(name):
            return [name]
    classifiers = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    return sorted({line.rpartition(" :: ")[2] for line in classifiers})


def _debian(root: Path, manifest: Mapping[str, Any]) -> Iterator[Component]:
    """Yield each installed package of dpkg's list, with the hash of its file if we lock it."""
    status, locked = root / "var/lib/dpkg/status", dict[str, str]()
    architecture = {machine: name for name, machine in OCI_MACHINES.items()}[manifest["machine"]]
    lock = ROOT / f"locks/debian/{manifest['device']}-runtime-{architecture}.txt"
    for line in lock.read_text(encoding="utf-8").splitlines() if lock.is_file() else ():
        if not line.startswith("#"):
            sha256, _, path = line.partition("  ")
            locked[path.rpartition("/")[2]] = sha256
    release = root / "etc/os-release"
    words = re.findall(r"^VERSION_CODENAME=(\w+)", release.read_text() if release.is_file() else "", re.MULTILINE)
    for paragraph in status.read_text(encoding="utf-8").split("\n\n") if status.is_file() else ():
        fields = HeaderParser().parsestr(paragraph)
        if "installed" not in str(fields.get("Status")).split():
            continue
        name, version, machine = (str(fields[field]) for field in ("Package", "Version", "Architecture"))
        qualifiers = {"arch": machine, **({"distro": words[0]} if words else {})}
        source, _, source_version = str(fields.get("Source", name)).partition(" ")
        source_url = PackageURL("deb", "debian", source, source_version.strip("()") or version, {"arch": "source"})
        file = root / "usr/share/doc" / name / "copyright"
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        # Only some copyright files are machine-readable (DEP 5).
        licences = re.findall(r"^License: *(\S.*)$", text, re.MULTILINE) if text.startswith("Format:") else ()
        yield _component(
            name, version, PackageURL("deb", "debian", name, version, qualifiers),
            sha256=locked.get(f"{name}_{version.partition(':')[2] or version}_{machine}.deb", ""),
            licences=sorted({licence for licence in licences if len(licence) <= LONGEST_LICENCE}),
            external_references=[_reference(ExternalReferenceType.SOURCE_DISTRIBUTION, str(source_url))],
        )  # fmt: skip


def _kernels(packages: Path, manifest: Mapping[str, Any], audit: Mapping[str, Any]) -> Iterator[Component]:
    """Yield each module compiled in the build, and upstream's libraries with machine code, with their cubins."""
    if manifest["device"] != CUDA:
        return
    compiled: Mapping[str, str] = manifest["kernels"]
    for file in audit.get("files") or []:
        path = Path(file["path"])
        cubins = {cubin["name"]: cubin["target"] or f"sm_{cubin['sm']}" for cubin in file["cubins"]}
        yield _component(
            str(path.relative_to(packages)) if path.is_relative_to(packages) else path.name, "", None,
            ComponentType.FILE, compiled.get(path.stem) or sha256_file(path),
            properties=_properties(**{f"cubin:{name}": target for name, target in cubins.items()}),
        )  # fmt: skip


def _component(
    name: str,
    version: str,
    purl: PackageURL | None,
    kind: ComponentType = ComponentType.LIBRARY,
    sha256: str = "",
    licences: list[str] | tuple[str, ...] = (),
    **fields: Any,
) -> Component:
    """Return a component whose reference is its purl, or a file's path; `fields` are further fields of CycloneDX."""
    fields = {"bom_ref": str(purl) if purl else f"file:{name}"} | fields
    licenses: list[License] = [DisjunctiveLicense(name=licence) for licence in licences]
    if len(licences) == 1:  # an expression or an SPDX name
        licenses = [LicenseFactory().make_from_string(licences[0])]
    return Component(
        name=name, version=version or None, type=kind, purl=purl, licenses=licenses,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [], **fields,
    )  # fmt: skip


def _reference(kind: ExternalReferenceType, url: str) -> ExternalReference:
    return ExternalReference(type=kind, url=XsUri(url))


def _properties(**values: str) -> list[Property]:
    return [Property(name=f"sparkforge:{name}", value=value) for name, value in values.items()]
