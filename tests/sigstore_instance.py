"""A fake Sigstore in memory: certificate authority, certificate log, signature log, trusted root."""

import base64
import datetime as dt
import hashlib
import json
import struct

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from sparkforge.image import signing

ISSUER_V1, SCTS = ObjectIdentifier("1.3.6.1.4.1.57264.1.1"), ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
NOW = dt.datetime(2026, 11, 1, 12, tzinfo=dt.UTC)
USES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip


def text(data):
    return base64.b64encode(data).decode()


def usage(*uses):
    return x509.KeyUsage(**{name: name in uses for name in USES})


def spki(key):
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.DER, form)


def der(certificate):
    return certificate.public_bytes(serialization.Encoding.DER)


def sign(key, data):
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


class Instance:
    """Signs as a workflow would, with a certificate of ten minutes."""

    def __init__(self):
        self.root_key, self.log, self.rekor = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
        builder = self._builder(name, self.root_key.public_key(), NOW + dt.timedelta(days=999))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage("key_cert_sign", "crl_sign"), critical=True)
        self.root = builder.sign(self.root_key, hashes.SHA256())

    def _builder(self, subject, public_key, until):
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)
        builder = builder.serial_number(7).not_valid_before(NOW).not_valid_after(until)
        return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)

    def _certificate(self, public_key, identity, issuer):
        builder = self._builder(x509.Name([]), public_key, NOW + dt.timedelta(minutes=10))
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.root_key.public_key())
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)])
        for extension, critical in (
            (authority, False), (names, True), (usage("digital_signature"), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False),
            (x509.UnrecognizedExtension(ISSUER_V1, issuer.encode()), False),
        ):  # fmt: skip
            builder = builder.add_extension(extension, critical)
        # RFC 6962: the log signs the certificate without the extension that contains the log's answer.
        body = builder.sign(self.root_key, hashes.SHA256()).tbs_certificate_bytes
        time = int(NOW.timestamp() * 1000)
        entry = hashlib.sha256(spki(self.root_key)).digest() + len(body).to_bytes(3, "big") + body
        signed = sign(self.log, struct.pack("!BBQH", 0, 0, time, 1) + entry + struct.pack("!H", 0))
        identifier = hashlib.sha256(spki(self.log)).digest()
        sct = struct.pack("!B32sQHBBH", 0, identifier, time, 0, 4, 3, len(signed)) + signed
        listed = struct.pack("!HH", len(sct) + 2, len(sct)) + sct
        octets = x509.UnrecognizedExtension(SCTS, bytes([4, len(listed)]) + listed)
        return builder.add_extension(octets, critical=False).sign(self.root_key, hashes.SHA256())

    def bundle(self, statement, identity, issuer, kind=signing.STATEMENT_TYPE):
        """Return the bundle of a workflow's signed statement, as a document."""
        key, payload = ec.generate_private_key(ec.SECP256R1()), json.dumps(statement).encode()
        certificate = self._certificate(key.public_key(), identity, issuer)
        signature = text(sign(key, signing.encoded(kind, payload)))
        envelope = {"payload": text(payload), "payloadType": kind, "signatures": [{"sig": signature}]}
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        entry = {
            "envelopeHash": {"algorithm": "sha256", "value": hashlib.sha256(json.dumps(envelope).encode()).hexdigest()},
            "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
            "signatures": [{"signature": signature, "verifier": text(pem)}],
        }
        body = json.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": entry}).encode()
        identifier, leaf = hashlib.sha256(spki(self.rekor)).digest(), hashlib.sha256(b"\0" + body).digest()
        promise = {"body": text(body), "integratedTime": int(NOW.timestamp()) + 60, "logID": identifier.hex(),
                   "logIndex": 0}  # fmt: skip
        canonical = json.dumps(promise, sort_keys=True, separators=(",", ":")).encode()
        note = f"log - 1\n1\n{text(leaf)}\n"
        signed_note = f"{note}\n— log {text(identifier[:4] + sign(self.rekor, note.encode()))}\n"
        logged = {
            "logIndex": "0", "logId": {"keyId": text(identifier)}, "canonicalizedBody": text(body),
            "kindVersion": {"kind": "dsse", "version": "0.0.1"}, "integratedTime": str(promise["integratedTime"]),
            "inclusionPromise": {"signedEntryTimestamp": text(sign(self.rekor, canonical))},
            "inclusionProof": {"logIndex": "0", "rootHash": text(leaf), "treeSize": "1", "hashes": [],
                               "checkpoint": {"envelope": signed_note}},
        }  # fmt: skip
        material = {"certificate": {"rawBytes": text(der(certificate))}, "tlogEntries": [logged]}
        kind = "application/vnd.dev.sigstore.bundle.v0.3+json"
        return {"mediaType": kind, "verificationMaterial": material, "dsseEnvelope": envelope}

    def trusted_root(self):
        """Return trusted_root.json."""

        def log(key):
            public = {"rawBytes": text(spki(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                      "validFor": {"start": "2026-01-01T00:00:00Z"}}  # fmt: skip
            identifier = {"keyId": text(hashlib.sha256(spki(key)).digest())}
            return {"baseUrl": "https://log.example", "hashAlgorithm": "SHA2_256", "publicKey": public,
                    "logId": identifier}  # fmt: skip

        authority = {
            "subject": {"organization": "us", "commonName": "root"}, "uri": "https://ca.example",
            "certChain": {"certificates": [{"rawBytes": text(der(self.root))}]},
            "validFor": {"start": "2026-01-01T00:00:00Z"},
        }  # fmt: skip
        return json.dumps({
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1", "tlogs": [log(self.rekor)],
            "certificateAuthorities": [authority], "ctlogs": [log(self.log)], "timestampAuthorities": [],
        })  # fmt: skip
