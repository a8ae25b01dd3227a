"""Ed25519 signatures: DSSE (Dead Simple Signing Envelope) around in-toto statements, cosign's payload for digests.

It uses `cryptography` directly: securesystemslib depends on it too, and would replace only one line, in `encoded`.
"""

import base64
import binascii
import hashlib
import json
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, Field

from sparkforge.core import paths
from sparkforge.core.console import echo, say
from sparkforge.core.errors import StorageError, on
from sparkforge.core.files import DocumentError, parse_json, write_atomic
from sparkforge.core.tables import parse_record
from sparkforge.image import inspect, provenance
from sparkforge.image.attached import Attached, Folder, Place, Repository, tag_of
from sparkforge.image.inspect import Expected
from sparkforge.image.oci import LayoutImage

STATEMENT_TYPE, ENVELOPE_TYPE = "application/vnd.in-toto+json", "application/vnd.dsse.envelope.v1+json"
SIMPLE_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE = "dev.cosignproject.cosign/signature"
LARGEST_KEY = 1 << 14
Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*=*$")]
Keys = Mapping[str, Ed25519PublicKey]


class Envelope(BaseModel):
    """A DSSE envelope."""

    class Signature(BaseModel):
        """One signature. Its key id is only a hint and is ignored."""

        sig: Base64

    payload_type: str = Field(alias="payloadType")
    payload: Base64
    signatures: list[Signature] = Field(min_length=1, max_length=16)


def private_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in a PEM file (PKCS #8). Raises StorageError, also if another user owns it or can read it."""
    make = f"(umask 077; openssl genpkey -algorithm ed25519 -out {shlex.quote(str(path))})"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            data = file.read(LARGEST_KEY) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        fix = make if isinstance(error, FileNotFoundError) else on("ls -ld", path)
        raise _unusable(path, error.strerror or str(error), fix) from error
    if status.st_uid != os.geteuid():
        why = f"its owner is uid {status.st_uid}, this process is uid {os.geteuid()}"
        raise _unusable(path, why, on("ls -lL", path))
    # The content is checked before the mode, so that no advice changes or overwrites another file.
    beside = shlex.quote(f"{path}.ed25519")
    other = f"(umask 077; openssl genpkey -algorithm ed25519 -out {beside})   # and name that file"
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _unusable(path, f"it is not a PEM key without a password: {str(error)[:80]}", other) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _unusable(path, "it is not an Ed25519 key", other)
    if stat.S_IMODE(status.st_mode) & 0o177:
        why = f"its mode is {stat.S_IMODE(status.st_mode):04o}, and nobody but its owner may read or write it"
        raise _unusable(path, why, on("chmod 600", path))
    return key


def _unusable(path: Path, why: str, fix: str) -> StorageError:
    return StorageError(f"cannot sign with {path}", why, fix, code="storage.access")


def public_key(text: str) -> Ed25519PublicKey:
    """Return a public key in PEM. Raises ValueError."""
    try:
        key = serialization.load_pem_public_key(text.encode())
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("it is not an Ed25519 key")  # noqa: TRY004 - pydantic converts it
    return key


def public_text(key: Ed25519PrivateKey) -> str:
    """Return the public key in PEM, as in trust.toml."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()


def encoded(kind: str, payload: bytes) -> bytes:
    """Return the bytes that DSSE signs: the pre-authentication encoding of a payload."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


def signed(statement: Mapping[str, Any], key: Ed25519PrivateKey) -> Attached:
    """Return a statement in a signed envelope."""
    payload = json.dumps(statement, sort_keys=True).encode()
    signature = key.sign(encoded(STATEMENT_TYPE, payload))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    key_id = hashlib.sha256(key.public_key().public_bytes(serialization.Encoding.DER, form)).hexdigest()
    text = {
        "payloadType": STATEMENT_TYPE, "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": key_id, "sig": base64.b64encode(signature).decode()}],
    }  # fmt: skip
    annotations = {SIGNATURE: "", "predicateType": str(statement["predicateType"])}
    return Attached(json.dumps(text).encode(), ENVELOPE_TYPE, annotations)


def sign_bundle(file: Path, sha256: str, bill: str, key_file: Path) -> None:
    """Write a signed statement of a bundle's bill of materials to FILE.sig. Raises StorageError for the key."""
    statement = provenance.statement([(file.name, sha256)], provenance.CYCLONEDX, parse_json(bill, "the bill"))
    write_atomic(signature_path(file), signed(statement, private_key(key_file)).data)
    say(f"signed: {signature_path(file)}")


def signature_path(file: Path) -> Path:
    """Return the path of a bundle's or kernel pack's signature: a DSSE envelope beside the file."""
    return file.with_name(f"{file.name}.sig")


def signature(name: str, digest: str, key: Ed25519PrivateKey) -> Attached:
    """Return cosign's signature of an image's digest; `name` is the image's repository."""
    critical = {
        "identity": {"docker-reference": name}, "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
    }  # fmt: skip
    payload = json.dumps({"critical": critical, "optional": None}, sort_keys=True).encode()
    return Attached(payload, SIMPLE_TYPE, {SIGNATURE: base64.b64encode(key.sign(payload)).decode()})


def signer(data: bytes, signatures: list[str], keys: Keys) -> str:
    """Return the name of the key that signed `data`; empty if none of `keys` did."""
    for name, key in keys.items():
        for text in signatures:
            try:
                key.verify(base64.b64decode(text, validate=True), data)
            except (InvalidSignature, binascii.Error, ValueError):
                continue
            return name
    return ""


def read_statement(attached: Attached, keys: Keys) -> tuple[str, dict[str, Any]]:
    """Return the signer of an envelope and its statement; empty if none of `keys` signed it.

    A statement that no trusted key has signed is not read any further. Raises DocumentError for a malformed envelope.
    """
    envelope = parse_record(attached.data, "an envelope", Envelope)
    try:
        payload = base64.b64decode(envelope.payload, validate=True)
    except binascii.Error as error:
        raise DocumentError("an envelope", str(error)) from error
    data = encoded(envelope.payload_type, payload)
    name = signer(data, [entry.sig for entry in envelope.signatures], keys)
    if not name or envelope.payload_type != STATEMENT_TYPE:
        return "", {}
    document: dict[str, Any] = parse_json(payload, "a statement")
    return name, document


def attach(place: Place, digest: str, suffix: str, new: list[Attached]) -> None:
    """Attach `new` to a digest; entries that are attached already stay."""
    tag = tag_of(digest, suffix)
    attached = place.read(tag)
    place.write(tag, [*attached, *(entry for entry in new if entry not in attached)])


def own_folder() -> Folder:
    """Return the folder with this machine's signatures and statements for its images."""
    return Folder(paths.state() / "attached")


def digests(image: Any) -> list[tuple[str, str]]:
    """Return (repository, digest) for each digest of an image; the last digest is the image id."""
    if isinstance(image, LayoutImage):
        return [("image", digest) for digest in image.digests]
    pushed = [entry.partition("@") for entry in image.attrs.get("RepoDigests") or []]
    names = {digest: name for name, _, digest in reversed(pushed)}
    return [
        *((name, digest) for digest, name in names.items() if digest != image.id),
        (names.get(image.id, "image"), image.id),
    ]


def sign(stack: str, name: str, expected: Expected, key_file: Path, builder: str, folder: Path | None) -> None:
    """Sign an image of this checkout: its digests, its provenance and its bill of materials.

    All signatures go to the image's repositories, or to `folder` instead, and into this machine's own folder.
    Raises StorageError for the key, IntegrityError for an image of another checkout, EngineError.
    """
    key = private_key(key_file)
    with inspect.opened(stack, name) as image:
        manifest, _ = inspect.require_ours(image, stack, expected)
        predicate = provenance.predicate(image, stack, manifest, builder or provenance.OWN_BUILD)
        bill = parse_json(inspect.bill(image, stack), "the bill of materials")
        named = digests(image)
    statements = [
        signed(provenance.statement(named, kind, content), key)
        for kind, content in ((provenance.SLSA, predicate), (provenance.CYCLONEDX, bill))
    ]
    for repository, digest in named:
        places: list[Place] = [own_folder()]
        if folder:
            places.append(Folder(folder))
        elif repository != "image":
            places.append(Repository(repository))
        for place in places:
            attach(place, digest, "sig", [signature(repository, digest, key)])
            attach(place, digest, "att", statements)
            say(f"signed {digest[:19]}: {place}")
    say("the public key, for trust.toml:")
    echo(public_text(key).rstrip())
