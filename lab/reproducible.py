"""`python -m lab.reproducible`: build an image twice, as differently as an honest builder could, and compare.

The second build has no cache, another path, umask, time zone, locale and number of jobs. What is compared is the whole
OCI archive: configuration, layers, manifest. Times in it are the commit's (SOURCE_DATE_EPOCH).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import shlex
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge import pins
from sparkforge.cli.build import chosen_stack
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.docker import docker_logged, require_plugin
from sparkforge.core.documents import parse_json
from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import require_space, write_json
from sparkforge.core.git import checkout_git
from sparkforge.core.manifest import remove
from sparkforge.core.program import exit_code
from sparkforge.image.devices import CPU, CUDA

NEEDED_BYTES = {CPU: 6_000_000_000, CUDA: 24_000_000_000}  # two archives, with some air
SHOWN = 20  # differing files that are named


@dataclass(frozen=True)
class Circumstances:
    """What must not matter to the bytes: where, under which umask, zone and locale, and how parallel is built."""

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


def verify_reproducible(stack: str, more: Sequence[str]) -> None:
    """Build twice, compare, write `.sparkforge/reproducible-STACK.json`; archives that differ are kept beside it.

    Raises IntegrityError, EngineError without buildx.
    """
    needed = NEEDED_BYTES[pins.load().image(stack).device]
    require_plugin("buildx")
    work = paths.state() / f"reproducible-{stack}"
    remove(work)
    work.mkdir(parents=True)
    require_space(work, needed, "two images")
    archives = [build(stack, circumstances, work, more) for circumstances in BUILDS]
    images = [read(archive) for archive in archives]
    report = compare(images, archives)
    write_json(report_path(stack), report)
    for image, circumstances in zip(images, BUILDS, strict=True):
        say(f"{circumstances.name}: {len(image.layers)} layers, archive sha256 {image.archive}")
    require_identical(report, f"diffoscope {shlex.join(map(str, archives))}   # sudo apt install diffoscope")
    remove(work)
    say("identical: the archives are the same, byte for byte")


def build(stack: str, circumstances: Circumstances, work: Path, more: Sequence[str]) -> Path:
    """Build an OCI archive of a copy of this checkout and return its path.

    `more` are further arguments of `docker buildx build`. Raises EngineError.
    """
    checkout = work / circumstances.folder
    copy_checkout(checkout, circumstances.umask)
    output = work / f"{circumstances.name}.tar"
    epoch = checkout_git(paths.ROOT, "log", "-1", "--format=%ct").strip()  # every file's time in the image
    # BuildKit's own provenance has the times of its build, in which no two are equal; `image.sign` attaches ours.
    command = ["buildx", "build", "--no-cache", "--provenance=false", "--target", "runtime"]
    for name, value in {"STACK": stack, "JOBS": circumstances.jobs, "SOURCE_DATE_EPOCH": epoch}.items():
        command += ["--build-arg", f"{name}={value}"]
    # Level 1: bytes are compared, not sizes, and level 6 takes minutes of one core for 6 GB.
    options = "rewrite-timestamp=true,compression=gzip,compression-level=1,force-compression=true"
    command += [*more, "--output", f"type=oci,dest={output},{options}", str(checkout)]
    env = {"TZ": circumstances.zone, "LC_ALL": circumstances.locale, "LANG": circumstances.locale}
    log = paths.state() / "logs" / f"reproducible-{circumstances.name}.log"
    docker_logged(command, log, lambda _text: None, env)
    shutil.rmtree(checkout)
    return output


def copy_checkout(folder: Path, umask: int) -> None:
    """Copy what git tracks, as a clone made under `umask` would have it: modes are not part of a commit."""
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
    """Return what an OCI archive holds (image-spec: index.json → manifest → config and layers)."""
    with archive.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    with tarfile.open(archive) as tar:
        index = _json(tar, "index.json")
        manifest = _json(tar, _blob(index["manifests"][0]["digest"]))
    layers = tuple(str(layer["digest"]) for layer in manifest["layers"])
    return Image(sha256, str(manifest["config"]["digest"]), layers)


def _json(tar: tarfile.TarFile, name: str) -> dict[str, Any]:
    file = tar.extractfile(name)
    document: dict[str, Any] = parse_json(file.read() if file else b"", name)
    return document


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def compare(images: Sequence[Image], archives: Sequence[Path]) -> dict[str, Any]:
    """Return the comparison of two images as a document; it names the first files that differ."""
    first, second = images
    differences = () if first == second else itertools.islice(differing(archives), SHOWN)
    return {
        "identical": first == second,
        "archives": [first.archive, second.archive],
        "configurations equal": first.config == second.config,
        "layers": [{"a": a, "b": b, "equal": a == b} for a, b in zip(first.layers, second.layers, strict=False)],
        "layers in each": [len(first.layers), len(second.layers)],
        "differing": [f"{name}: {difference}" for name, difference in differences],
    }


def differing(archives: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield each path inside the layers that only one image has, or that differs, and in what."""
    first, second = (dict(_entries(archive)) for archive in archives)
    for name in sorted(first.keys() | second.keys()):
        a, b = first.get(name), second.get(name)
        if a is None or b is None:
            yield name, f"only in {'b' if a is None else 'a'}"
        elif a != b:
            yield name, ", ".join(f"{key} {a[key]} and {b[key]}" for key in a if a[key] != b[key])


def _entries(archive: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield "layer N: path" and the entry's own facts for every entry of every layer."""
    with tarfile.open(archive) as tar:
        for number, digest in enumerate(read(archive).layers):
            with tarfile.open(fileobj=tar.extractfile(_blob(digest)), mode="r:*") as layer:
                for entry in layer:
                    file = layer.extractfile(entry) if entry.isreg() else None
                    content = hashlib.file_digest(file, "sha256").hexdigest()[:12] if file else entry.linkname  # type: ignore[arg-type]
                    facts = {"mode": oct(entry.mode), "owner": f"{entry.uid}:{entry.gid}", "time": entry.mtime}
                    yield f"layer {number}: {entry.name}", {**facts, "content": content}


def require_identical(report: Mapping[str, Any], fix: str) -> None:
    """Raise IntegrityError with the first differences, unless there is none; `fix` shows them all."""
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
    parser.add_argument("more", nargs="*", help="more arguments for docker buildx build, behind --")
    options = parser.parse_args()
    sys.exit(exit_code(lambda: verify_reproducible(chosen_stack(options.stack), options.more)))
