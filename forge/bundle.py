"""Everything that a Spark without a network needs, as one tar: made here, verified member by member there.

    index.json                every other member's sha256 and size, and what is absent, with the command that brings it
    files/HASH/NAME           sources and wheels by hash
    simple/…                  a package index over them (PEP 503), for pip and uv
    git/NAME-COMMIT.tar       repositories that the build needs
    pins.toml locks/ patches/ vocabulary/

The same inputs give the same bytes: members sorted, times and owners zero, modes 0644. Nothing is compressed, because
wheels and source archives are compressed already.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import platform
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

from forge import archive, envs, fetch, gitsource, manifest, offline, pins, sources, torch_cpu, wheels
from forge.archive import checked_path, members, unharmful, write_member
from forge.locks import lock_path
from forge.manifest import Made, Manifest
from forge.pins import Pins
from forge.wheels import Pick, Target
from sparkforge import paths
from sparkforge.console import say
from sparkforge.errors import ArchiveError, HashMismatchError, RuntimeSetupError, UsageError
from sparkforge.files import require_space, sha256_file
from sparkforge.process import run

SCHEMA = 1
BUNDLER = "1"  # raise it when this module would make other bytes of the same inputs
MACHINES = ("aarch64", "x86_64")  # what the wheels that we pin are for, as `uname -m` says it
LOCKS = ("tools", "embedded")  # what ./inv itself runs on, and the embedded device
MAX_INDEX = 16 << 20
WRITE_VOCABULARY = "import sys, pathlib; from serve.harmony import write_vocabulary as w; w(pathlib.Path(sys.argv[1]))"


@dataclass(frozen=True)
class Entry:
    """One member: its path in the bundle, its bytes or the file that holds them, and the hash that these must have."""

    path: str
    source: Path | bytes
    sha256: str
    size: int

    @classmethod
    def of(cls, path: str, source: Path | bytes, sha256: str = "") -> Entry:
        """Measure `source`; a file's hash is computed unless it is given."""
        if isinstance(source, bytes):
            return cls(path, source, hashlib.sha256(source).hexdigest(), len(source))
        return cls(path, source, sha256 or sha256_file(source), source.stat().st_size)


@dataclass(frozen=True)
class Absent:
    """What the bundle should hold and does not: why, and the command that brings it on a machine with a network."""

    name: str
    why: str
    command: str


def make(
    output: Path, *, stack: str = "spark", target: Target | None = None, locks: Sequence[str] = LOCKS
) -> tuple[Manifest, bool]:
    """Write the bundle to `output` unless it stands there already; return its manifest and whether it was made now.

    Repositories that have not been brought (`./inv sources`) are listed as absent. Raises UsageError if another file is
    in the way, and the errors of `fetch` and `wheels`.
    """
    target, table = target or Target(platform.machine()), pins.load()
    if output.exists() and manifest.load(output) is None and not _is_bundle(output):
        raise UsageError(f"cannot write {output}", "another file is there, and it is no bundle", "name another file")
    if not output.name.endswith(".tar"):
        raise UsageError(f"cannot write {output}", "a bundle is a .tar", f"name it {output}.tar")
    inputs = {
        "bundler": BUNDLER,
        "stack": stack,
        "target": str(target),
        "locks": " ".join(locks),
        **_inputs(table, stack),
    }

    def build(temporary: Path) -> Made:
        """Gather and write the tar; what is made on the way lies beside it and goes in any case."""
        scratch = temporary.with_name(temporary.name.replace(".tmp", ".parts.tmp"))
        try:
            scratch.mkdir()
            entries, absent = gather(table, stack, target, scratch, locks)
            entries = sorted([*entries, *_checkout_entries(inputs)], key=lambda entry: entry.path)
            write(temporary, entries, absent, {"stack": stack, "target": str(target)})
        finally:
            manifest.remove(scratch)
        facts = {"members": len(entries), "bytes": temporary.stat().st_size, "absent": [vars(one) for one in absent]}
        return Made({output.name: sha256_file(temporary)}, facts=facts)

    return manifest.once(output, "bundle", inputs, build)


def show(output: Path, *, stack: str = "spark", machine: str = "", python: str = "", more: Sequence[str] = ()) -> None:
    """Make a bundle and say what is in it and what is not.

    It is for a machine whose `uname -m` is `machine` and a Python such as 3.12; `more` names locks besides LOCKS.
    """
    version = tuple(map(int, python.split("."))) if re.fullmatch(r"3\.\d+", python) else ()
    if python and not version:
        raise UsageError(f"{python} is no Python version", "it is not written as 3.12 is", "name one such as 3.12")
    if machine and machine not in MACHINES:
        told = f"what is pinned is for {' and '.join(MACHINES)}"
        raise UsageError(f"cannot bundle for {machine}", told, f"--machine {MACHINES[0]}")
    target = Target(machine or platform.machine())
    if version:
        target = Target(target.machine, (version[0], version[1]))
    made, new = make(output, stack=stack, target=target, locks=[*LOCKS, *more])
    size = f"{made.facts['members']} members, {made.facts['bytes'] / 1e9:.2f} GB"
    say(f"{output}: {'made' if new else 'unchanged'}, {size}")
    say(f"sha256 {made.outputs[output.name]}")
    for one in made.facts["absent"]:
        say(f"absent: {one['name']}, because {one['why']}\n  next: {one['command']}")


def _inputs(table: Pins, stack: str) -> dict[str, str]:
    """Return the hashes of what decides a bundle's content."""
    found = {f"checkout:{name}": sha256_file(file) for name, file in _checkout()}
    for name, pin in table.stack(stack).git.items():
        copy = manifest.current(sources.git_place(name, pin), "git", gitsource.inputs(pin))
        found |= {f"git:{name}": copy.outputs["listing"]} if copy else {}
    return found | {"vocabulary": str(envs.EMBEDDED.python.exists())}


def _checkout() -> list[tuple[str, Path]]:
    """Return (path, file) of what of the checkout goes along: pins, locks and patches."""
    files = [paths.ROOT / "pins.toml", *(paths.ROOT / "locks").iterdir(), *(paths.ROOT / "patches").rglob("*")]
    return sorted((str(file.relative_to(paths.ROOT)), file) for file in files if file.is_file())


def _checkout_entries(inputs: Mapping[str, str]) -> list[Entry]:
    """Return the checkout's members with the hashes they had at the start: an edit meanwhile is noticed, not packed."""
    return [Entry.of(name, file, inputs.get(f"checkout:{name}", "")) for name, file in _checkout()]


def gather(
    table: Pins, stack: str, target: Target, scratch: Path, locks: Sequence[str]
) -> tuple[list[Entry], list[Absent]]:
    """Bring what a bundle holds besides the checkout's files; return it with what is absent."""
    absent: list[Absent] = []
    files = [*_source_files(table, stack), *(pick for name in locks for pick in wheels.picks(lock_path(name), target))]
    entries = [_file(pick, fetch.fetch(pick.package, pick.filename, pick.sha256)) for pick in dict.fromkeys(files)]
    for found in (_torch(table, target), *_repositories(table, stack, scratch), _vocabulary(scratch)):
        (absent if isinstance(found, Absent) else entries).append(found)  # type: ignore[arg-type]
    named = {*files, *(Pick("torch", Path(e.path).name, e.sha256) for e in entries if "/torch-" in e.path)}
    entries += [Entry.of(path, page.encode()) for path, page in index_pages(named).items()]
    return entries, absent


def _source_files(table: Pins, stack: str) -> Iterator[Pick]:
    for component in table.stack(stack).components.values():
        if component.kind == "sdist":
            for name, sha256 in component.files.items():
                yield Pick(component.package or "", name, sha256)


def _file(pick: Pick, file: Path) -> Entry:
    return Entry.of(f"files/{pick.sha256}/{pick.filename}", file, pick.sha256)


def _torch(table: Pins, target: Target) -> Entry | Absent:
    """Bring torch for `target`: by pip for this machine, else from the cache only."""
    component = table.component("embedded", "torch")
    tag, ending = f"cp{target.python[0]}{target.python[1]}-", f"{target.machine}.whl"
    for name, sha256 in component.files.items():
        if f"-{tag}" in name and name.endswith(ending):
            here = target == Target(platform.machine())
            file = torch_cpu.fetch_torch(component) if here else fetch.cached(name, sha256)
            if file.is_file() and sha256_file(file) == sha256:
                return _file(Pick("torch", name, sha256), file)
            where = f"{file.parent} && cd {file.parent} && curl -fLO {torch_cpu.PYTORCH_CPU_INDEX}/{quote(name)}"
            return Absent(f"torch {component.version}", f"pip brings it for this machine only, not for {target}",
                          f"mkdir -p {where}, then make the bundle again")  # fmt: skip
    raise RuntimeSetupError(f"no torch is pinned for {target}", "pins.toml has no such wheel", "choose another target")


def _repositories(table: Pins, stack: str, scratch: Path) -> Iterator[Entry | Absent]:
    """Pack each needed repository that was brought."""
    for name, pin in table.stack(stack).git.items():
        place = sources.git_place(name, pin)
        if manifest.current(place, "git", gitsource.inputs(pin)):
            file = scratch / f"{name}.tar"
            parts = [
                Entry.of(path, place / path, sha256) for path, sha256 in sorted(archive.read_listing(place).items())
            ]
            with file.open("wb") as out:
                _write_tar(out, parts)
            yield Entry.of(sources.bundled_name(name, pin), file)
        elif pin.needed:
            yield Absent(
                name, "it was not brought to this machine", f"./inv sources, or by hand: {gitsource.command(name, pin)}"
            )


def _vocabulary(scratch: Path) -> Entry | Absent:
    """Have the embedded environment, which holds oss-harmony, write its vocabulary; `serve.harmony` checks the hash."""
    if not envs.EMBEDDED.python.exists():
        return Absent("vocabulary", "the embedded environment is not made", "./inv up, then ./inv bundle")
    run([envs.EMBEDDED.python, "-c", WRITE_VOCABULARY, scratch], cwd=paths.ROOT)
    return Entry.of("vocabulary/o200k_base.tiktoken", scratch / "o200k_base.tiktoken")


def index_pages(files: Iterable[Pick]) -> Mapping[str, str]:
    """Return the pages (path → HTML) of a package index over files/HASH/NAME."""
    packages: dict[str, list[str]] = defaultdict(list)
    for pick in sorted(files, key=lambda pick: pick.filename):
        link = f"../../files/{pick.sha256}/{quote(pick.filename)}#sha256={pick.sha256}"
        packages[canonicalize_name(pick.package)].append(f'<a href="{link}">{html.escape(pick.filename)}</a><br>')
    pages = {f"simple/{name}/index.html": _page(links) for name, links in packages.items()}
    return pages | {"simple/index.html": _page([f'<a href="{name}/">{name}</a><br>' for name in sorted(packages)])}


def _page(lines: Sequence[str]) -> str:
    return "\n".join(["<!DOCTYPE html>", *lines, ""])


def write(path: Path, entries: Sequence[Entry], absent: Sequence[Absent], about: Mapping[str, str]) -> None:
    """Write a bundle. Raises HashMismatchError if a file is not what its entry says, or changed meanwhile."""
    listed = {entry.path: {"sha256": entry.sha256, "size": entry.size} for entry in entries}
    value = {"schema": SCHEMA, **about, "members": listed, "absent": [vars(one) for one in absent]}
    index = Entry.of(offline.INDEX, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())
    require_space(path.parent, sum(entry.size for entry in entries), "the bundle")
    with path.open("wb") as out:
        _write_tar(out, [index, *entries])


def _write_tar(out: Any, entries: Iterable[Entry]) -> None:
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)  # owner 0, time 0, mode 0644
            info.size = entry.size
            with io.BytesIO(entry.source) if isinstance(entry.source, bytes) else entry.source.open("rb") as file:
                hashed = _Hashing(file)
                tar.addfile(info, hashed)  # type: ignore[arg-type]
            if hashed.digest.hexdigest() != entry.sha256:
                raise HashMismatchError(
                    f"{entry.path} cannot be packed",
                    f"{entry.source!s:.200} is not {entry.sha256}",
                    "remove that file, then run the same command again",
                )


class _Hashing:
    """A file that hashes what is read of it."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Read, and hash what was read."""
        data: bytes = self.file.read(size)
        self.digest.update(data)
        return data


def unpack(file: Path, folder: Path, *, sha256: str = "") -> tuple[Manifest, bool]:
    """Unpack the bundle `file` into `folder` and verify every member; return its manifest and whether it was done now.

    With `sha256` the whole file must have that hash. Raises ArchiveError or HashMismatchError that names the offending
    member, and UsageError if `folder` holds something else; nothing is left then.
    """
    if not file.is_file():
        raise UsageError(f"cannot unpack {file}", "there is no such file", "name a bundle made by ./inv bundle")
    if folder.exists() and not (folder / offline.INDEX).is_file():
        raise UsageError(f"cannot unpack into {folder}", "it exists and holds no bundle", "name a new folder")
    got = sha256_file(file)
    if sha256 not in ("", got):
        raise HashMismatchError(f"{file.name} is not the bundle that was made", f"wanted sha256 {sha256}, got {got}",
                                "copy it again")  # fmt: skip

    def build(temporary: Path) -> Made:
        """Unpack every member. Raises DiskFullError and ArchiveError."""
        require_space(folder.parent, file.stat().st_size, "the bundle's content")
        temporary.mkdir(parents=True)
        try:
            count = _unpack(file, temporary)
        except archive.MALFORMED as error:
            raise _refused(file, f"it is damaged or truncated: {error or type(error).__name__}") from error
        return Made({"index": sha256_file(temporary / offline.INDEX)}, facts={"members": count})

    return manifest.once(folder, "bundle.unpack", {"bundle": got, "bundler": BUNDLER}, build)


def _unpack(file: Path, folder: Path) -> int:
    wanted: dict[str, tuple[str, int]] | None = None
    done: set[str] = set()
    for member in members(file):
        path = checked_path(file, member, None)
        if wanted is None:
            if path != offline.INDEX or member.kind != "file":
                raise _refused(file, f"it begins with {member.name!r} instead of {offline.INDEX}")
            _, size = write_member(member, folder / path, MAX_INDEX)
            wanted = _read_index(file, (folder / path).read_bytes(), size)
            continue
        if path in done or path not in wanted:
            raise _refused(file, f"{member.name!r} {'stands in it twice' if path in done else 'is not in its index'}")
        hashed = write_member(member, folder / path, wanted[path][1])
        if hashed != wanted[path]:
            raise HashMismatchError(f"{file.name} is refused", f"{path} is not what the index says",
                                    "copy the bundle again; nothing of it was kept")  # fmt: skip
        done.add(path)
    if wanted is None or (missing := sorted(set(wanted) - done)):
        raise _refused(file, f"it is truncated: {', '.join(missing[:3]) if wanted else 'it is empty'} is missing")
    return len(done)


def _read_index(file: Path, data: bytes, size: int) -> dict[str, tuple[str, int]]:
    """Return (sha256, size) of each member. Raises ArchiveError if the index is not one of ours."""
    try:
        value = json.loads(data) if size <= MAX_INDEX else None
        if value is None or value["schema"] != SCHEMA:
            raise ValueError("another schema")  # noqa: TRY301
        found = {path: (str(one["sha256"]), int(one["size"])) for path, one in value["members"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refused(file, f"its {offline.INDEX} is not one that this Sparkforge reads: {error}") from error
    for path, (_, length) in found.items():
        if not unharmful(path) or path == offline.INDEX or length < 0 or any(p in found for p in archive.parents(path)):
            raise _refused(file, f"its {offline.INDEX} lists {path!r}")
    return found


def _is_bundle(path: Path) -> bool:
    """Tell whether a file begins as a bundle does."""
    try:
        return next(members(path)).name == offline.INDEX
    except (*archive.MALFORMED, ArchiveError, StopIteration, OSError):
        return False


def _refused(file: Path, reason: str) -> ArchiveError:
    return ArchiveError(
        f"{file.name} is refused", f"{reason}; nothing of it was kept", "copy the bundle again, or make it anew"
    )
