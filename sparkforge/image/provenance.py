"""The provenance of an image: an in-toto Statement v1 about its digests, with the predicate of SLSA Provenance v1.

It is computed from the image's contents, so everybody who has the image can compute and compare it (see `differences`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import AliasPath, BaseModel, Field

from sparkforge.core.files import parse_json
from sparkforge.core.tables import Record
from sparkforge.image import engine, inspect
from sparkforge.image.devices import build_command
from sparkforge.image.oci import Digest
from sparkforge.pins.table import Sha256

STATEMENT, SLSA, CYCLONEDX = (
    "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1", "https://cyclonedx.org/bom",
)  # fmt: skip
REBUILD = "urn:sparkforge:rebuild:1"  # another machine built the same image, bit for bit (lab.reproducible)
BUILD_TYPE = "urn:sparkforge:image-build:1"
OWN_BUILD = "urn:sparkforge:builder:own"  # the default builder
REVISION_LABEL = "org.opencontainers.image.revision"
INTERNAL = ("lock", "patches", "key", "kernels", "audit", "sbom")  # keys of the image's manifest
COMMIT = re.compile(r"[0-9a-f]{40}")


class Subject(BaseModel):
    """The subject of a statement."""

    class Hashes(Record):
        """The digest of a subject."""

        sha256: Sha256

    name: str = ""
    digest: Hashes


class Predicate(BaseModel):
    """The fields of SLSA's predicate that we read; only our own predicates have `stack`."""

    stack: str = Field("", validation_alias=AliasPath("buildDefinition", "externalParameters", "stack"))
    builder: str = Field(validation_alias=AliasPath("runDetails", "builder", "id"))
    finished: str = Field("", validation_alias=AliasPath("runDetails", "metadata", "finishedOn"))


class Statement(BaseModel):
    """The fields of a statement that we read."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: list[Subject] = Field(min_length=1, max_length=16)
    kind: str = Field(alias="predicateType")
    predicate: dict[str, Any]


def statement(subjects: list[tuple[str, Digest]], kind: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return a statement of type `kind` about `subjects`, each (name, sha256:…)."""
    subject = [{"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}} for name, digest in subjects]
    return {"_type": STATEMENT, "subject": subject, "predicateType": kind, "predicate": predicate}


def predicate(image: Any, stack: str, manifest: Mapping[str, Any], builder: str = OWN_BUILD) -> dict[str, Any]:
    """Return SLSA's predicate for an image with this `manifest`. Raises IntegrityError, EngineError."""
    labels, source = inspect.labels(image.attrs), inspect.made_from(image, stack)
    revision = labels.get(REVISION_LABEL, "")
    if revision.startswith("unknown") or not revision:  # the build set no label: source.json may name the commit
        revision = str(source.get("revision", ""))
    bill = inspect.bill(image, stack) if inspect.SBOM_LABEL in labels else b"{}"
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "stack": manifest.get("stack"), "platform": engine.platform_of(image.attrs), "revision": revision,
                "command": build_command(stack),
            },
            "internalParameters": {key: manifest.get(key) for key in INTERNAL},
            "resolvedDependencies": [
                *([{"uri": "git+file:.", "digest": {"gitCommit": revision}}] if COMMIT.fullmatch(revision) else []),
                *([{"uri": "file:.", "digest": {"sha256": source["tree"]}}] if source.get("tree") else []),
                *_inputs(manifest),
                *_components(parse_json(bill, "the bill of materials").get("components") or []),
            ],
        },
        "runDetails": {"builder": {"id": builder}, "metadata": {"finishedOn": str(image.attrs.get("Created") or "")}},
    }  # fmt: skip


def _inputs(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key, form in (("lock", "file:locks/{}.txt"), ("patches", "file:patches/{}")):
        for name, sha256 in sorted(dict(manifest.get(key) or {}).items()):
            yield {"uri": form.format(name), "digest": {"sha256": sha256}}


def _components(components: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield a bill's components that have a purl, and the originals of patched components, with hashes."""
    for component in components:
        if purl := component.get("purl"):
            hashes = [entry["content"] for entry in component.get("hashes") or []]
            yield {"uri": purl, **({"digest": {"sha256": hashes[0]}} if hashes else {})}
        yield from _components((component.get("pedigree") or {}).get("ancestors") or [])


def differences(recorded: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference of an image's provenance from the recorded one; the builder is not compared."""
    lines = []
    for part in ("externalParameters", "internalParameters"):
        old, new = (dict(value["buildDefinition"].get(part) or {}) for value in (recorded, actual))
        lines += [f"{key} differs from the record" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    for section, key in (("buildDefinition", "resolvedDependencies"), ("runDetails", "metadata")):
        if recorded[section].get(key) != actual[section].get(key):
            lines.append(f"{key} differs from the record")
    return lines
