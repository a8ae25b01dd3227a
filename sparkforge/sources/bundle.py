"""A bundle: all files that a Spark without a network needs, as one tar, which that machine verifies member by member.

    index.json                every other member's sha256 and size, and absent files with the commands that fetch them
    files/HASH/NAME           sources and wheels by hash
    simple/…                  a package index over them (PEP 503), for pip and uv
    git/NAME-COMMIT.tar       repositories that the build needs
    packs/                    kernel packs of the checkout, from ./inv build.kernels --publish .sparkforge/packs
    pins.toml locks/ patches/ vocabulary/

The same inputs give the same bytes: members sorted, times and owners zero, modes 0644. Nothing is compressed, because
wheels and source archives are compressed already.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import os
import platform
import re
import shlex
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

from sparkforge import pins
from sparkforge.core import manifest, paths
from sparkforge.core.console import say
from sparkforge.core.errors import IntegrityError, NetworkError, UsageError
from sparkforge.core.files import parse_json, require_space, sha256_file
from sparkforge.core.manifest import Made, Manifest
from sparkforge.core.process import run
from sparkforge.pins import Pins, wheels
from sparkforge.pins.locks import LOCKS, lock_path
from sparkforge.pins.wheels import MACHINES, Pick, TargetMachine, choose_pinned
from sparkforge.sources import archive, fetch, offline, trees
from sparkforge.sources.archive import checked_path, members, unharmful, write_member

SCHEMA = 1
PACKS = "packs"  # a folder of the checkout's state and of a bundle, with kernel packs as an OCI layout
EMBEDDED = "embedded"  # the device, whose stack pins.toml names
BUNDLER = "1"  # increase it when this module makes different bytes from the same inputs
MAX_INDEX = 16 << 20
_refused = partial(archive.refused, fix="again   # first copy the bundle again, or make a new one")
MAX_DEPTH = 32  # folders above a member; our members have at most 7
WRITE_VOCABULARY = (
    "import sys, pathlib; from sparkforge.models.harmony import write_vocabulary as w; w(pathlib.Path(sys.argv[1]))"
)


@dataclass(frozen=True)
class BundleMember:
    """One member: its path in the bundle, its bytes or their file, and their expected hash."""

    path: str
    source: Path | bytes
    sha256: str
    size: int

    @classmethod
    def of(cls, path: str, source: Path | bytes, sha256: str = "") -> BundleMember:
        """Return the member for `source`; a file's hash is computed unless it is given."""
        if isinstance(source, bytes):
            return cls(path, source, hashlib.sha256(source).hexdigest(), len(source))
        return cls(path, source, sha256 or sha256_file(source), source.stat().st_size)


@dataclass(frozen=True)
class Absent:
    """A file that the bundle lacks: the reason, and the command that fetches it on a machine with a network."""

    name: str
    why: str
    command: str


def make(
    output: Path, *, stack: str, target: TargetMachine | None = None, locks: Sequence[str] = ()
) -> tuple[Manifest, bool]:
    """Write the bundle to `output` unless it is current; return its manifest and whether it was made now.

    Empty `locks` mean those of `basic_locks`. The bundle has upstream's wheels, the patches and their lock, from
    which the other machine makes the patched wheels. Repositories that have not been fetched (`./inv build --only
    sources`) are listed as absent. Raises UsageError if another file is in the way, and the errors of `fetch` and
    `wheels`.
    """
    target, table = target or TargetMachine(platform.machine()), pins.load()
    locks = locks or basic_locks(table)
    if manifest.load(output):
        _require_own(output)
    if not output.name.endswith(".tar"):
        raise UsageError(f"cannot write {output}", "a bundle is a .tar", "./inv bundle --output sparkforge-bundle.tar")
    inputs = {"bundler": BUNDLER, "stack": stack, "target": str(target), "locks": " ".join(locks)}
    inputs |= _inputs(table, stack)

    def build(temporary: Path) -> Made:
        _require_own(output)
        scratch = temporary.with_name(temporary.name.replace(".tmp", ".parts.tmp"))
        try:
            scratch.mkdir()
            entries, absent = gather(table, stack, target, scratch, locks)
            # The checkout's members keep their hashes from the start, so that an edit meanwhile is an error.
            entries += [BundleMember.of(name, file, inputs.get(f"checkout:{name}", "")) for name, file in _checkout()]
            entries.sort(key=lambda entry: entry.path)
            write(temporary, entries, absent, {"stack": stack, "target": str(target)})
        finally:
            manifest.remove(scratch)
        facts = {"members": len(entries), "bytes": temporary.stat().st_size, "absent": list(map(asdict, absent))}
        return Made({output.name: sha256_file(temporary)}, facts=facts)

    return manifest.once(output, "bundle", inputs, build)


def _require_own(output: Path) -> None:
    earlier = manifest.load(output)
    if output.exists() and (earlier is None or earlier.facts.get("bytes") != output.stat().st_size):
        failure = f"cannot write {output}"
        raise UsageError(failure, "another file is there, which is not a bundle", "--output sparkforge-bundle.tar")


def make_and_report(output: Path, *, stack: str, machine: str = "", python: str = "", more: Sequence[str] = ()) -> str:
    """Make a bundle, print its size and the absent files, and return its sha256.

    It is for a machine whose `uname -m` is `machine` and a Python such as 3.12; `more` are further locks.
    """
    if python and not re.fullmatch(r"3\.\d+", python):
        why = "it must have the form 3.N, such as 3.12"
        raise UsageError(f"{python} is not a Python version", why, "./inv bundle --python 3.12")
    if machine and machine not in MACHINES:
        why = f"the pinned files are for {' and '.join(MACHINES)}"
        raise UsageError(f"cannot bundle for {machine}", why, f"./inv bundle --machine {MACHINES[0]}")
    if unknown := [name for name in more if not re.fullmatch(r"[\w.-]+", name) or not lock_path(name).is_file()]:
        why = f"there are {', '.join(sorted(file.stem for file in LOCKS.glob('*.txt')))}"
        raise UsageError(f"there is no lock {unknown[0]}", why, "./inv bundle --more spark")
    version = (3, int(python.removeprefix("3."))) if python else sys.version_info[:2]
    target = TargetMachine(machine or platform.machine(), version)
    bundle, new = make(output, stack=stack, target=target, locks=[*basic_locks(pins.load()), *more])
    size = f"{bundle.facts['members']} members, {bundle.facts['bytes'] / 1e9:.2f} GB"
    say(f"{output}: {'made' if new else 'unchanged'}, {size}")
    say(f"sha256 {bundle.outputs[output.name]}")
    for absent in bundle.facts["absent"]:
        say(f"absent: {absent['name']}, because {absent['why']}\n  next: {absent['command']}")
    return bundle.outputs[output.name]


def basic_locks(table: Pins) -> tuple[str, str]:
    """Return the locks of the environment of ./inv and of the embedded device."""
    return "tools", table.environment(table.devices[EMBEDDED]).lock


def _inputs(table: Pins, stack: str) -> dict[str, str]:
    inputs = {f"checkout:{name}": sha256_file(file) for name, file in _checkout()}
    for name, pin in table.stack(stack).git.items():
        copy = manifest.current(trees.repository_folder(name, pin), "git", trees.manifest_inputs(pin))
        inputs |= {f"git:{name}": copy.outputs["listing"]} if copy else {}
    return inputs | {"vocabulary": str(_embedded(table).exists())}


def _embedded(table: Pins) -> Path:
    return paths.environment(table.devices[EMBEDDED]) / "bin" / "python"


def _checkout() -> list[tuple[str, Path]]:
    """Return (path, file) of the checkout's members: pins, locks, patches and kernel packs."""

    def refuse(error: OSError) -> None:  # `os.walk` would skip an unreadable folder silently
        raise error

    files = [paths.ROOT / "pins.toml", *(file for file in (paths.ROOT / "locks").iterdir() if file.is_file())]
    for folder, _, names in os.walk(paths.ROOT / "patches", onerror=refuse):
        files += [Path(folder, name) for name in names]
    packs = [file for file in (paths.state() / PACKS).rglob("*") if file.is_file()]
    named = [(str(file.relative_to(paths.ROOT)), file) for file in files]
    return sorted(named + [(str(file.relative_to(paths.state())), file) for file in packs])


def gather(
    table: Pins, stack: str, target: TargetMachine, scratch: Path, locks: Sequence[str]
) -> tuple[list[BundleMember], list[Absent]]:
    """Fetch the members that are not the checkout's files; return them and the absent ones."""
    sources = [component for component in table.stack(stack).components.values() if component.kind == "sdist"]
    files = dict[Pick, Path]()
    for source in sources:
        for filename, sha256 in source.files.items():
            files[Pick(source.package or "", filename, sha256)] = fetch.fetch_pinned(source, filename)
    for pick in dict.fromkeys(pick for name in locks for pick in wheels.picks(lock_path(name), target)):
        files[pick] = fetch.fetch(pick.package, pick.filename, pick.sha256)
    absent: list[Absent] = []
    environments = [pin for pin in table.environments.values() if pin.lock in locks]
    for name in dict.fromkeys(wheel for pin in environments for wheel in pin.wheels):
        component = table.component(*name.split("/"))
        if component.index:  # no lock lists it
            pick = choose_pinned(component, target)
            try:
                files[pick] = fetch.fetch_pinned(component, pick.filename)
            except NetworkError as error:
                absent.append(Absent(f"{component.package} {component.version}", error.why, error.fix))
    entries = [
        BundleMember.of(f"files/{pick.sha256}/{pick.filename}", file, pick.sha256) for pick, file in files.items()
    ]
    for member in _repositories(table, stack, scratch):
        if isinstance(member, Absent):
            absent.append(member)
        else:
            entries.append(member)
    if _embedded(table).exists():  # it has oss-harmony, from which the vocabulary is written
        run([_embedded(table), "-c", WRITE_VOCABULARY, scratch], cwd=paths.ROOT)
        entries.append(BundleMember.of("vocabulary/o200k_base.tiktoken", scratch / "o200k_base.tiktoken"))
    else:
        absent.append(Absent("vocabulary", "the embedded environment is not made", "./inv up && ./inv bundle"))
    entries += [BundleMember.of(path, page.encode()) for path, page in index_pages(files).items()]
    return entries, absent


def _repositories(table: Pins, stack: str, scratch: Path) -> Iterator[BundleMember | Absent]:
    for name, pin in table.stack(stack).git.items():
        folder = trees.repository_folder(name, pin)
        if manifest.current(folder, "git", trees.manifest_inputs(pin)):
            file = scratch / f"{name}.tar"
            listing = archive.read_listing(folder)
            parts = [BundleMember.of(path, folder / path, sha256) for path, sha256 in sorted(listing.items())]
            with file.open("wb") as out:
                _write_tar(out, parts)
            yield BundleMember.of(trees.bundled_path(name, pin), file)
        elif pin.needed:
            command = f"./inv build --only sources, or by hand: {trees.fetch_command(name, pin)}"
            yield Absent(name, "it was not fetched to this machine", command)


def index_pages(files: Iterable[Pick]) -> Mapping[str, str]:
    """Return the pages (path → HTML) of a package index over files/HASH/NAME."""
    packages: dict[str, list[str]] = defaultdict(list)
    for pick in sorted(files, key=lambda pick: pick.filename):
        link = f"../../files/{pick.sha256}/{quote(pick.filename)}#sha256={pick.sha256}"
        packages[canonicalize_name(pick.package)].append(f'<a href="{link}">{html.escape(pick.filename)}</a><br>')
    pages = {f"simple/{name}/index.html": links for name, links in packages.items()}
    pages["simple/index.html"] = [f'<a href="{name}/">{name}</a><br>' for name in sorted(packages)]
    return {path: "\n".join(["<!DOCTYPE html>", *lines, ""]) for path, lines in pages.items()}


def write(path: Path, entries: Sequence[BundleMember], absent: Sequence[Absent], about: Mapping[str, Any]) -> None:
    """Write a bundle. Raises IntegrityError if a file does not match its entry, or changed meanwhile."""
    listed = {entry.path: {"sha256": entry.sha256, "size": entry.size} for entry in entries}
    value = {"schema": SCHEMA, **about, "members": listed, "absent": [asdict(entry) for entry in absent]}
    index = BundleMember.of(offline.INDEX, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())
    require_space(path.parent, sum(entry.size for entry in entries), "the bundle")
    with path.open("wb") as out:
        _write_tar(out, [index, *entries])


def _write_tar(out: Any, entries: Iterable[BundleMember]) -> None:
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)  # owner 0, time 0, mode 0644
            info.size = entry.size
            with io.BytesIO(entry.source) if isinstance(entry.source, bytes) else entry.source.open("rb") as file:
                hashed = _Hashing(file)
                tar.addfile(info, hashed)  # type: ignore[arg-type]
            if hashed.digest.hexdigest() != entry.sha256:
                failure = f"{entry.path} cannot be packed"
                why = f"the sha256 of {entry.source!s:.200} is not {entry.sha256}"
                raise IntegrityError(failure, why, "again   # first remove that file", code="integrity.hash")


class _Hashing:
    """A file that hashes the bytes that are read."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        data: bytes = self.file.read(size)
        self.digest.update(data)
        return data


def unpack(file: Path, folder: Path, *, sha256: str = "") -> tuple[Manifest, bool]:
    """Unpack the bundle `file` into `folder` and verify every member; return its manifest and whether it was done now.

    With `sha256` the whole file must have that hash. Raises IntegrityError that names the offending member, and
    UsageError if `folder` exists and was not unpacked from the same file.
    """
    if not file.is_file():
        failure = f"cannot unpack {file}"
        raise UsageError(failure, "there is no such file", "--help   # name a bundle made by ./inv bundle")
    folder = Path(os.path.realpath(folder))
    actual = sha256_file(file)
    if not sha256:
        say(f"warning: without --sha256 the contents of {file.name} are checked only against the bundle's own index")
        say(f"  its sha256 is {actual}; compare it with the one that ./inv bundle printed")
    elif sha256.lower() != actual:
        raise IntegrityError(f"{file.name} is not the bundle that was made", f"wanted sha256 {sha256}, got {actual}",
                                "again   # first copy it again", code="integrity.hash")  # fmt: skip

    def build(temporary: Path) -> Made:
        if os.path.lexists(folder):
            fix = f"{shlex.join(['mv', str(folder), f'{folder}.old'])}   # or name a new folder"
            raise UsageError(f"cannot unpack into {folder}", f"it exists and was not unpacked from {file.name}", fix)
        require_space(folder.parent, file.stat().st_size, "the bundle's content")
        temporary.mkdir(parents=True)
        count = len(unpack_members(file, temporary))
        return Made({"index": sha256_file(temporary / offline.INDEX)}, facts={"members": count})

    return manifest.once(folder, "bundle.unpack", {"bundle": actual, "bundler": BUNDLER}, build)


def unpack_members(file: Path, folder: Path) -> list[str]:
    """Unpack all members except the index into a new folder and verify each; return the paths.

    Raises IntegrityError that names the offending member; files that were unpacked before must not be used.
    """
    try:
        return sorted(_unpack(file, folder))
    except archive.MALFORMED as error:
        raise _refused(file, f"it is damaged or truncated: {error or type(error).__name__}") from error


def _unpack(file: Path, folder: Path) -> set[str]:
    wanted: dict[str, tuple[str, int]] | None = None
    unpacked: set[str] = set()
    for member in members(file):
        path = checked_path(file, member, None)
        if wanted is None:
            if path != offline.INDEX or member.kind != "file":
                raise _refused(file, f"it begins with {member.name!r} instead of {offline.INDEX}")
            _, size = write_member(member, folder / path, MAX_INDEX)
            if size > MAX_INDEX:
                raise _refused(file, f"its {offline.INDEX} has more than {MAX_INDEX} bytes")
            wanted = _read_index(file, (folder / path).read_bytes())
            continue
        if path in unpacked or path not in wanted:
            raise _refused(file, f"{member.name!r} {'is in it twice' if path in unpacked else 'is not in its index'}")
        hashed = write_member(member, folder / path, wanted[path][1])
        if hashed != wanted[path]:
            raise IntegrityError(f"{file.name} is refused", f"{path} does not match the index",
                                    "again   # first copy the bundle again", code="integrity.hash")  # fmt: skip
        unpacked.add(path)
    if wanted is None:
        raise _refused(file, "it is empty")
    if missing := sorted(set(wanted) - unpacked)[:3]:
        raise _refused(file, f"it is truncated: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    return unpacked


def _read_index(file: Path, data: bytes) -> dict[str, tuple[str, int]]:
    """Return (sha256, size) of each member. Raises IntegrityError if the index has another format."""
    try:
        value = parse_json(data, offline.INDEX)
        if value["schema"] != SCHEMA:
            raise ValueError("another schema")  # noqa: TRY301
        members = {path: (str(entry["sha256"]), int(entry["size"])) for path, entry in value["members"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _refused(file, f"its {offline.INDEX} cannot be read by this Sparkforge: {error}") from error
    for path, (_, length) in members.items():
        fine = unharmful(path) and path != offline.INDEX and length >= 0 and path.count("/") <= MAX_DEPTH
        if not fine or any(parent in members for parent in archive.parents(path)):
            raise _refused(file, f"its {offline.INDEX} has an entry that is not allowed: {path[:200]!r}")
    return members
