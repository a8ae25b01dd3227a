"""Inspection of an image: labels, layers and digests from the engine, the manifest from inside the image."""

import hashlib
import io
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import docker
from pydantic import BaseModel, Field

from sparkforge import pins
from sparkforge.core import tables
from sparkforge.core.console import echo, say
from sparkforge.core.docker import PRUNE, require_plugin
from sparkforge.core.errors import EngineError, IntegrityError, StorageError
from sparkforge.core.files import DocumentError
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine, licences, oci
from sparkforge.image.devices import CPU, build_command

# The labels with the paths of the manifest and the audit in an image; the Dockerfile sets both.
MANIFEST_LABEL = "org.sparkforge.manifest"
AUDIT_LABEL = "org.sparkforge.audit"
SBOM_LABEL = "org.sparkforge.sbom"
SOURCE_LABEL = "org.sparkforge.source"  # the file with revision and digest of the build's context; not in older images
LICENCES = f"/opt/venv/{licences.REPORT}"
# Bytes that a build takes under the engine's folder for image and cache, with a margin: the embedded image has 5 GB of
# files, the Spark's 8 GB (docs/concepts/images.md).
CPU_BYTES, CUDA_BYTES = 15_000_000_000, 35_000_000_000
LARGEST_FILE = 64 << 20  # bytes of a manifest, audit or bill of materials in an image; our largest audit is 2 MB
Expected = Callable[[str], Mapping[str, Mapping[str, str]]]
# The parts of the manifest that must match this checkout, with their names.
COMPARED = {"patches": "patch queue", "lock": "locked set"}


class Manifest(BaseModel):
    """The fields of an image's manifest that we read; the others are only printed."""

    stack: str | None = None
    patches: dict[str, str] | None = None
    lock: dict[str, str] | None = None
    packages: dict[str, str] | None = None
    kernels: dict[str, Any] | None = None
    audit: dict[str, str] | None = None
    sbom: dict[str, str] | None = None


class Bill(BaseModel):
    """The fields of an image's bill of materials that we read."""

    bomFormat: Literal["CycloneDX"]  # noqa: N815 - CycloneDX's name
    specVersion: Literal["1.6"]  # noqa: N815
    components: list[dict[str, Any]] = Field(min_length=1)


class Source(BaseModel):
    """The fields of an image's source.json that we read."""

    revision: str | None = None
    origin: str | None = Field(default=None, alias="from")
    tree: str | None = None


class AuditedCode(BaseModel):
    """The fields of a file or a violation in an audit that we read."""

    path: str = ""
    rule: str = ""
    file: str = ""


class AuditCode(BaseModel):
    """The part of an audit on machine code."""

    violations: list[AuditedCode] | None = None
    files: list[AuditedCode] | None = None


class Audit(BaseModel):
    """The fields of an image's audit that we read: the number of files that were hashed, and the machine code."""

    files: int
    code: AuditCode | None = None


def labels(attrs: Mapping[str, Any]) -> dict[str, str]:
    """Return an image's labels; none if its configuration is malformed."""
    config = attrs.get("Config")
    entries = config.get("Labels") if isinstance(config, dict) else None
    return {name: str(value) for name, value in entries.items()} if isinstance(entries, dict) else {}


def ready_to_build(stack: str) -> list[str | Path]:
    """Return the arguments of `docker` for a Compose build of a stack's image, once the machine can build it.

    Raises an engine's error, EngineError without buildx or Compose, StorageError.
    """
    for plugin in ("buildx", "compose"):
        require_plugin(plugin)
    with engine.connected() as client:
        root = Path(engine.read(client).root)
        images = client.images.list(name=docker_compose.resolve(docker_compose.variables(stack)).image)
    # No check if the engine is remote or in a virtual machine (its folder is not visible), or has a build cache.
    needed = CPU_BYTES if pins.load().image(stack).device == CPU else CUDA_BYTES
    if root.is_dir() and not images and (free := shutil.disk_usage(root).free) < needed:
        why = f"{root} has {free / 1e9:.1f} GB free and a first build takes {needed / 1e9:.0f} GB"
        raise StorageError("not enough room to build the image", why, PRUNE, code="storage.full")
    return docker_compose.compose("--progress", "plain", "build")


def made_from(image: Any, stack: str) -> dict[str, Any]:
    """Return an image's source.json, which names its commit and context; empty if the image has none."""
    return _parsed(_read(image, SOURCE_LABEL, stack), Source) if SOURCE_LABEL in labels(image.attrs) else {}


@contextmanager
def opened(stack: str, name: str) -> Iterator[Any]:
    """Open a stack's image, or the image `name`, in the engine; if `name` is a path, the image in that OCI layout.

    Raises EngineError, IntegrityError.
    """
    if name.startswith("/"):
        yield oci.LayoutImage(Path(name))
        return
    with engine.connected() as client:
        name = name or docker_compose.resolve(docker_compose.variables(stack)).image
        yield engine.image(client, name, build_command(stack))


def bill(image: Any, stack: str) -> bytes:
    """Return an image's bill of materials, checked against the hash in its manifest. Raises IntegrityError."""
    text = _listed(image, stack, _path(image, SBOM_LABEL, stack), "bill of materials")
    _parsed(text, Bill)
    return text


def licence_report(image: Any, stack: str) -> bytes:
    """Return the licences of an image's packages, with their texts. Raises IntegrityError, EngineError."""
    return _listed(image, stack, LICENCES, "licence report")


def _listed(image: Any, stack: str, path: str, what: str) -> bytes:
    """Return a file of an image after comparing its hash with the image's manifest. Raises IntegrityError."""
    document, text = manifest(image, stack), _file(image, path, stack)
    if hashlib.sha256(text).hexdigest() not in dict(document.get("sbom") or {}).values():
        why = "its sha256 is not the one in the image's manifest"
        raise IntegrityError(f"the {what} is refused", why, build_command(stack), code="integrity.image")
    return text


def verify(stack: str, name: str, expected: Expected) -> None:
    """Describe a stack's image, or the image `name`, and compare its claims with this checkout.

    Manifest, audit and labels are claims of the image's builder, which this function can refute but not prove.
    `expected` takes the image's processor (amd64, arm64) and returns the hashes of this checkout: a key of
    COMPARED → name of a queue or a lock → its sha256. Raises IntegrityError with every difference.
    """
    with opened(stack, name) as image:
        echo("\n".join(lines(image.attrs)))
        document = manifest(image, stack)
        if source := made_from(image, stack):
            revision = source.get("revision")
            commit = f"commit {revision} by {source.get('from')}" if revision else "no commit: the context had no git"
            echo(f"  source     {commit}; context sha256 {source.get('tree')}")
        for key, value in sorted(document.items()):
            text = str(value)
            if isinstance(value, dict):
                hashes = ", ".join(f"{name} {_short(str(digest))}" for name, digest in value.items()) or "none"
                text = hashes if len(value) <= 10 else f"{len(value)} entries"
            echo(f"  {key:<10} {text}")
        document, audit = require_ours(image, stack, expected)
    queues, kernels = ", ".join(sorted(document["patches"] or {})), len(document.get("kernels") or {})
    claims = f"{queues} and every lock as in this checkout, {kernels} compiled modules of FlashInfer"
    audited = f"{audit['files']} files hashed, {len(_code(audit))} read for machine code"
    proof = "Nothing contradicts it; only an image built here is proven"
    say(f"{image.short_id} claims, by its own manifest: {claims}; audited in the build: {audited}. {proof}")


def require_ours(image: Any, stack: str, expected: Expected) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an image's manifest and audit. Raises IntegrityError with every difference from this checkout."""
    text, report = (_read(image, label, stack) for label in (MANIFEST_LABEL, AUDIT_LABEL))
    document = _parsed(text, Manifest)
    wanted = expected(str(image.attrs.get("Architecture", "")))
    if problems := [*differences(document, wanted), *unaudited(document, report)]:
        failure = f"{image.tags[0] if image.tags else image.short_id} was not made from this checkout"
        raise IntegrityError(failure, "; ".join(problems), build_command(stack), code="integrity.image")
    return document, _parsed(report, Audit)


def manifest(image: Any, stack: str = "") -> dict[str, Any]:
    """Return the manifest in an image. Raises IntegrityError if this project did not build it, EngineError."""
    stack = stack or labels(image.attrs).get("org.sparkforge.stack", "")
    return _parsed(_read(image, MANIFEST_LABEL, stack), Manifest)


def differences(manifest: Mapping[str, Any], expected: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the differences of an image's manifest from the expected one, in words."""
    lines = []
    for key, label in COMPARED.items():
        actual, required = dict(manifest.get(key) or {}), expected[key]
        for name in sorted({*actual, *required}):
            ours, theirs = required.get(name), actual.get(name)
            if ours != theirs:
                lines.append(f"{label} {name}: the image has {_short(theirs)}, the checkout {_short(ours)}")
    return lines


def lines(attrs: Mapping[str, Any]) -> list[str]:
    """Return the engine's facts about an image as text."""
    config = attrs.get("Config")
    user = config.get("User") if isinstance(config, dict) else ""
    return [
        f"{', '.join(attrs.get('RepoTags') or ['no tag'])} · {attrs['Id']}",
        f"  platform   {engine.platform_of(attrs)} · user {user or 'root'} · made {attrs.get('Created')}",
        f"  size       {int(attrs.get('Size', 0)) / 1e9:.2f} GB in the engine's storage",
        f"  digests    {', '.join(attrs.get('RepoDigests') or ['none: not pushed, not pulled'])}",
    ]


def unaudited(manifest: Mapping[str, Any], report: bytes) -> list[str]:
    """Return the audit's faults: another hash than in the manifest, a violation, or a module that it does not cover."""
    if hashlib.sha256(report).hexdigest() not in dict(manifest.get("audit") or {}).values():
        return ["its audit report is not the one that its manifest names"]
    audit = _parsed(report, Audit)
    violations = (audit.get("code") or {}).get("violations") or []
    read = {Path(file.get("path", "")).stem for file in _code(audit)}
    missing = sorted(set(manifest.get("kernels") or {}) - read)
    return [
        *(f"its audit found {violation.get('rule')}: {violation.get('file')}" for violation in violations[:3]),
        *(f"{name} was not audited" for name in missing[:3]),
    ]


def _code(audit: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the audit's entries for files with machine code; a CPU image has none."""
    return (audit.get("code") or {}).get("files") or []


def _parsed(data: bytes, shape: type[BaseModel]) -> dict[str, Any]:
    try:
        return tables.parse_object(data, f"the image's {shape.__name__.lower()}", shape)
    except DocumentError as error:
        fix = "./inv build --engine docker   # or pull another image"
        failure, why = "cannot read the image's own manifest", f"its {shape.__name__.lower()}: {error.why}"
        raise EngineError(failure, why, fix, code="engine.failed") from error


def _read(image: Any, label: str, stack: str) -> bytes:
    return _file(image, _path(image, label, stack), stack)


def _path(image: Any, label: str, stack: str) -> str:
    """Return the path of the file that a label names. Raises IntegrityError without the label."""
    if path := labels(image.attrs).get(label, ""):
        return path
    failure, why = f"{image.short_id} is not an image of this Sparkforge", f"it has no label {label}"
    raise IntegrityError(failure, why, build_command(stack), code="integrity.image")


def _file(image: Any, path: str, stack: str) -> bytes:
    if isinstance(image, oci.LayoutImage):
        return image.read(path)
    api = image.client.api
    # The containerd store unpacks an image for another platform only now: 63 s for a Spark's on x86-64.
    api.timeout = engine.UNPACK_SECONDS
    container = api.create_container(image.id, command=["true"], entrypoint=["true"])["Id"]
    try:
        stream, _ = api.get_archive(container, path)
        with tarfile.open(fileobj=io.BytesIO(_joined(stream))) as archive:
            member = archive.extractfile(archive.getmembers()[0])
            return member.read() if member else b""
    except (docker.errors.NotFound, tarfile.TarError, LookupError, ValueError) as error:
        failure = f"cannot read {path[:200]} of the image"
        raise EngineError(failure, str(error), build_command(stack), code="engine.failed") from error
    finally:
        api.remove_container(container, v=True, force=True)


def _joined(stream: Iterable[bytes]) -> bytes:
    data = bytearray()
    for chunk in stream:
        data += chunk
        if len(data) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
    return bytes(data)


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"
