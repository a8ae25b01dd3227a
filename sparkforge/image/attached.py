"""Attachments of an image in cosign's format: signatures and signed statements, each a layer of a small image.

The small image has the tag `sha256-DIGEST.sig` or `.att`, in the image's repository or in an OCI layout in a folder.
"""

import base64
import hashlib
import ipaddress
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urljoin, urlsplit

import docker
import httpx
from docker.errors import DockerException

from sparkforge.core import http
from sparkforge.core.errors import EngineError
from sparkforge.core.files import parse_json, write_atomic, write_json
from sparkforge.image import oci
from sparkforge.image.oci import LARGEST_DOCUMENT, LARGEST_FILE, TAG, Descriptor

OCI = "application/vnd.oci.image."
MANIFEST, CONFIGURATION, INDEX = (f"{OCI}{name}.v1+json" for name in ("manifest", "config", "index"))
KINDS = {  # the artifact types in a layout: cosign's, and our own
    "sig": "dev.cosignproject.cosign/sigs", "att": "dev.cosignproject.cosign/atts", "pack": "org.sparkforge.pack",
}  # fmt: skip
LARGEST_PACK = 1 << 30  # bytes; eleven modules of FlashInfer take less than a tenth of this
SECONDS = 30
MOST_REFERRERS = 16
PORT = re.compile(r"[^/]*[.:][^/]*|localhost")  # the first part of a name that is a registry's host
HUB = "registry-1.docker.io"
PARAMETER = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Attached:
    """One signature or one signed statement: its bytes, their media type, and cosign's annotations."""

    data: bytes
    kind: str
    annotations: dict[str, str] = field(default_factory=dict)


class Place(Protocol):
    """A place that stores attachments."""

    def read(self, tag: str) -> list[Attached]:
        """Return the attachments under a tag; empty if there are none. Raises IntegrityError, EngineError."""

    def write(self, tag: str, attached: Sequence[Attached]) -> None:
        """Replace the attachments under a tag. Raises EngineError, StorageError."""


def tag_of(digest: str, suffix: str) -> str:
    """Return the tag of a digest's attachments; `suffix` is a key of KINDS."""
    return f"{digest.replace(':', '-')}.{suffix}"


def _largest(tag: str) -> int:
    return LARGEST_PACK if tag.endswith(".pack") else LARGEST_FILE


def _described(data: bytes, kind: str, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    described = {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}
    return {**described, "annotations": annotations} if annotations else described


def _image(attached: Sequence[Attached]) -> tuple[bytes, bytes]:
    layers = [_described(entry.data, entry.kind, entry.annotations) for entry in attached]
    rootfs = {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]}
    configuration = json.dumps({"architecture": "", "os": "", "config": {}, "rootfs": rootfs}).encode()
    document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": _described(configuration, CONFIGURATION)}
    return configuration, json.dumps({**document, "layers": layers}, sort_keys=True).encode()


class Folder:
    """An OCI layout in a folder, which may also hold the image itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def tags(self) -> list[str]:
        """Return every tag; empty without a layout."""
        manifests = oci.Layout(self.path).index.manifests if (self.path / "index.json").exists() else []
        return [entry.annotations[TAG] for entry in manifests if TAG in entry.annotations]

    def read(self, tag: str) -> list[Attached]:
        """Return the attachments under a tag. Raises IntegrityError."""
        if not (self.path / "index.json").exists():
            return []
        layout, most = oci.Layout(self.path), _largest(tag)
        for entry in layout.index.manifests:
            if entry.annotations.get(TAG) == tag:
                layers = oci.document(layout.blob(entry), f"{self.path}: {tag[:80]}").layers
                return [Attached(layout.blob(row, most), row.media_type, row.annotations) for row in layers]
        return []

    def write(self, tag: str, attached: Sequence[Attached]) -> None:
        """Replace the attachments under a tag: blobs first, then the index that names them."""
        configuration, manifest = _image(attached)
        for data in (configuration, manifest, *(entry.data for entry in attached)):
            write_atomic(self.path / "blobs/sha256" / hashlib.sha256(data).hexdigest(), data)
        write_atomic(self.path / "oci-layout", '{"imageLayoutVersion": "1.0.0"}')
        index: dict[str, Any] = {"schemaVersion": 2, "mediaType": INDEX, "manifests": []}
        if (self.path / "index.json").exists():
            oci.Layout(self.path)  # raises unless the folder is a layout
            index = json.loads((self.path / "index.json").read_bytes())
        others = [entry for entry in index.get("manifests", []) if (entry.get("annotations") or {}).get(TAG) != tag]
        entry = _described(manifest, MANIFEST, {TAG: tag, "kind": KINDS[tag.rpartition(".")[2]]})
        write_json(self.path / "index.json", {**index, "manifests": [*others, entry]})


class Repository:
    """A registry's repository, by the name that docker uses, with docker's logins; plain HTTP on the loopback only."""

    def __init__(self, name: str) -> None:
        host, slash, path = name.partition("/")
        if not (slash and PORT.fullmatch(host)):
            host, path = "docker.io", name if slash else f"library/{name}"
        self.name, self.host = name, host
        actual = HUB if host in ("docker.io", "index.docker.io") else host
        local = actual.partition(":")[0] == "localhost"
        with suppress(ValueError):
            local = local or ipaddress.ip_address(actual.rpartition(":")[0] or actual).is_loopback
        self.url = f"http{'' if local else 's'}://{actual}/v2/{path}/"
        certificate = Path("/etc/docker/certs.d", host, "ca.crt")
        verify = str(certificate) if certificate.is_file() else True
        self._client = httpx.Client(timeout=SECONDS, follow_redirects=False, verify=verify)
        self._authorization = ""

    def __str__(self) -> str:
        return self.name

    def read(self, tag: str) -> list[Attached]:
        """Return the attachments under a tag. Raises IntegrityError, EngineError."""
        answer = self._ask("GET", f"manifests/{tag}", headers={"Accept": MANIFEST}, missing=True)
        layers = oci.document(answer.content, f"{self.name}:{tag[:80]}").layers if answer else []
        return [Attached(self._blob(layer, _largest(tag)), layer.media_type, layer.annotations) for layer in layers]

    def read_referrers(self, digest: str, kind: str) -> list[Attached]:
        """Return a digest's referrers whose media type begins with `kind`, by OCI's API or its fallback tag."""
        headers = {"Accept": INDEX}
        for path in (f"referrers/{digest}", f"manifests/{digest.replace(':', '-')}"):
            if answer := self._ask("GET", path, headers=headers, missing=True):
                referrers = oci.document(answer.content, f"{self.name}: referrers of {digest[:19]}").manifests
                names = [entry.digest for entry in referrers if entry.artifact_type.startswith(kind)][:MOST_REFERRERS]
                return [entry for name in names for entry in self.read(name)]
        return []

    def _blob(self, descriptor: Descriptor, largest: int) -> bytes:
        answer = self._ask("GET", f"blobs/{descriptor.digest}", largest=min(descriptor.size, largest))
        data = answer.content if answer else b""
        return oci.require_digest(data, descriptor, f"{self.name}: {descriptor.digest[:19]}")

    def write(self, tag: str, attached: Sequence[Attached]) -> None:
        """Replace the attachments under a tag: blobs first, then the manifest that names them."""
        configuration, manifest = _image(attached)
        for data in (configuration, *(entry.data for entry in attached)):
            started = self._ask("POST", "blobs/uploads/")
            place = started.headers.get("location", "") if started else ""
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            url = httpx.URL(urljoin(self.url, place)).copy_merge_params({"digest": digest})
            self._ask("PUT", str(url), headers={"Content-Type": "application/octet-stream"}, content=data)
        self._ask("PUT", f"manifests/{tag}", headers={"Content-Type": MANIFEST}, content=manifest)

    def _ask(
        self, method: str, path: str, *, missing: bool = False, largest: int = LARGEST_DOCUMENT, **options: Any
    ) -> httpx.Response | None:
        """Return the registry's response; None if nothing is there and `missing` allows that.

        Credentials go to the registry's own host only, and a redirect is followed without them. Raises EngineError.
        """
        url = urljoin(self.url, path)
        try:
            for _ in range(4):
                own = urlsplit(url).netloc == urlsplit(self.url).netloc
                headers = dict(options.get("headers", {}))
                if own and self._authorization:
                    headers["Authorization"] = self._authorization
                sent = {**options, "headers": headers}
                answer = http.request(self._client, method, url, seconds=math.inf, limit=largest, **sent)
                if answer.status_code == 401 and own and not self._authorization:
                    self._authorization = self._login(answer.headers.get("www-authenticate", ""))
                elif answer.is_redirect and method == "GET":
                    url = urljoin(url, answer.headers["location"])
                    if not url.startswith("https://") and self.url.startswith("https://"):
                        raise self._failed(f"it redirects to {url[:200]}, which is not encrypted")
                elif answer.status_code in (404, 405) and missing:
                    return None
                elif answer.is_success:
                    return answer
                else:
                    raise self._failed(f"it answers {answer.status_code} to {method} {urlsplit(url).path[:200]}")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise self._failed(str(error) or type(error).__name__) from error
        raise self._failed("it redirects in circles")

    def _login(self, challenge: str) -> str:
        """Return the header for a registry's challenge, from docker's login: Basic, or a token obtained with it."""
        key = "https://index.docker.io/v1/" if self.host.endswith("docker.io") else self.host
        try:
            login = docker.auth.load_config().resolve_authconfig(key) or {}
        except (DockerException, AttributeError, TypeError, ValueError) as error:  # the SDK checks no types
            raise self._failed(f"docker's own configuration cannot be read: {str(error)[:200]}") from error
        name, password = login.get("username") or login.get("Username"), login.get("password") or login.get("Password")
        basic = f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}" if name else ""
        if not challenge.lower().startswith("bearer "):
            if not basic:
                raise self._failed("it requires a login")
            return basic
        values = dict(PARAMETER.findall(challenge))
        realm = values.pop("realm", "")
        if not realm.startswith("https://") and self.url.startswith("https://"):
            raise self._failed(f"it requires the login at {realm[:100]}, which is not encrypted")
        headers = {"Authorization": basic} if basic else {}
        options: dict[str, Any] = {"params": values, "headers": headers, "limit": LARGEST_DOCUMENT}
        answer = http.request(self._client, "GET", realm, seconds=SECONDS, **options)
        token = parse_json(answer.content, realm[:100]) if answer.is_success else {}
        if not isinstance(token, dict) or not (word := token.get("token") or token.get("access_token")):
            raise self._failed("it refuses the login")
        return f"Bearer {word}"

    def _failed(self, why: str) -> EngineError:
        fix = f"docker login {self.host}   # then the same command again"
        return EngineError(f"cannot use the repository {self.name}", why, fix, code="engine.registry")
