"""Whose images this machine takes: `trust.toml` in the checkout, and what of an image is verified against it.

Without that file nothing is demanded. With it an image needs a signature, provenance and a bill of materials, as far as
they are demanded, by a key of the file; and it may not be older than the one before, unless `./inv rollback` goes back.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import docker
from pydantic import BaseModel, Field, RootModel, field_validator, model_validator

from sparkforge.core import paths, tables
from sparkforge.core.console import say
from sparkforge.core.documents import DocumentError, parse_json, read_bytes
from sparkforge.core.errors import IntegrityError, StorageError
from sparkforge.core.files import sha256_file, write_json
from sparkforge.core.tables import Record, parse_object
from sparkforge.image import inspect, provenance, signing
from sparkforge.image.attached import Attached, Folder, Place, Repository, tag_of
from sparkforge.image.devices import build_command
from sparkforge.image.oci import LARGEST_DOCUMENT, Digest, LayoutImage
from sparkforge.image.provenance import CYCLONEDX, REBUILD, SLSA, Predicate, Statement

SIGNATURE, PROVENANCE, SBOM, REBUILT = "signature", "provenance", "sbom", "rebuilt bit for bit"
FILE = paths.ROOT / "trust.toml"
SIGN = "./inv image.sign KEY   # an own build; else ask who published it"
SIGN_FILE = "make it again with --key KEY, or ask who published it"


class Key(Record):
    """A public key in PEM, and who has the private one, in words."""

    public: str
    identity: str = ""

    @field_validator("public")
    @classmethod
    def _is_a_key(cls, text: str) -> str:
        signing.public_key(text)
        return text


class Images(Record):
    """What an image needs: of whom (all keys if none is named), built by whom, and of which stacks (any)."""

    demand: tuple[Literal["signature", "provenance", "sbom"], ...]
    keys: tuple[str, ...] = ()
    builders: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_checked_at_all(self) -> Images:
        if (self.builders or self.stacks) and PROVENANCE not in self.demand:
            raise ValueError("'builders' and 'stacks' are in the provenance: demand it")
        return self


class Trust(Record):
    """The whole of trust.toml."""

    schema_: Literal[1] = Field(alias="schema")
    keys: dict[str, Key] = Field(min_length=1)
    images: Images

    @model_validator(mode="after")
    def _keys_are_there(self) -> Trust:
        if unknown := sorted(set(self.images.keys) - self.keys.keys()):
            raise ValueError(f"'keys' names no key: {', '.join(unknown)}")
        return self

    def public(self) -> signing.Keys:
        """Return the keys that count, by name."""
        names = self.images.keys or tuple(self.keys)
        return {name: signing.public_key(self.keys[name].public) for name in names}


class Simple(BaseModel):
    """What is used of cosign's payload."""

    class Critical(BaseModel):
        """What is signed."""

        class Image(BaseModel):
            """The image."""

            digest: Digest = Field(alias="docker-manifest-digest")

        image: Image

    critical: Critical


class Marks(RootModel[dict[str, str]]):
    """The record of what was accepted."""


@dataclass
class Evidence:
    """What was attached to an image: who signed each thing that holds, and why the rest does not."""

    signed: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    finished: str = ""


def policy() -> Trust | None:
    """Return the policy of this checkout; None without one. Raises StorageError for another user's, InputError."""
    path = FILE
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():  # what was demanded must not vanish with a disk that is not mounted
            raise _untrusted(path, "it is a link to a file that is not there", f"ls -l {path}") from None
        return None
    if status.st_uid not in {0, os.geteuid()}:
        raise _untrusted(path, f"it belongs to uid {status.st_uid}, we are uid {os.geteuid()}", f"ls -lL {path}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _untrusted(path, "other users can write it", f"chmod go-w {path}")
    return tables.load(path, Trust)


def _untrusted(path: Path, why: str, fix: str) -> StorageError:
    return StorageError(f"{path} is not believed", why, fix, code="storage.access")


def require(
    client: docker.DockerClient | None, image: Any, stack: str, repository: str = "", *, back: bool = False
) -> Evidence | None:
    """Return who vouches for an image of a stack; None if nothing is demanded.

    What is attached to it is looked for in its own layout, on this machine and in `repository`. `back` lets it be older
    than the last one. Raises IntegrityError by name for what is missing or wrong.
    """
    trust = policy()
    if trust is None:
        return None
    known = {digest for _, digest in signing.digests(image)}
    if isinstance(image, LayoutImage):  # an engine compares layers with the configuration, and here nobody does
        known.discard(image.id)
    evidence, keys = Evidence(), trust.public()
    attached = list(_attached(image, known, repository))
    for suffix, entry in attached:
        try:
            if suffix == "sig":
                _take_signature(evidence, entry, keys, known)
            else:
                _take_statement(evidence, entry, trust, known, (client, image, stack))
        except (DocumentError, ValueError) as error:
            evidence.refused.append(str(error)[:200])
    what = image.tags[0] if image.tags else image.short_id
    if missing := [thing for thing in trust.images.demand if thing not in evidence.signed]:
        reasons = "; ".join(dict.fromkeys(evidence.refused)) or "nothing is attached to it"
        why = f"trust.toml demands {', '.join(missing)} by {', '.join(keys)}: {reasons}"
        raise IntegrityError(f"{what} is refused", why, SIGN, code="integrity.signature")
    if not back and evidence.finished and (last := _last(stack)) and _time(evidence.finished) < _time(last):
        why = f"it was built {evidence.finished}, and this machine has accepted one of {last}"
        raise IntegrityError(
            f"{what} is older than the last one", why, "./inv rollback --list", code="integrity.signature"
        )
    for suffix, digest in itertools.product(("sig", "att"), sorted(known) if repository else ()):
        signing.attach(signing.own_folder(), digest, suffix, [entry for kind, entry in attached if kind == suffix])
    return evidence


def signatures(file: Path) -> list[Attached]:
    """Return the signature of a bundle or of a kernel pack; empty if there is none. Raises StorageError."""
    path = signing.signature_path(file)
    if not path.is_file():
        return []
    with path.open("rb") as opened:
        return [Attached(opened.read(LARGEST_DOCUMENT), signing.ENVELOPE_TYPE)]


def require_file(file: Path) -> str:
    """Return the sha256 of a bundle that a key of trust.toml signed, empty if nothing is demanded; say which it is.

    Raises what `require_signed` raises.
    """
    attached = signatures(file)
    if not is_demanding():
        say(f"{file.name} {'has a signature; no trust.toml says whose key counts' if attached else 'is unsigned'}")
        return ""
    sha256 = sha256_file(file)
    say(f"{file.name} is signed by {require_signed(file.name, sha256, attached)}")
    return sha256


def is_demanding() -> bool:
    """Tell whether trust.toml demands anything."""
    trust = policy()
    return bool(trust and trust.images.demand)


def require_buildable(stack: str) -> None:
    """Raise IntegrityError where an image that is built now would be refused, as nobody has signed it."""
    if is_demanding():
        why = "trust.toml demands what an image has only once it was signed"
        fix = f"./inv image.pull REPOSITORY@sha256:…; or {build_command(stack)} && ./inv image.sign KEY"
        raise IntegrityError("an image built now would be refused", why, fix, code="integrity.signature")


def require_signed(what: str, sha256: str, attached: Sequence[Attached]) -> str:
    """Return who signed a bundle or a kernel pack, by its sha256; empty if nothing is demanded.

    Raises IntegrityError for one that no key of trust.toml signed, if images need anything.
    """
    trust = policy()
    if not trust or not trust.images.demand:
        return ""
    reasons, keys = list[str](), trust.public()
    for entry in attached:
        try:
            return _signed_statement(entry, keys, {f"sha256:{sha256}"})[0]
        except (DocumentError, ValueError) as error:
            reasons.append(str(error)[:200])
    why = f"trust.toml demands signature by {', '.join(keys)}: {'; '.join(reasons) or 'it has none'}"
    raise IntegrityError(f"{what} is refused", why, SIGN_FILE, code="integrity.signature")


def _signed_statement(entry: Attached, keys: signing.Keys, known: set[str]) -> tuple[str, Statement]:
    """Return who signed a statement, and the statement, which is about one of `known`. Raises ValueError otherwise."""
    signer, document = signing.read_statement(entry, keys)
    if not signer:
        raise ValueError("a statement is of no key that counts")
    statement = Statement.model_validate(parse_object(json.dumps(document), "a statement", Statement))
    if known.isdisjoint(f"sha256:{subject.digest.sha256}" for subject in statement.subject):
        raise ValueError(f"a statement is about another digest, {statement.subject[0].digest.sha256[:12]}")
    return signer, statement


def _attached(image: Any, known: set[str], repository: str) -> Iterator[tuple[str, Attached]]:
    """Yield (suffix, entry) of what is attached to an image's digests in its layout, here, and in `repository`."""
    places: list[Place] = [signing.own_folder(), *([Repository(repository)] if repository else [])]
    if isinstance(image, LayoutImage) and image.layout.path.is_dir():
        places.append(Folder(image.layout.path))
    for place in places:
        for digest in sorted(known):
            for suffix in ("sig", "att"):
                yield from ((suffix, entry) for entry in place.read(tag_of(digest, suffix)))


def _take_signature(evidence: Evidence, entry: Attached, keys: signing.Keys, known: set[str]) -> None:
    signer = signing.signer(entry.data, [entry.annotations.get(signing.SIGNATURE, "")], keys)
    if not signer:
        raise ValueError("a signature is of no key that counts")
    payload = Simple.model_validate(parse_object(entry.data, "a signature", Simple))
    if (digest := payload.critical.image.digest) not in known:
        raise ValueError(f"a signature is for another image, {digest[:19]}")
    evidence.signed[SIGNATURE] = signer


def _take_statement(
    evidence: Evidence, entry: Attached, trust: Trust, known: set[str], of: tuple[docker.DockerClient | None, Any, str]
) -> None:
    """Note a signed statement that is about the image and says what the image holds."""
    client, image, stack = of
    signer, statement = _signed_statement(entry, trust.public(), known)
    if statement.kind == CYCLONEDX and SBOM in trust.images.demand:
        if statement.predicate != parse_json(inspect.bill(client, image, stack), "the image's bill of materials"):
            raise ValueError("the signed bill of materials is not the one in the image")
        evidence.signed[SBOM] = signer
    elif statement.kind == SLSA:
        predicate = Predicate.model_validate(parse_object(json.dumps(statement.predicate), "provenance", Predicate))
        if problems := list(_wrong(predicate, trust.images, stack)):
            raise ValueError("; ".join(problems))
        own = provenance.predicate(client, image, stack, inspect.manifest(client, image, stack))
        if problems := provenance.differences(statement.predicate, own):
            raise ValueError(f"the provenance is not the image's: {'; '.join(problems)}")
        if not evidence.finished or _time(predicate.run.metadata.finished) > _time(evidence.finished):
            evidence.finished = predicate.run.metadata.finished
        evidence.signed[PROVENANCE] = f"{signer}, built by {predicate.run.builder.id}"
    elif statement.kind == REBUILD:
        witnesses = {signer, *filter(None, evidence.signed.get(REBUILT, "").split(", "))}
        evidence.signed[REBUILT] = ", ".join(sorted(witnesses))


def _wrong(predicate: Predicate, demanded: Images, stack: str) -> Iterator[str]:
    """Yield where provenance is not what the policy demands."""
    named, builder = predicate.definition.external.stack, predicate.run.builder.id
    if named != stack:
        yield f"its provenance names the stack {named[:40]}, and {stack} was asked for"
    if demanded.stacks and named not in demanded.stacks:
        yield f"trust.toml does not take the stack {named[:40]}"
    if demanded.builders and builder not in demanded.builders:
        yield f"it was built by {builder[:80]}, which trust.toml does not name"
    _time(predicate.run.metadata.finished)


def _time(text: str) -> datetime:
    """Return a moment. Raises ValueError for one that is none, or names no zone."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text[:40]} names no time zone")
    return moment


def _marks() -> Path:
    return paths.state() / "accepted-images.json"


def _accepted() -> dict[str, str]:
    """Return stack → when its last accepted image was built. Raises StorageError for a broken record."""
    return parse_object(read_bytes(_marks()), str(_marks()), Marks) if _marks().exists() else {}


def _last(stack: str) -> str:
    """Return when the last accepted image of a stack was built. Raises StorageError for a broken record."""
    last = _accepted().get(stack, "")
    try:
        return _time(last).isoformat() if last else ""
    except ValueError as error:
        raise DocumentError(str(_marks()), str(error)) from error


def accept(stack: str, evidence: Evidence | None) -> None:
    """Note that an image was accepted: no older one is, from now on, but by `./inv rollback`."""
    if evidence and evidence.finished:
        paths.secure_state()
        write_json(_marks(), {**_accepted(), stack: evidence.finished}, mode=0o600)


def print_trust(stack: str, name: str) -> None:
    """Print who vouches for a stack's image, or the image `name`. Raises IntegrityError as `require` does."""
    with inspect.opened(stack, name) as (client, image):
        if evidence := require(client, image, stack, back=True):
            for thing, signer in sorted(evidence.signed.items()):
                say(f"{thing} by {signer}")
        elif any(signing.own_folder().read(tag_of(digest, "att")) for _, digest in signing.digests(image)):
            say(f"{image.short_id} has signatures; no trust.toml says whose key counts")
        else:
            say(f"{image.short_id} is an unsigned own build; ./inv image.sign KEY signs it")
