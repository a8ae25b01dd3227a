"""Statements that a workflow signed without a key: Sigstore bundles, verified offline with a trusted root."""

from collections.abc import Mapping
from pathlib import Path

from sparkforge.core.errors import InputError
from sparkforge.core.files import read_bytes
from sparkforge.core.tables import Record
from sparkforge.pins.table import Text

BUNDLE = "application/vnd.dev.sigstore.bundle"  # media types begin with it


class Identity(Record):
    """An accepted identity: the name in its certificates, the issuer of that identity, and the root's file."""

    identity: Text  # for a workflow https://github.com/OWNER/NAME/.github/workflows/FILE@refs/tags/TAG
    issuer: Text
    trusted_root: Text


def read_statement(data: bytes, identities: Mapping[str, Identity], folder: Path) -> tuple[str, bytes]:
    """Return the identity that signed a bundle, and the bundle's statement.

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
            raise InputError(f"{path} is no trusted root of Sigstore", why, fix, code="input.table") from error
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
