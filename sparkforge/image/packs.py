"""Kernel packs: a stack's compiled and audited modules as one artifact, used instead of compiling them.

A pack is a deterministic tar in a bundle's form (`sources.bundle`), with the same checks when it is read: index.json
(the key, its inputs, and every other member's sha256 and size), audit.json (a machine that uses a pack audits it
again), sbom.json (CycloneDX 1.6), and libraries/NAME.so.

A pack is stored as a .tar with FILE.sig beside it, in an OCI layout in a folder, or in a registry's repository. In a
layout or repository it is a small image, tagged kernels-KEY.pack, with the tar and any signed statement as layers.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sparkforge import pins
from sparkforge.compile.flashinfer import build as kernels
from sparkforge.compile.flashinfer.build import PACK, STAGE, KernelOrder, KernelRequest, Take
from sparkforge.core import manifest, paths
from sparkforge.core.console import say
from sparkforge.core.errors import IntegrityError, UsageError
from sparkforge.core.files import DocumentError, parse_json, read_bytes, read_json, sha256_file, write_atomic
from sparkforge.core.tables import parse_record
from sparkforge.image import provenance, sbom, signing, trust
from sparkforge.image.attached import LARGEST_PACK, Attached, Folder, Place, Repository
from sparkforge.image.devices import CUDA
from sparkforge.sources import bundle, offline
from sparkforge.sources.bundle import BundleMember

VARIABLE = "SPARKFORGE_PACKS"  # the default place of packs for --packs, and for the build of an image
TAR = "application/vnd.oci.image.layer.v1.tar"
MOUNTED = "/mnt/packs"  # in the build of an image (Dockerfile)
FIX = "without --packs   # compiles; or get the pack again from its source"


class Index(BaseModel):
    """The fields of a pack's index.json that we read; `bundle` reads its members."""

    class Facts(BaseModel):
        """Facts of the build."""

        units: int
        modules: dict[str, int]

    key: str
    inputs: dict[str, str]
    facts: Facts


@dataclass(frozen=True)
class Archive:
    """A pack in a file; its index says which modules it has."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def read(self, _tag: str) -> list[Attached]:
        """Return the pack and its signature. Raises IntegrityError for a file that is too large."""
        if not self.path.is_file():
            return []
        if self.path.stat().st_size > LARGEST_PACK:
            raise _refused(str(self.path), f"it has more than {LARGEST_PACK:,} bytes", "integrity.archive")
        return [Attached(read_bytes(self.path), TAR), *trust.signatures(self.path)]

    def write(self, _tag: str, attached: Sequence[Attached]) -> None:
        """Write the pack and its signature."""
        for path, entry in zip((self.path, signing.signature_path(self.path)), attached, strict=False):
            write_atomic(path, entry.data)


def place(name: str) -> Place:
    """Return the place of packs that a user names: a path (/…, ./…, ~/…, or FILE.tar), else a repository."""
    path = paths.typed(name).absolute()
    if name.endswith(".tar"):
        return Archive(path)
    return Folder(path) if name.startswith(("/", ".", "~")) else Repository(name)


def own_folders() -> list[Path]:
    """Return the folders of packs that are always searched: the checkout's, and the one of the bundle in use."""
    folders = [paths.state() / bundle.PACKS, *([folder / bundle.PACKS] if (folder := offline.folder()) else [])]
    return [folder for folder in folders if folder.is_dir()]


def build_context(name: str) -> tuple[str, Path | None]:
    """Return the name of the place `name` inside the image's build, and the folder to mount there, if any."""
    name = name or os.environ.get(VARIABLE, "")
    origin = place(name) if name else next(map(Folder, own_folders()), None)
    if isinstance(origin, Archive):  # copied, because Docker sends the whole folder to the builder
        folder = paths.state() / "build" / bundle.PACKS
        manifest.remove(folder)
        Archive(folder / "pack.tar").write("", origin.read(""))
        return f"{MOUNTED}/pack.tar", folder
    return ("", origin.path) if isinstance(origin, Folder) else (name, None)


def key_of(inputs: Mapping[str, str]) -> str:
    """Return the key of a pack, a hash of all inputs of its modules."""
    return hashlib.sha256(json.dumps(dict(inputs), sort_keys=True).encode()).hexdigest()


def taking(name: str) -> Take:
    """Return a function that takes modules from the place `name`, this checkout's packs or the bundle's.

    The function returns None if no place has the pack. It verifies a pack's hashes, its key, and the signature that
    trust.toml demands. Raises IntegrityError for a pack that is refused, EngineError for a registry.
    """
    name = name or os.environ.get(VARIABLE, "")
    places: list[Place] = [*([place(name)] if name else []), *map(Folder, own_folders())]

    def take(order: KernelOrder, libraries: Mapping[str, Path]) -> Mapping[str, Any] | None:
        key = key_of(order.identity)
        for origin in places:
            if layers := origin.read(f"{STAGE}-{key}.pack"):
                break
        else:
            if places:
                say(f"no pack {key[:12]} for these modules in {', '.join(map(str, places))}: compiling them")
            return None
        what = f"the kernel pack of {origin}"
        signer = trust.require_signed(what, hashlib.sha256(layers[0].data).hexdigest(), layers[1:])
        with tempfile.TemporaryDirectory(dir=order.output, prefix=".pack-") as scratch:
            file, content = Path(scratch, "pack.tar"), Path(scratch, "content")
            file.write_bytes(layers[0].data)
            content.mkdir()
            try:
                names = bundle.unpack_members(file, content)
                index = parse_record((content / offline.INDEX).read_bytes(), offline.INDEX, Index)
            except (IntegrityError, DocumentError) as error:
                code = error.code if isinstance(error, IntegrityError) else "integrity.archive"
                raise _refused(what, error.why, code) from error
            wanted = {f"libraries/{name}.so": library for name, library in libraries.items()}
            if differing := sorted({*index.inputs.items()} ^ {*order.identity.items()}):
                why = f"it was made with another {', '.join(dict.fromkeys(name[:40] for name, _ in differing))}"
                raise _refused(what, why, "integrity.image")
            if index.key != key or {*names} != {*wanted, "audit.json", "sbom.json"}:
                raise _refused(what, "its key or its members do not match these modules", "integrity.image")
            for member, library in wanted.items():
                shutil.move(content / member, library)
        say(f"{len(libraries)} modules of {origin}, pack {key[:12]}: {f'signed by {signer}' if signer else 'unsigned'}")
        return {PACK: key, **index.facts.model_dump()}

    return take


def publish(request: KernelRequest, name: str, key_file: Path | None) -> str:
    """Store the modules of a request in the place `name`, signed by a key; return the pack's sha256.

    The same modules give the same bytes. Raises the errors of `kernels.prepare`, and EngineError, StorageError.
    """
    order = kernels.prepare(request)
    record = manifest.load(order.variables_file)
    if record is None:
        raise _refused(f"the folder {order.output}", "nothing was built in it", "integrity.image")
    libraries = {Path(path).stem: order.output / path for path in record.outputs}
    audit = read_json(order.output / f"audit-{order.set_name}.json")
    audit = {name: value for name, value in audit.items() if name not in ("seconds", "mb_per_second")}
    for entry, field in [(file, "path") for file in audit["files"]] + [(row, "file") for row in audit["coverage"]]:
        entry[field] = Path(entry[field]).name
    table, inputs = pins.load(), order.identity
    about = {
        "stack": request.stack, "key": key_of(inputs), "inputs": inputs,
        "facts": {name: record.facts[name] for name in ("units", "modules")},
    }  # fmt: skip
    image: dict[str, Any] = {
        "stack": request.stack, "machine": inputs["machine"], "python": Path(order.environment.include).name,
        "lock": {}, "patches": {str(table.component(request.stack, "flashinfer").patches): order.environment.queue},
        "key": about["key"], "device": CUDA, "kernels": {name: sha256_file(path) for name, path in libraries.items()},
    }  # fmt: skip
    bill = sbom.make(order.environment.site_packages, image, audit, table, only=order.environment.versions)
    members = [
        BundleMember.of("audit.json", (json.dumps(audit, indent=1, sort_keys=True) + "\n").encode()),
        *(BundleMember.of(f"libraries/{path.name}", path) for path in sorted(libraries.values())),
        BundleMember.of("sbom.json", bill.encode()),
    ]
    with tempfile.TemporaryDirectory(dir=order.output, prefix=".pack-") as scratch:
        file = Path(scratch, "pack.tar")
        bundle.write(file, members, (), about)
        digest, layers = sha256_file(file), [Attached(file.read_bytes(), TAR)]
    if key_file:
        subject = [(f"{STAGE}-{about['key']}", f"sha256:{digest}")]
        statement = provenance.statement(subject, provenance.CYCLONEDX, parse_json(bill, "the bill of materials"))
        layers.append(signing.signed(statement, signing.private_key(key_file)))
    target = place(name)
    target.write(f"{STAGE}-{about['key']}.pack", layers)
    say(f"{target}: pack {str(about['key'])[:12]}, {len(libraries)} modules, sha256 {digest}"
        f"{'' if key_file else '; unsigned'}")  # fmt: skip
    return digest


def copy(folder: Path, repository: str) -> None:
    """Send the packs of a folder unchanged to a registry's repository. Raises UsageError, EngineError."""
    origin, target = Folder(folder), Repository(repository)
    tags = [tag for tag in origin.tags() if tag.endswith(".pack")]
    if not tags:
        fix = "./inv build.kernels --publish packs   # or docker build --target kernel-packs --output packs ."
        raise UsageError(f"{folder} has no kernel packs", "it has no OCI layout with a tag that ends in .pack", fix)
    for tag in tags:
        target.write(tag, origin.read(tag))
        say(f"{repository}:{tag}")


def _refused(what: str, why: str, code: str) -> IntegrityError:
    return IntegrityError(f"{what} is refused", why, FIX, code=code)
