"""The trust policy of this machine, `trust.toml` in the checkout, and the verification of images against it.

Without that file nothing is required. With the file an image needs the demanded documents (signature, provenance, bill
of materials), signed with one of the file's keys, and must not be older than the last accepted image, except in
`./inv rollback`.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasPath, AwareDatetime, BaseModel, Field, RootModel, field_validator, model_validator

from sparkforge.core import paths, tables
from sparkforge.core.console import say
from sparkforge.core.errors import InputError, IntegrityError, on
from sparkforge.core.files import DocumentError, parse_json, read_bytes, sha256_file, untrusted, write_json
from sparkforge.core.tables import Record, parse_record
from sparkforge.image import inspect, provenance, signing
from sparkforge.image.attached import Attached, Folder, Place, Repository, tag_of
from sparkforge.image.devices import build_command
from sparkforge.image.oci import LARGEST_DOCUMENT, Digest, LayoutImage
from sparkforge.image.provenance import CYCLONEDX, REBUILD, SLSA, Predicate, Statement
from sparkforge.pins.table import Text

SIGNATURE, PROVENANCE, SBOM, REBUILT = "signature", "provenance", "sbom", "rebuilt bit for bit"
FILE = paths.ROOT / "trust.toml"
SIGN = "./inv image.sign KEY   # for your own build; else ask the publisher"
SIGN_FILE = "again   # first sign it: make it with --key KEY, or ask the publisher"
BUNDLE = "application/vnd.dev.sigstore.bundle"  # the beginning of the media types of Sigstore's bundles


class Identity(Record):
    """An accepted identity: the name in its certificates, the issuer of that name, and the trusted root's file."""

    identity: Text  # for a workflow https://github.com/OWNER/NAME/.github/workflows/FILE@refs/tags/TAG
    issuer: Text
    trusted_root: Text


class Key(Record):
    """A public key in PEM, and the name of the private key's owner."""

    public: str
    identity: str = ""

    @field_validator("public")
    @classmethod
    def _is_a_key(cls, text: str) -> str:
        signing.public_key(text)
        return text


class Images(Record):
    """The demands on an image, and the accepted keys, builders and stacks; an empty list accepts all."""

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
    keys: dict[str, Key] = Field(default_factory=dict)
    identities: dict[str, Identity] = Field(default_factory=dict)
    images: Images

    @model_validator(mode="after")
    def _keys_are_there(self) -> Trust:
        if not (known := {*self.keys, *self.identities}) or self.keys.keys() & self.identities:
            raise ValueError("it needs 'keys' or 'identities', and no name in both")
        if unknown := sorted(set(self.images.keys) - known):
            raise ValueError(f"'keys' names no key: {', '.join(unknown)}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the accepted keys and identities."""
        return self.images.keys or (*self.keys, *self.identities)

    def public(self) -> signing.Keys:
        """Return the accepted keys, by name."""
        return {name: signing.public_key(self.keys[name].public) for name in self.names if name in self.keys}

    def workflows(self) -> dict[str, Identity]:
        """Return the accepted identities, by name."""
        return {name: self.identities[name] for name in self.names if name in self.identities}


class Simple(BaseModel):
    """The field of cosign's payload that we read: the digest of the signed image."""

    digest: Digest = Field(validation_alias=AliasPath("critical", "image", "docker-manifest-digest"))


class Marks(RootModel[dict[str, AwareDatetime]]):
    """The record of accepted images: stack → build time of its last image."""


@dataclass
class Evidence:
    """The attachments of an image: the signer of each valid one, and the reasons why others are invalid."""

    signed: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    finished: str = ""


def policy() -> Trust | None:
    """Return the policy of this checkout, or None. Raises InputError, and StorageError if others can write it."""
    path = FILE
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():  # an unmounted disk must not disable the policy
            raise untrusted(path, "it is a link to a file that is not there", on("ls -l", path)) from None
        return None
    if status.st_uid not in {0, os.geteuid()}:
        why = f"it belongs to uid {status.st_uid}, this process is uid {os.geteuid()}"
        raise untrusted(path, why, on("ls -lL", path))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise untrusted(path, "other users can write it", f"chmod go-w {path}")
    return tables.load(path, Trust)


def require(image: Any, stack: str, repository: str = "", *, back: bool = False) -> Evidence | None:
    """Return the evidence for an image of a stack; None if nothing is required.

    Attachments are read from the image's layout, from this machine and from `repository`. `back` allows an image older
    than the last accepted one. Raises IntegrityError, which names missing and wrong attachments.
    """
    trust = policy()
    if trust is None:
        return None
    known = {digest for _, digest in signing.digests(image)}
    if isinstance(image, LayoutImage):  # an engine compares layers with the configuration; for a layout we must do it
        known.discard(image.id)
    evidence, keys = Evidence(), trust.public()
    attached = list(_attached(image, known, repository, is_keyless=bool(trust.workflows())))
    for suffix, entry in attached:
        try:
            if suffix == "sig":
                _take_signature(evidence, entry, keys, known)
            else:
                _take_statement(evidence, entry, trust, known, image, stack)
        except (DocumentError, ValueError) as error:
            evidence.refused.append(str(error)[:200])
    what = image.tags[0] if image.tags else image.short_id
    if missing := [thing for thing in trust.images.demand if thing not in evidence.signed]:
        reasons = "; ".join(dict.fromkeys(evidence.refused)) or "nothing is attached to it"
        why = f"trust.toml demands {', '.join(missing)} by {', '.join(trust.names)}: {reasons}"
        raise IntegrityError(f"{what} is refused", why, SIGN, code="integrity.signature")
    if not back and evidence.finished and (last := _accepted().get(stack)) and _time(evidence.finished) < last:
        why = f"it was built {evidence.finished}, and this machine has accepted an image of {last.isoformat()}"
        failure = f"{what} is older than the last accepted image"
        raise IntegrityError(failure, why, "./inv rollback --list", code="integrity.signature")
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
    """Print a bundle's signer and return its sha256; empty if nothing is demanded. Raises as `require_signed`."""
    attached = signatures(file)
    if not is_demanding():
        say(f"{file.name} {'has a signature, but no trust.toml names a trusted key' if attached else 'is unsigned'}")
        return ""
    sha256 = sha256_file(file)
    say(f"{file.name} is signed by {require_signed(file.name, sha256, attached)}")
    return sha256


def is_demanding() -> bool:
    """Tell whether trust.toml demands anything."""
    trust = policy()
    return bool(trust and trust.images.demand)


def require_buildable(stack: str) -> None:
    """Raise IntegrityError if the policy would refuse an image that is built now and therefore unsigned."""
    if is_demanding():
        why = "trust.toml requires a signature, which a new image does not have"
        fix = f"{build_command(stack)} && ./inv image.sign KEY   # or ./inv image.pull of a signed one"
        raise IntegrityError("an image built now would be refused", why, fix, code="integrity.signature")


def require_signed(what: str, sha256: str, attached: Sequence[Attached]) -> str:
    """Return the signer of a bundle or kernel pack with this sha256; empty if nothing is demanded.

    Raises IntegrityError if images have demands and no key of trust.toml signed the file.
    """
    trust = policy()
    if not trust or not trust.images.demand:
        return ""
    reasons = list[str]()
    for entry in attached:
        try:
            return _signed_statement(entry, trust, {f"sha256:{sha256}"})[0]
        except (DocumentError, ValueError) as error:
            reasons.append(str(error)[:200])
    why = f"trust.toml demands signature by {', '.join(trust.names)}: {'; '.join(reasons) or 'it has none'}"
    raise IntegrityError(f"{what} is refused", why, SIGN_FILE, code="integrity.signature")


def _signed_statement(entry: Attached, trust: Trust, known: set[str]) -> tuple[str, Statement]:
    """Return the signer and the statement, whose subject is one of `known`. Raises ValueError otherwise."""
    if entry.kind.startswith(BUNDLE):
        signer, payload = read_bundle(entry.data, trust.workflows(), FILE.parent)
        document = parse_json(payload, "a statement")
    else:
        signer, document = signing.read_statement(entry, trust.public())
    if not signer:
        raise ValueError("no accepted key signed a statement")
    statement = parse_record(document, "a statement", Statement)
    if known.isdisjoint(f"sha256:{subject.digest.sha256}" for subject in statement.subject):
        raise ValueError(f"a statement is about another digest, {statement.subject[0].digest.sha256[:12]}")
    return signer, statement


def read_bundle(data: bytes, identities: Mapping[str, Identity], folder: Path) -> tuple[str, bytes]:
    """Return the identity that signed a Sigstore bundle, and the bundle's statement; works offline.

    `folder` has the trusted roots. Raises ValueError if no identity signed the bundle, InputError for an invalid root.
    """
    from sigstore.errors import Error  # noqa: PLC0415 - takes a second, saved without identities
    from sigstore.models import Bundle, TrustedRoot  # noqa: PLC0415
    from sigstore.verify import Verifier, policy  # noqa: PLC0415
    from sigstore_models.trustroot.v1 import TrustedRoot as Root  # noqa: PLC0415

    reasons = []
    for name, signer in identities.items():
        path = folder / signer.trusted_root
        try:
            verifier = Verifier(trusted_root=TrustedRoot(Root.from_json(read_bytes(path))))
        except (OSError, ValueError, Error) as error:
            why = " ".join(str(error).split())[:200]
            fix = f"cosign trusted-root create --out {path}   # or get it from the signer"
            raise InputError(f"{path} is not a trusted root of Sigstore", why, fix, code="input.table") from error
        try:
            bundle, issuer = Bundle.from_json(data), signer.issuer
            kind, payload = verifier.verify_dsse(bundle, policy.Identity(identity=signer.identity, issuer=issuer))
        except Exception as error:  # noqa: BLE001 - untrusted data; the library raises even OverflowError
            reasons.append(f"not by {name}: {' '.join(str(error).split())[:160]}")
            continue
        if kind == "application/vnd.in-toto+json":
            return name, payload
        reasons.append(f"{name} signed another kind, {kind[:40]}")
    raise ValueError(f"no accepted identity signed a Sigstore bundle: {'; '.join(reasons) or 'trust.toml has none'}")


def _attached(image: Any, known: set[str], repository: str, *, is_keyless: bool) -> Iterator[tuple[str, Attached]]:
    """Yield (suffix, entry) of an image's attachments in its layout, on this machine, and in `repository`."""
    for digest in sorted(known) if repository and is_keyless else ():
        yield from (("att", entry) for entry in Repository(repository).read_referrers(digest, BUNDLE))
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
        raise ValueError("no accepted key made a signature")
    payload = parse_record(entry.data, "a signature", Simple)
    if (digest := payload.digest) not in known:
        raise ValueError(f"a signature is for another image, {digest[:19]}")
    evidence.signed[SIGNATURE] = signer


def _take_statement(evidence: Evidence, entry: Attached, trust: Trust, known: set[str], image: Any, stack: str) -> None:
    signer, statement = _signed_statement(entry, trust, known)
    is_forges = signer in trust.identities  # a code host's provenance names its workflow and none of our pins
    if is_forges:
        evidence.signed.setdefault(SIGNATURE, signer)
    if statement.kind == CYCLONEDX and SBOM in trust.images.demand:
        if statement.predicate != parse_json(inspect.bill(image, stack), "the image's bill of materials"):
            raise ValueError("the signed bill of materials is not the one in the image")
        evidence.signed[SBOM] = signer
    elif statement.kind == SLSA:
        predicate = parse_record(statement.predicate, "provenance", Predicate)
        named = stack if is_forges else predicate.stack
        finished = str(image.attrs["Created"]) if is_forges else predicate.finished
        if problems := list(_wrong(predicate.builder, named, trust.images, stack)):
            raise ValueError("; ".join(problems))
        own = provenance.predicate(image, stack, inspect.manifest(image, stack))
        if not is_forges and (problems := provenance.differences(statement.predicate, own)):
            raise ValueError(f"the provenance is not the image's: {'; '.join(problems)}")
        evidence.finished = max(finished, evidence.finished or finished, key=_time)
        evidence.signed[PROVENANCE] = f"{signer}, built by {predicate.builder}"
    elif statement.kind == REBUILD:
        witnesses = {signer, *filter(None, evidence.signed.get(REBUILT, "").split(", "))}
        evidence.signed[REBUILT] = ", ".join(sorted(witnesses))


def _wrong(builder: str, named: str, demanded: Images, stack: str) -> Iterator[str]:
    if named != stack:
        yield f"its provenance names the stack {named[:40]}, and {stack} was requested"
    if demanded.stacks and named not in demanded.stacks:
        yield f"trust.toml does not accept the stack {named[:40]}"
    if demanded.builders and builder not in demanded.builders:
        yield f"it was built by {builder[:80]}, which trust.toml does not name"


def _time(text: str) -> datetime:
    """Return the time in a text. Raises ValueError if it is not a time or has no time zone."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text[:40]} names no time zone")
    return moment


def _marks() -> Path:
    return paths.state() / "accepted-images.json"


def _accepted() -> dict[str, datetime]:
    return parse_record(read_bytes(_marks()), str(_marks()), Marks).root if _marks().exists() else {}


def accept(stack: str, evidence: Evidence | None) -> None:
    """Record that an image was accepted: older ones are refused from now on, except by `./inv rollback`."""
    if evidence and evidence.finished:
        paths.secure_state()
        marks = Marks({**_accepted(), stack: _time(evidence.finished)})
        write_json(_marks(), marks.model_dump(mode="json"), mode=0o600)


def print_trust(stack: str, name: str) -> None:
    """Print the evidence for a stack's image, or for the image `name`. Raises IntegrityError as `require` does."""
    with inspect.opened(stack, name) as image:
        if evidence := require(image, stack, back=True):
            for thing, signer in sorted(evidence.signed.items()):
                say(f"{thing} by {signer}")
        elif any(signing.own_folder().read(tag_of(digest, "att")) for _, digest in signing.digests(image)):
            say(f"{image.short_id} has signatures, but no trust.toml names a trusted key")
        else:
            say(f"{image.short_id} is your own unsigned build; ./inv image.sign KEY signs it")
