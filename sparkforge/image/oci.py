"""An image on disk in OCI's image layout: a folder, or a tar archive of one, as `docker save` and buildx write it.

The image may be hostile. Everything is read by digest, documents are bounded in size and number, and layers are
searched without unpacking them.
"""

import gzip
import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import BaseModel, Field
from pydantic.alias_generators import to_camel

from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import DocumentError
from sparkforge.core.tables import parse_record
from sparkforge.image.devices import OCI_MACHINES

LARGEST_DOCUMENT = 4 << 20  # bytes of an index, a manifest or a configuration: registries' limit (OCI distribution)
LARGEST_FILE = 64 << 20  # bytes of a file that is read out of a layer
MOST_LAYERS, MOST_MANIFESTS, MOST_ENTRIES = 128, 64, 1_000_000
EXPANSION, EXPANDED = 100, 1 << 30  # unpacked limit: the larger of EXPANDED bytes and EXPANSION times the packed size
UNKNOWN = "unknown"  # the platform of buildx's additions to an image, such as its attestations
TAG = "org.opencontainers.image.ref.name"
NAME = "io.containerd.image.name"
ATTACHMENT_TAG = re.compile(r"sha256-[0-9a-f]{64}\.\w+")  # cosign's tags of signatures and attestations
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
Shape = TypeVar("Shape", bound=BaseModel)
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class Descriptor(BaseModel, alias_generator=to_camel, populate_by_name=True):
    """The fields that we read of a reference to a document or a layer."""

    digest: Digest
    size: int = Field(ge=0, lt=1 << 40)
    media_type: str = ""
    artifact_type: str = ""
    platform: dict[str, Any] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Document(BaseModel):
    """The fields that we read of an index (manifests) or of a manifest (configuration and layers)."""

    manifests: list[Descriptor] = Field(default_factory=list, max_length=MOST_MANIFESTS)
    config: Descriptor | None = None
    layers: list[Descriptor] = Field(default_factory=list, max_length=MOST_LAYERS)
    annotations: dict[str, str] = Field(default_factory=dict)


class Configuration(BaseModel):
    """The fields of an image's configuration that we read."""

    architecture: str = ""
    os: str = ""
    created: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)


def document(data: bytes, origin: str) -> Document:
    """Read an index or a manifest. Raises IntegrityError."""
    return _shaped(data, origin, Document)


def require_digest(data: bytes, descriptor: Descriptor, origin: str) -> bytes:
    """Return `data` if it has a descriptor's digest and size. Raises IntegrityError."""
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if (digest, len(data)) != (descriptor.digest, descriptor.size):
        why = f"wanted {descriptor.digest} with {descriptor.size} bytes, got {digest} with {len(data)}"
        raise refused(origin, why, "integrity.hash")
    return data


def refused(origin: str, why: str, code: str = "integrity.image") -> IntegrityError:
    """Return the error for an invalid image or document."""
    return IntegrityError(f"{origin} is refused", why, "again   # first get the image again from its source", code=code)


class Layout:
    """A layout to read: the files of a folder, or the members of an archive, by their path in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = None if path.is_dir() else tarfile.open(path, "r:")  # noqa: SIM115 - closed with the process
            self.index = document(self._read("index.json"), f"{path}/index.json")
        except (OSError, tarfile.TarError, DocumentError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise refused(str(path), f"it is not an OCI image layout: {why}") from error

    def _open(self, name: str) -> IO[bytes]:
        if self._archive is None:
            path = self.path / name
            if not path.is_file() or path.is_symlink():
                raise DocumentError(str(path), f"it has no file {name}")
            return path.open("rb")
        try:
            file = self._archive.extractfile(name)
        except KeyError:
            file = None
        if file is None:
            raise DocumentError(str(self.path), f"it has no file {name}")
        return file

    def _read(self, name: str, largest: int = LARGEST_DOCUMENT) -> bytes:
        with self._open(name) as file:
            data = file.read(largest + 1)
        if len(data) > largest:
            raise DocumentError(str(self.path), f"{name} has more than {largest:,} bytes")
        return data

    def blob(self, descriptor: Descriptor, largest: int = LARGEST_DOCUMENT) -> bytes:
        """Return a small blob after comparing its digest and size. Raises IntegrityError."""
        origin = f"{self.path}: {descriptor.digest[:19]}"
        try:
            return require_digest(self._read(_blob_path(descriptor.digest), largest), descriptor, origin)
        except (OSError, tarfile.TarError, DocumentError) as error:
            raise refused(origin, str(error)) from error

    def open_layer(self, descriptor: Descriptor) -> IO[bytes]:
        """Open a layer after comparing its digest and size. Raises IntegrityError."""
        origin = f"{self.path}: {descriptor.digest[:19]}"
        try:
            file = self._open(_blob_path(descriptor.digest))
            digest, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()  # type: ignore[arg-type]
        except (OSError, tarfile.TarError, DocumentError) as error:
            raise refused(origin, str(error)) from error
        if (f"sha256:{digest}", size) != (descriptor.digest, descriptor.size):
            raise refused(origin, f"its sha256 is {digest}, of {size} bytes", "integrity.hash")
        file.seek(0)
        return file


class LayoutImage:
    """The image in a layout for one processor; `attrs`, `id`, `short_id` and `tags` are as in the Docker SDK."""

    def __init__(self, path: Path) -> None:
        self.layout = Layout(path)
        top = [(entry, entry) for entry in self.layout.index.manifests if not _is_beside(entry)]
        images = list(self._images(top))
        machine = os.uname().machine
        fitting = [entry for entry in images if OCI_MACHINES.get(entry[1].platform.get("architecture", "")) == machine]
        if len(images) != 1 and len(fitting) != 1:
            raise refused(str(path), f"it holds {len(images)} images, {len(fitting)} of them for {machine}")
        self.top, self.descriptor = fitting[0] if len(images) > 1 else images[0]
        self.manifest = document(self.layout.blob(self.descriptor), str(path))
        if self.manifest.config is None:
            raise refused(str(path), "its manifest names no configuration")
        self.configuration = _shaped(self.layout.blob(self.manifest.config), str(path), Configuration)

    def _images(self, entries: list[tuple[Descriptor, Descriptor]]) -> Iterator[tuple[Descriptor, Descriptor]]:
        """Yield (entry of index.json, manifest of an image); indexes may be nested one level deep."""
        for top, entry in entries:
            if not entry.media_type.endswith(("index.v1+json", "manifest.list.v2+json")):
                yield top, entry
            elif top is not entry:
                raise refused(str(self.layout.path), "its indexes are nested more than one level deep")
            else:
                inner = document(self.layout.blob(entry), str(self.layout.path)).manifests
                yield from self._images([(top, below) for below in inner if not _is_beside(below)])

    @property
    def id(self) -> str:
        """The digest of the image's configuration, which is the image id in most engines."""
        return str(self.manifest.config and self.manifest.config.digest)

    @property
    def short_id(self) -> str:
        """The layout's path, for messages."""
        return str(self.layout.path)

    @property
    def tags(self) -> list[str]:
        """The image's name, if the layout has one."""
        return [self.top.annotations[key] for key in (NAME, TAG) if key in self.top.annotations][:1]

    @property
    def digests(self) -> list[str]:
        """The digests that identify the image: the one in index.json, the manifest's and the configuration's."""
        return list(dict.fromkeys([self.top.digest, self.descriptor.digest, self.id]))

    @cached_property
    def attrs(self) -> Mapping[str, Any]:
        """The fields of `docker inspect` that we read."""
        size = sum(layer.size for layer in self.manifest.layers)
        settings = self.configuration
        return {
            "Id": self.id, "RepoTags": self.tags, "RepoDigests": [], "Os": settings.os, "Size": size,
            "Architecture": settings.architecture, "Created": settings.created, "Config": settings.config,
        }  # fmt: skip

    def read(self, path: str) -> bytes:
        """Return a file of the image, by its absolute path. Raises IntegrityError, also for an unsafe layer."""
        name = path.strip("/")
        for layer in reversed(self.manifest.layers):
            with self.layout.open_layer(layer) as file:
                try:
                    content, hidden = _search(file, layer, name)
                except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
                    raise refused(f"{self.short_id}: layer {layer.digest[:19]}", str(error)) from error
            if content is not None:
                return content
            if hidden:
                break
        raise refused(self.short_id, f"it has no file {path[:200]}")


def _search(file: IO[bytes], layer: Descriptor, name: str) -> tuple[bytes | None, bool]:
    """Return a file of one layer (None if missing), and whether the layer hides the file in the layers below.

    Raises ValueError for an entry that points outside the image, and for a layer that expands too far.
    """
    parents = ["/".join(name.split("/")[:depth]) for depth in range(1, name.count("/") + 1)]
    content, hidden = None, False
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    stream: Any = _Bounded(gzip.GzipFile(fileobj=file) if zipped else file, max(EXPANDED, EXPANSION * layer.size))
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for number, entry in enumerate(tar):
            parts = entry.name.removeprefix("./").rstrip("/").split("/")
            if entry.name.startswith("/") or ".." in parts or number >= MOST_ENTRIES:
                raise ValueError(f"its entry {entry.name[:100]!r} points outside the image, or there are too many")
            path, folder, last = "/".join(parts), "/".join(parts[:-1]), parts[-1]
            if path == name or (path in parents and not entry.isdir()):
                if path != name or not entry.isreg() or entry.size > LARGEST_FILE:
                    raise ValueError(f"its entry {path[:100]!r} is a link or a device, or is too large")
                member = tar.extractfile(entry)
                content = member.read() if member else b""
            elif last == OPAQUE and folder in parents:
                hidden = True
            elif last.startswith(WHITEOUT):
                gone = "/".join([*parts[:-1], last.removeprefix(WHITEOUT)])
                hidden = hidden or gone == name or gone in parents
    return content, hidden


class _Bounded:
    """A file that raises an error after `left` bytes were read."""

    def __init__(self, file: Any, left: int) -> None:
        self.file, self.left = file, left

    def read(self, size: int) -> bytes:
        data: bytes = self.file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError("it expands to more than a layer may")
        return data


def _is_beside(entry: Descriptor) -> bool:
    """Tell whether a manifest is an addition to an image: signatures, or attestations of buildx."""
    tag = ATTACHMENT_TAG.fullmatch(entry.annotations.get(TAG, ""))
    return tag is not None or entry.platform.get("architecture") == UNKNOWN


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _shaped(data: bytes, origin: str, shape: type[Shape]) -> Shape:
    try:
        return parse_record(data, origin, shape)
    except DocumentError as error:
        raise refused(origin, str(error)) from error
