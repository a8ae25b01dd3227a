"""`./inv verify-reproducible`: build an image twice, as differently as an honest builder could, and compare the bytes.

The second build has no cache, another path, umask, time zone, locale and number of jobs. What is compared is the whole
OCI archive: configuration, layers, manifest. Times in it are the commit's (SOURCE_DATE_EPOCH).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sparkforge import paths
from sparkforge.console import say
from sparkforge.docker_cli import docker_logged
from sparkforge.errors import NotReproducibleError, UsageError
from sparkforge.files import require_space, write_json
from sparkforge.process import run

DEVICES = ("cpu", "cuda")
ROOM = {"cpu": 6_000_000_000, "cuda": 24_000_000_000}  # bytes: two archives, and one unpacked to compare
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


def show(device: str, target: str, more: Sequence[str]) -> None:
    """Build twice, compare, write `.sparkforge/reproducible-DEVICE.json`. Raises NotReproducibleError."""
    if device not in DEVICES:
        raise UsageError(f"no device {device!r}", f"there are {' and '.join(DEVICES)}", "--device cpu")
    with tempfile.TemporaryDirectory(prefix="reproducible-", dir=_state()) as name:
        work = Path(name)
        require_space(work, ROOM[device], "two images")
        archives = [build(device, target, each, work, more) for each in BUILDS]
        images = [read(archive) for archive in archives]
        report = compare(images)
        if not report["identical"]:
            found = dict(islice(differing(archives), SHOWN))
            report["differing"] = [f"{name}: {told}" for name, told in found.items()]
            report["explained"] = explained(archives, found)
        write_json(_state() / f"reproducible-{device}.json", report)
    for image, each in zip(images, BUILDS, strict=True):
        say(f"{each.name}: {len(image.layers)} layers, archive sha256 {image.archive}")
    require_identical(report)
    say("identical: the archives are the same, byte for byte")


def _state() -> Path:
    place = paths.state()
    place.mkdir(parents=True, exist_ok=True)
    return place


def build(device: str, target: str, how: Circumstances, work: Path, more: Sequence[str]) -> Path:
    """Build an OCI archive of a copy of this checkout, under `how`, and return its path. Raises EngineError."""
    place = work / how.folder
    copy_checkout(place, how.umask)
    output = work / f"{how.name}.tar"
    words = ["buildx", "build", "--no-cache", "--provenance=false", "--target", target]
    arguments = {"DEVICE": device, "JOBS": how.jobs, "SOURCE_DATE_EPOCH": epoch()}
    words += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    # Level 1: bytes are compared, not sizes, and level 6 takes minutes of one core for 6 GB.
    form = "rewrite-timestamp=true,compression=gzip,compression-level=1,force-compression=true"
    words += [*more, "--output", f"type=oci,dest={output},{form}", str(place)]
    env = {"TZ": how.zone, "LC_ALL": how.locale, "LANG": how.locale}
    docker_logged(words, paths.state() / "logs" / f"reproducible-{how.name}.log", lambda _text: None, env)
    shutil.rmtree(place)
    return output


def copy_checkout(place: Path, umask: int) -> None:
    """Copy what git tracks, as a clone made under `umask` would have it: modes are not part of a commit."""
    names = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=paths.ROOT).stdout.split(
        "\0"
    )
    for name in filter(None, names):
        source, target = paths.ROOT / name, place / name
        if not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod((0o777 if os.access(source, os.X_OK) else 0o666) & ~umask)
    for folder in [place, *(path for path in place.rglob("*") if path.is_dir())]:
        folder.chmod(0o777 & ~umask)


def epoch() -> str:
    """Return the commit's time in seconds, every file's in the image."""
    return run(["git", "log", "-1", "--format=%ct"], cwd=paths.ROOT).stdout.strip()


def read(archive: Path) -> Image:
    """Return what an OCI archive holds (image-spec: index.json → manifest → config and layers)."""
    with archive.open("rb") as file:
        whole = hashlib.file_digest(file, "sha256").hexdigest()
    with tarfile.open(archive) as tar:
        index = _json(tar, "index.json")
        manifest = _json(tar, _blob(index["manifests"][0]["digest"]))
    layers = tuple(str(layer["digest"]) for layer in manifest["layers"])
    return Image(whole, str(manifest["config"]["digest"]), layers)


def _json(tar: tarfile.TarFile, name: str) -> dict[str, Any]:
    file = tar.extractfile(name)
    document: dict[str, Any] = json.loads(file.read()) if file else {}
    return document


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def compare(images: Sequence[Image]) -> dict[str, Any]:
    """Return the comparison of two images as a document."""
    first, second = images
    return {
        "identical": first == second,
        "archives": [first.archive, second.archive],
        "configurations equal": first.config == second.config,
        "layers": [{"a": a, "b": b, "equal": a == b} for a, b in zip(first.layers, second.layers, strict=False)],
        "layers in each": [len(first.layers), len(second.layers)],
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
                    held = hashlib.file_digest(file, "sha256").hexdigest()[:12] if file else entry.linkname  # type: ignore[arg-type]
                    facts = {"mode": oct(entry.mode), "owner": f"{entry.uid}:{entry.gid}", "time": entry.mtime}
                    yield f"layer {number}: {entry.name}", {**facts, "content": held}


def explained(archives: Sequence[Path], names: Collection[str]) -> str:
    """Return what diffoscope says of the archives' documents and of the files `names` in them, or how to get it."""
    if shutil.which("diffoscope") is None:
        return "install diffoscope for the differences inside files: sudo apt install diffoscope"
    with tempfile.TemporaryDirectory(dir=archives[0].parent) as place:
        sides = [Path(place) / side for side in "ab"]
        for archive, side in zip(archives, sides, strict=True):
            _take_out(archive, names, side)
        return run(["diffoscope", "--max-report-size", "20000", *sides], check=False).stdout


def _take_out(archive: Path, names: Collection[str], place: Path) -> None:
    """Write an archive's index, manifest and configuration, and the files `names` of its layers, below `place`."""
    with tarfile.open(archive) as tar:
        index = _json(tar, "index.json")
        manifest = _json(tar, _blob(index["manifests"][0]["digest"]))
        documents = {"index": index, "manifest": manifest, "config": _json(tar, _blob(manifest["config"]["digest"]))}
        for name, document in documents.items():
            write_json(place / f"{name}.json", document)
        for number, each in enumerate(manifest["layers"]):
            with tarfile.open(fileobj=tar.extractfile(_blob(each["digest"])), mode="r:*") as layer:
                for entry in layer:
                    if (
                        entry.isreg()
                        and f"layer {number}: {entry.name}" in names
                        and (file := layer.extractfile(entry))
                    ):
                        target = place / str(number) / entry.name.strip("/")
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(file.read())


def require_identical(report: Mapping[str, Any]) -> None:
    """Raise NotReproducibleError with the first differences, unless there is none."""
    if report["identical"]:
        return
    layers = [number for number, layer in enumerate(report["layers"]) if not layer["equal"]]
    told = "; ".join(report.get("differing", [])[:5]) or "only the configuration or the manifest differs"
    raise NotReproducibleError(
        "two builds of this checkout are not the same image",
        f"layers {', '.join(map(str, layers)) or 'none'} differ: {told}",
        "read .sparkforge/reproducible-*.json; docs/container.md, 'The same bytes twice'",
    )
