"""Where a file comes from: from its bytes, through the patches it carries, to a hash in `pins.toml`.

Every link is checked as it is followed. A link that does not hold is an error, so that what is printed is proven.
"""

from __future__ import annotations

import base64
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from forge import archive, manifest, pins
from forge.locks import LOCKS
from forge.manifest import Manifest
from forge.pins import GitSource, Pins
from forge.series import Patch
from forge.tree import Record, Tree, digest, read, upstreams
from sparkforge.errors import ProvenanceError, TreeModifiedError
from sparkforge.files import sha256_file
from sparkforge.paths import ROOT


@dataclass(frozen=True)
class Link:
    """One step of the chain: what it is, its hash, and how that is known."""

    what: str
    sha256: str | None
    known: str

    def __str__(self) -> str:
        return f"{self.what}\n    sha256 {self.sha256 or '(none)'}\n    {self.known}"


def provenance(file: Path, *, patches: Path = ROOT / "patches", table: Pins | None = None) -> list[Link]:
    """Return the chain from `file` back to a pinned artifact, the file itself first.

    `file` lies in a source tree that `sources` unpacked or in an environment's site-packages. Raises ProvenanceError if
    a link is missing or does not fit, TreeModifiedError if the file was edited by hand.
    """
    root = tree_of(file)
    path, table = str(file.absolute().relative_to(root)), table or pins.load()
    trees = [Tree(root, upstream) for upstream in upstreams(root)]
    now = read(root, path)
    record = next((tree.record for tree in trees if tree.record and path in tree.record.files), None)
    chain = [Link(str(file), digest(now), f"{path} in {root}")]
    upstream = digest(now)
    if record:
        before, after = record.files[path].before, record.files[path].after
        if digest(now) != after:
            raise TreeModifiedError(f"{file} has no provenance", f"the patch queue left it as {after}",
                                    "./inv patch puts it back or says what is in the way")  # fmt: skip
        chain += _patches(path, record, patches)
        upstream = before
    if upstream is None:
        return [*chain, Link(f"{path} does not exist upstream", None, "the patches above make it")]
    return [*chain, *(_installed if root.name == "site-packages" else _unpacked)(root, path, upstream, table)]


def show(file: Path) -> None:
    """Print the chain of `file` to stdout. Raises the errors of `provenance`."""
    sys.stdout.write("\n".join(map(str, provenance(file))) + "\n")


def tree_of(file: Path) -> Path:
    """Return the tree that `file` lies in. Raises ProvenanceError if none is recorded."""
    if not file.is_file():
        raise ProvenanceError(
            f"{file} has no provenance", "there is no such file", "name a file of a source tree or an environment"
        )
    for folder in file.absolute().parents:
        if folder.name == "site-packages" or manifest.load(folder):
            return folder
    raise ProvenanceError(
        f"{file} has no provenance",
        "no folder above it has a manifest of ours beside it, or is a site-packages",
        "name a file under .sparkforge/sources or .sparkforge/envs",
    )


def _patches(path: str, record: Record, folder: Path) -> Iterator[Link]:
    """Yield one link for each patch of the tree's queue that touches `path`, the last applied first."""
    queue = folder / f"{record.upstream}-{record.version}"
    for name, sha256 in reversed(record.patches):
        file = queue / name
        if not file.is_file() or (patch := Patch.load(file)).sha256 != sha256:
            raise ProvenanceError(
                f"the patch {name} cannot be shown",
                f"{file} is gone, or not the one that the tree has: {sha256}",
                "git log -- patches shows its history; ./inv patch applies the queue as it is now",
            )
        if any(change.path == path for change in patch.changes):
            told = " · ".join(patch.header[field].splitlines()[0] for field in ("Description", "Origin"))
            yield Link(f"patched by {queue.name}/{name}", sha256, told)


def _unpacked(root: Path, path: str, sha256: str, table: Pins) -> Iterator[Link]:
    """Yield upstream's file, and the archive or repository that the tree at `root` was made from."""
    made = manifest.load(root)
    try:
        listing = archive.read_listing(root)
    except OSError:
        listing = {}
    if made is None or archive.tree_sha256(listing) != made.outputs.get("listing"):
        raise ProvenanceError(f"{root} has no provenance", "its listing is gone or not the one its manifest names",
                              f"rm -r {root}*, then ./inv sources")  # fmt: skip
    _require_same(root, path, listing.get(path), sha256)
    yield Link(
        f"{path} as upstream has it", sha256, f"listed in {archive.listing_path(root).name}, made by stage {made.stage}"
    )
    yield from _repository(made, table) if made.stage == "git" else _archive(made, table)


def _archive(made: Manifest, table: Pins) -> Iterator[Link]:
    for name, sha256 in made.inputs.items():
        if name.endswith((".tar.gz", ".whl")):
            yield _pinned(name, sha256, table)


def _pinned(name: str, sha256: str, table: Pins) -> Link:
    for stack_name, stack in table.stacks.items():
        for component_name, component in stack.components.items():
            if component.files.get(name) == sha256:
                where = f"pinned in pins.toml as {stack_name}/{component_name}: {component.package} {component.version}"
                return Link(name, sha256, where)
    raise ProvenanceError(
        f"{name} is not pinned", f"pins.toml has no file of that name with sha256 {sha256}", "./inv sources"
    )


def _repository(made: Manifest, table: Pins) -> Iterator[Link]:
    for stack_name, stack in table.stacks.items():
        for name, pin in stack.git.items():
            if _same_pin(made, pin):
                yield Link(f"{pin.repository} at {pin.commit}", None, f"pinned in pins.toml as {stack_name}/git/{name}")
                return
    raise ProvenanceError("this repository is not pinned", f"pins.toml has no {made.inputs}", "./inv sources")


def _same_pin(made: Manifest, pin: GitSource) -> bool:
    return (made.inputs.get("repository"), made.inputs.get("commit")) == (pin.repository, pin.commit)


def _require_same(root: Path, path: str, listed: str | None, sha256: str) -> None:
    if listed is None:
        raise ProvenanceError(f"{path} in {root} has no provenance", "what this tree came from holds no such file",
                              "it was made later, by a build or by hand")  # fmt: skip
    if listed != sha256:
        raise TreeModifiedError(f"{path} in {root} has no provenance", f"upstream's bytes are {listed}",
                                "keep your edits as a patch, then unpack or install it afresh")  # fmt: skip


def _installed(root: Path, path: str, sha256: str, table: Pins) -> Iterator[Link]:
    """Yield the wheel's own record of the file, and where that distribution is pinned or locked."""
    for record in sorted(root.glob("*.dist-info/RECORD")):
        if (listed := _recorded(record, path)) is not None:
            _require_same(root, path, listed, sha256)
            yield Link(f"{path} as the wheel has it", sha256, f"listed in {record.parent.name}/RECORD")
            yield from _distribution(record.parent.name.removesuffix(".dist-info"), table)
            return
    _require_same(root, path, None, sha256)


def _recorded(record: Path, path: str) -> str | None:
    """Return the hex sha256 that a RECORD has for `path`; it has base64 without padding (PEP 427)."""
    with record.open(newline="", encoding="utf-8") as file:
        for row in csv.reader(file):
            if row[0] == path and row[1].startswith("sha256="):
                return base64.urlsafe_b64decode(row[1].removeprefix("sha256=") + "=").hex()
    return None


def _distribution(name: str, table: Pins) -> Iterator[Link]:
    """Yield the pins of one installed distribution (`name-version`), else the lock that names it."""
    package, _, version = name.rpartition("-")
    wanted = canonicalize_name(package)
    for stack_name, stack in table.stacks.items():
        for component_name, one in stack.components.items():
            if one.package and canonicalize_name(one.package) == wanted and one.version == version:
                for file, sha256 in one.files.items():
                    yield Link(file, sha256, f"pinned in pins.toml as {stack_name}/{component_name}: one of its files")
                return
    for lock in sorted(LOCKS.glob("*.txt")):
        if f"\n{wanted}=={version} " in lock.read_text(encoding="utf-8"):
            yield Link(f"{wanted} {version}", sha256_file(lock), f"hash-locked in locks/{lock.name}")
            return
    raise ProvenanceError(f"{name} is not pinned", "neither pins.toml nor a lock names it", "it was installed by hand")
