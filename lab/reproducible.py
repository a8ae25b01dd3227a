"""`python -m lab.reproducible`: build an image twice, under conditions as different as possible, and compare.

The second build has no cache, and another path, umask, time zone, locale and number of jobs. The whole OCI archives are
compared: configuration, layers, manifest. Times in an archive are the commit's (SOURCE_DATE_EPOCH).

`--against IMAGE` builds once and compares configuration and layers with an image that somebody else built. With
`--key KEY` it attaches a signed statement, which `image.verify` prints. IMAGE is an OCI archive or
REPOSITORY@sha256:DIGEST; the latter is pulled, and its repository gets the statement too.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import os
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkforge import pins
from sparkforge.audit import elf
from sparkforge.cli.build import chosen_stack
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.docker import docker, docker_logged, require_plugin
from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import parse_json, require_space, write_json
from sparkforge.core.git import checkout_git
from sparkforge.core.manifest import remove
from sparkforge.core.program import exit_code
from sparkforge.image import provenance, registry, signing
from sparkforge.image.attached import Place, Repository
from sparkforge.image.build import REWRITTEN, commit
from sparkforge.image.devices import CPU, CUDA
from sparkforge.image.oci import LayoutImage

NEEDED_BYTES = {CPU: 6_000_000_000, CUDA: 24_000_000_000}  # two archives and a reserve
SHOWN = 20  # differing files that are named


@dataclass(frozen=True)
class Circumstances:
    """Conditions that must not affect the bytes: folder, umask, time zone, locale and number of jobs of a build."""

    name: str
    folder: str
    umask: int
    zone: str
    locale: str
    jobs: str


BUILDS = (
    Circumstances("a", "first", 0o022, "UTC", "C.UTF-8", "1"),
    Circumstances("b", "second/of two, elsewhere", 0o077, "Pacific/Kiritimati", "tr_TR.UTF-8", "2"),
)


@dataclass(frozen=True)
class Image:
    """An OCI archive, read: sha256 of the file, of its configuration, and of each layer in order."""

    archive: str
    config: str
    layers: tuple[str, ...]


def report_path(stack: str) -> Path:
    """Return the path of the last report on a stack's image."""
    return paths.state() / f"reproducible-{stack}.json"


def verify_reproducible(stack: str, more: Sequence[str], against: str = "", key_file: Path | None = None) -> None:
    """Build twice, compare, write `.sparkforge/reproducible-STACK.json`; archives that differ are kept in its folder.

    With `against`, an OCI archive or REPOSITORY@DIGEST, build once; a statement of the rebuild is then signed with
    `key_file`, for this machine and that repository. Raises IntegrityError, EngineError without buildx, StorageError
    for the key.
    """
    key = signing.private_key(key_file) if key_file else None
    needed = NEEDED_BYTES[pins.load().image(stack).device]
    require_plugin("buildx")
    work = paths.state() / f"reproducible-{stack}"
    remove(work)
    work.mkdir(parents=True)
    require_space(work, needed, "two images")
    reference = registry.REFERENCE.fullmatch(against)
    theirs = pull(against, work / "a.tar") if reference else Path(against)
    witnessed = LayoutImage(theirs) if against else None
    circumstances = BUILDS[1:] if against else BUILDS
    archives = [*([theirs] if against else []), *(build(stack, builder, work, more) for builder in circumstances)]
    images = [read(archive) for archive in archives]
    if against:  # copying or publishing may have repacked the archive and recompressed its layers
        images = [
            replace(image, archive="", layers=contents(LayoutImage(archive)))
            for image, archive in zip(images, archives, strict=True)
        ]
    report = compare(images, archives)
    write_json(report_path(stack), report)
    for name, image in zip("ab", images, strict=True):
        say(f"{name}: {len(image.layers)} layers, {image.archive or image.config}")
    require_identical(report, f"diffoscope {shlex.join(map(str, archives))}   # sudo apt install diffoscope")
    remove(work)
    say(f"identical: {'configuration and layers' if against else 'the archives'} are the same, byte for byte")
    if witnessed and key:
        named = signing.digests(witnessed)
        statement = signing.signed(provenance.statement(named, provenance.REBUILD, {"stack": stack, **commit()}), key)
        places: list[Place] = [signing.own_folder(), *([Repository(reference["repository"])] if reference else [])]
        for digest, place in itertools.product((digest for _, digest in named), places):
            signing.attach(place, digest, "att", [statement])
        say(f"signed that it was rebuilt: {', '.join(digest[:19] for _, digest in named)}")


def pull(reference: str, archive: Path) -> Path:
    """Pull REPOSITORY@DIGEST and return it as an OCI archive.

    Raises EngineError, and IntegrityError if the engine's store changes images that it pulls.
    """
    docker_logged(["pull", reference], paths.state() / "logs" / "reproducible-pull.log", lambda _text: None)
    docker(["image", "save", "--output", archive, reference])
    if (digest := reference.partition("@")[2]) not in (digests := LayoutImage(archive).digests):
        why = f"the engine saved {digests[0]}; only its containerd image store keeps images as they were pushed"
        fix = "docs/concepts/images.md, the same bytes twice"
        raise IntegrityError(f"{digest} cannot be compared", why, fix, code="integrity.image")
    return archive


def build(stack: str, circumstances: Circumstances, work: Path, more: Sequence[str]) -> Path:
    """Build an OCI archive of a copy of this checkout and return its path.

    `more` are further arguments of `docker buildx build`. Raises EngineError.
    """
    checkout = work / circumstances.folder
    copy_checkout(checkout, circumstances.umask)
    output = work / f"{circumstances.name}.tar"
    # BuildKit's provenance contains build times, which always differ; `image.sign` attaches ours.
    command = ["buildx", "build", "--no-cache", "--provenance=false", "--target", "runtime"]
    for name, value in {"STACK": stack, "JOBS": circumstances.jobs, **commit()}.items():
        command += ["--build-arg", f"{name}={value}"]
    # Level 1, because size does not matter here and level 6 takes minutes of one core for 6 GB.
    command += [*more, "--output", f"type=oci,dest={output},{REWRITTEN},compression-level=1", str(checkout)]
    env = {"TZ": circumstances.zone, "LC_ALL": circumstances.locale, "LANG": circumstances.locale}
    log = paths.state() / "logs" / f"reproducible-{circumstances.name}.log"
    docker_logged(command, log, lambda _text: None, env)
    shutil.rmtree(checkout)
    return output


def copy_checkout(folder: Path, umask: int) -> None:
    """Copy the files that git tracks, with the modes of a clone made under `umask`; git stores no other modes."""
    names = checkout_git(paths.ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, names.split("\0")):
        source, target = paths.ROOT / name, folder / name
        if not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod((0o777 if os.access(source, os.X_OK) else 0o666) & ~umask)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        path.chmod(0o777 & ~umask)


def read(archive: Path) -> Image:
    """Return the contents of an OCI archive (image-spec: index.json → manifest → config and layers)."""
    with archive.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    with tarfile.open(archive) as tar:
        index = _json(tar, "index.json")
        manifest = _json(tar, _blob(index["manifests"][0]["digest"]))
    layers = tuple(str(layer["digest"]) for layer in manifest["layers"])
    return Image(sha256, str(manifest["config"]["digest"]), layers)


def contents(image: LayoutImage) -> tuple[str, ...]:
    """Return the sha256 of each uncompressed layer. Raises IntegrityError for a damaged archive."""
    digests = []
    for layer in image.manifest.layers:
        with image.layout.open_layer(layer) as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            plain: Any = gzip.GzipFile(fileobj=file) if zipped else file
            digests.append(f"sha256:{hashlib.file_digest(plain, 'sha256').hexdigest()}")
    return tuple(digests)


def _json(tar: tarfile.TarFile, name: str) -> dict[str, Any]:
    file = tar.extractfile(name)
    document: dict[str, Any] = parse_json(file.read() if file else b"", name)
    return document


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def compare(images: Sequence[Image], archives: Sequence[Path]) -> dict[str, Any]:
    """Return the comparison of two images as a document; it names the first files that differ."""
    first, second = images
    differences = [] if first == second else list(itertools.islice(differing(archives), SHOWN))
    if differences and "content" in differences[0][1]:
        differences[0] = (differences[0][0], f"{differences[0][1]}, first {first_section(archives, differences[0][0])}")
    return {
        "identical": first == second,
        "archives": [first.archive, second.archive],
        "configurations equal": first.config == second.config,
        "layers": [{"a": a, "b": b, "equal": a == b} for a, b in zip(first.layers, second.layers, strict=False)],
        "layers in each": [len(first.layers), len(second.layers)],
        "differing": [f"{name}: {difference}" for name, difference in differences],
    }


def differing(archives: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield each path inside the layers that only one image has or that differs, with the difference."""
    first, second = (dict(_entries(archive)) for archive in archives)
    for name in sorted(first.keys() | second.keys()):
        a, b = first.get(name), second.get(name)
        if a is None or b is None:
            yield name, f"only in {'b' if a is None else 'a'}"
        elif a != b:
            yield name, ", ".join(f"{key} {a[key]} and {b[key]}" for key in a if a[key] != b[key])


def first_section(archives: Sequence[Path], name: str) -> str:
    """Return where the file `name` of `differing` differs: the first section of an ELF file, else the first byte."""
    number, _, path = name.removeprefix("layer ").partition(": ")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, letter) for letter in "ab"]
        for archive, file in zip(archives, files, strict=True):
            with (
                tarfile.open(archive) as tar,
                tarfile.open(fileobj=tar.extractfile(_blob(read(archive).layers[int(number)])), mode="r:*") as layer,
            ):
                file.write_bytes(layer.extractfile(path).read())  # type: ignore[union-attr]
        try:
            sections = [[(part.name, part.data()) for part in elf.opened(file).iter_sections()] for file in files]
            pairs = itertools.zip_longest(*sections, fillvalue=("none", b""))
            return f"in section {next((a[0] or b[0] for a, b in pairs if a != b), 'headers')}"
        except elf.MALFORMED:
            contents = itertools.zip_longest(*(file.read_bytes() for file in files))
            return f"at byte {next((offset for offset, (a, b) in enumerate(contents) if a != b), 0)}"


def _entries(archive: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield "layer N: path" and the metadata of every entry of every layer."""
    with tarfile.open(archive) as tar:
        for number, digest in enumerate(read(archive).layers):
            with tarfile.open(fileobj=tar.extractfile(_blob(digest)), mode="r:*") as layer:
                for entry in layer:
                    file = layer.extractfile(entry) if entry.isreg() else None
                    content = hashlib.file_digest(file, "sha256").hexdigest()[:12] if file else entry.linkname  # type: ignore[arg-type]
                    facts = {"mode": oct(entry.mode), "owner": f"{entry.uid}:{entry.gid}", "time": entry.mtime}
                    yield f"layer {number}: {entry.name}", {**facts, "content": content}


def require_identical(report: Mapping[str, Any], fix: str) -> None:
    """Raise IntegrityError with the first differences, if there are any; the command `fix` shows all."""
    if report["identical"]:
        return
    layers = [number for number, layer in enumerate(report["layers"]) if not layer["equal"]]
    differing_files = "; ".join(report["differing"][:5]) or "only the configuration or the manifest differs"
    raise IntegrityError(
        "two builds of this checkout are not the same image",
        f"layers {', '.join(map(str, layers)) or 'none'} differ: {differing_files}",
        fix,
        code="integrity.image",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.reproducible", description=__doc__)
    parser.add_argument("--stack", default="", help="stack of pins.toml; default: its default")
    parser.add_argument("--against", default="", help="an image that somebody else built: build once")
    parser.add_argument("--key", type=Path, help="with --against: sign that it was rebuilt, as image.sign does")
    parser.add_argument("more", nargs="*", help="more arguments for docker buildx build, after --")
    options = parser.parse_args()
    stack, more = chosen_stack(options.stack), options.more
    sys.exit(exit_code(lambda: verify_reproducible(stack, more, options.against, options.key)))
