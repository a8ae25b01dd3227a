"""Where a file comes from: from its bytes, through the patches it carries, to a hash in `pins.toml`.

Whoever changes a file can also change the listings, manifests and RECORDs beside it, so these only claim where it comes
from. It is proven when a pinned archive is in the cache, has the hash in pins.toml, and its bytes with the patches of
this checkout applied again give the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from sparkforge import pins
from sparkforge.core import manifest
from sparkforge.core.console import echo
from sparkforge.core.errors import IntegrityError, PatchError
from sparkforge.core.files import sha256_file
from sparkforge.core.installed import parse_record
from sparkforge.core.paths import ROOT
from sparkforge.patching import upstream
from sparkforge.patching.fit import fit
from sparkforge.patching.hunks import Content, digest
from sparkforge.patching.series import Patch, Queue
from sparkforge.pins import Component, Pins, verify
from sparkforge.pins.locks import LOCKS
from sparkforge.pins.verify import WheelOrigin
from sparkforge.sources import archive, fetch

CLAIM = "the records beside the file: its pinned archive is not in the cache, or has no such file"


@dataclass(frozen=True)
class Link:
    """One step of the chain: its subject, its hash, where that is written, and whether a pinned archive proves it."""

    subject: str
    sha256: str | None
    known: str
    proven: bool = False

    def __str__(self) -> str:
        verdict = "proven by its pinned archive" if self.proven else f"claimed by {CLAIM}"
        return f"{self.subject}\n    sha256 {self.sha256 or '(none)'}\n    {self.known}\n    {verdict}"


@dataclass(frozen=True)
class Origin:
    """What the records beside a file say: upstream's file, the artifacts that may hold it, the patches, last first."""

    before: str | None
    listing: str
    artifacts: list[Link]
    queue: str = ""
    patches: tuple[Patch, ...] = ()


def provenance(file: Path, *, patches: Path = ROOT / "patches", table: Pins | None = None) -> list[Link]:
    """Return the chain from `file` back to a pinned artifact, the file itself first.

    `file` lies in a source tree that `sources` unpacked or in an environment's site-packages. Raises IntegrityError if
    a link is missing or does not fit, PatchError if the file was edited by hand.
    """
    file = Path(os.path.normpath(file.absolute()))  # without `..`
    root = _tree_of(file)
    path, table = str(file.relative_to(root)), table or pins.load()
    if (root.resolve() / path) != file.resolve():
        raise _no_provenance(file, "a symbolic link leads elsewhere", "name the file that it leads to")
    sha256 = sha256_file(file)
    if root.name == "site-packages":
        origin = _installed(root, path, sha256, table, patches)
    else:
        origin = _unpacked(root, path, sha256, table)
    chain = [Link(str(file), sha256, f"{path} in {root}")]
    for patch in origin.patches:
        reason = " · ".join(patch.header[field].splitlines()[0] for field in ("Description", "Origin"))
        chain.append(Link(f"patched by {origin.queue}/{patch.name}", patch.sha256, reason))
    if origin.before is None:
        chain.append(Link(f"{path} does not exist upstream", None, "the patches above make it"))
        rebuilt = {_patched(path, None, origin.patches): list[Link]()}
    else:
        chain.append(Link(f"{path} as upstream has it", origin.before, f"listed in {origin.listing}"))
        held = [(link, _held(link, path)) for link in origin.artifacts]
        rebuilt = {_patched(path, content, origin.patches): [link] for link, content in held if content is not None}
    if rebuilt and sha256 not in rebuilt:
        raise PatchError(
            f"{file} has no provenance",
            f"its pinned archive and patches make {', '.join(map(str, rebuilt))}, and it is {sha256}",
            "the records beside it were changed: remove the tree, then unpack or install it afresh",
            code="patch.modified",
        )
    return [replace(link, proven=bool(rebuilt)) for link in [*chain, *rebuilt.get(sha256, origin.artifacts)]]


def print_provenance(file: Path) -> None:
    """Print the chain of `file` to stdout. Raises the errors of `provenance`, and IntegrityError for a mere claim."""
    chain = provenance(file)
    echo("\n".join(map(str, chain)))
    if not chain[-1].proven:
        raise IntegrityError(
            f"the provenance of {file} is claimed, not proven",
            f"it is claimed by {CLAIM}",
            "docs/concepts/sources.md says what proves a link; "
            "in a source tree ./inv build --only sources fetches the pinned archive",
            code="integrity.provenance",
        )
    echo(f"proven by {chain[-1].subject}, {chain[-1].known}")


def _tree_of(file: Path) -> Path:
    if not file.is_file():
        raise _no_provenance(file, "there is no such file", "name a file of a source tree or an environment")
    for folder in file.parents:
        if folder.name == "site-packages" or manifest.load(folder):
            return folder
    raise _no_provenance(
        file,
        "no folder above it has a manifest of ours beside it, or is a site-packages",
        "name a file under .sparkforge/sources or .sparkforge/envs",
    )


def _unpacked(root: Path, path: str, sha256: str, table: Pins) -> Origin:
    """Return the origin of a file of a source tree: the archive or the repository in the tree's manifest."""
    tree_manifest = manifest.load(root)
    try:
        listing = archive.read_listing(root)
    except (OSError, UnicodeDecodeError):
        listing = {}
    if tree_manifest is None or archive.tree_sha256(listing) != tree_manifest.outputs.get("listing"):
        why = "its listing is gone or not the one its manifest names"
        raise _no_provenance(root, why, f"rm -r {root}*, then ./inv build --only sources")
    _require_same(root, path, listing.get(path), sha256)
    inputs = tree_manifest.inputs
    if tree_manifest.stage == "git":
        artifacts = [
            Link(f"{pin.repository} at {pin.commit}", None, f"pinned in pins.toml as {stack_name}/git/{name}")
            for stack_name, stack in table.stacks.items()
            for name, pin in stack.git.items()
            if (inputs.get("repository"), inputs.get("commit")) == (pin.repository, pin.commit)
        ][:1]
        if not artifacts:
            raise _not_pinned("this repository", f"pins.toml has no {inputs}")
    else:
        archives = [(name, value) for name, value in inputs.items() if name.endswith((".tar.gz", ".whl"))]
        artifacts = [_pinned(name, value, table) for name, value in archives]
    return Origin(sha256, f"{archive.listing_path(root).name}, made by stage {tree_manifest.stage}", artifacts)


def _installed(root: Path, path: str, sha256: str, table: Pins, patches: Path) -> Origin:
    """Return the origin of an installed file: its wheel's RECORD, then upstream's wheel and the patches in it."""
    for record in sorted(root.glob("*.dist-info/RECORD")):
        info = record.parent
        try:
            text = record.read_text(encoding="utf-8")
        except ValueError as error:
            raise _no_provenance(path, f"{record} cannot be read: {error}", "install that package afresh") from error
        lines = parse_record(text, str(record), strict=False) if path in text else ()
        listed = next((line.sha256 for line in lines if line.path == path), None)
        if listed is None:
            continue
        _require_same(root, path, listed, sha256)
        if not (info / verify.ORIGIN).is_file():
            return Origin(sha256, f"{info.name}/RECORD", _distribution(info.name.removesuffix(".dist-info"), table))
        wheel = verify.read_origin(info)
        if path.startswith(f"{info.name}/"):
            raise _no_provenance(path, "it was written when the wheel was patched", "look at its patches/upstream.json")
        artifact, hashes = _pinned(wheel.filename, wheel.sha256, table), wheel.files.get(path)
        if hashes is None:
            return Origin(sha256, f"{info.name}/RECORD", [artifact])
        queue = Queue.load(patches / f"{wheel.upstream}-{wheel.version}")
        touching = _touching(path, wheel, queue)
        return Origin(hashes.before, f"{info.name}/patches/upstream.json", [artifact], queue.name, touching)
    raise _unlisted(root, path)


def _touching(path: str, wheel: WheelOrigin, queue: Queue) -> tuple[Patch, ...]:
    """Return the patches of a wheel that touch `path`, the last applied first, as this checkout has them."""
    present = {patch.name: patch.sha256 for patch in queue.patches}
    for patch in wheel.patches:
        if present.get(patch.name) != patch.sha256:
            raise IntegrityError(
                f"the patch {patch.name} cannot be shown",
                f"it is not in patches/{queue.name}/series, or not the one that the wheel has: {patch.sha256}",
                "git log -- patches shows its history; ./inv up installs the wheel of the queue as it is now",
                code="integrity.provenance",
            )
    applied = queue.for_files(wheel.files).patches
    return tuple(patch for patch in reversed(applied) if any(change.path == path for change in patch.changes))


def _patched(path: str, content: Content, patches: tuple[Patch, ...]) -> str | None:
    """Return the sha256 of upstream's file after its patches."""
    for change in (change for patch in reversed(patches) for change in patch.changes if change.path == path):
        content = fit(change, content).content
    return digest(content)


def _held(artifact: Link, path: str) -> Content:
    """Return the bytes of `path` in a pinned archive; None if it is not in the cache, or not the pinned one."""
    name, sha256 = artifact.subject, artifact.sha256
    if sha256 is None or not name.endswith((".tar.gz", ".whl")):
        return None
    file = fetch.cached(name, sha256)
    if not file.is_file() or sha256_file(file) != sha256:
        return None
    return upstream.members(file, name.removesuffix(".tar.gz") if name.endswith(".tar.gz") else None, {path})[path]


def _components(table: Pins) -> Iterator[tuple[str, Component]]:
    for stack_name, stack in table.stacks.items():
        for name, component in stack.components.items():
            known = f"pinned in pins.toml as {stack_name}/{name}: {component.package} {component.version}"
            yield known, component


def _pinned(name: str, sha256: str, table: Pins) -> Link:
    """Return the link of a file of pins.toml. Raises IntegrityError if it has no such file."""
    for known, component in _components(table):
        if component.files.get(name) == sha256:
            return Link(name, sha256, known)
    raise _not_pinned(name, f"pins.toml has no file of that name with sha256 {sha256}")


def _distribution(name: str, table: Pins) -> list[Link]:
    """Return the pinned wheels of one installed distribution (`name-version`), else the lock that names it."""
    package, _, version = name.rpartition("-")
    canonical = canonicalize_name(package)
    for known, component in _components(table):
        if component.package and (canonicalize_name(component.package), component.version) == (canonical, version):
            files = [Link(file, value, known) for file, value in component.files.items() if file.endswith(".whl")]
            return files or [Link(name, None, known)]
    for lock in sorted(LOCKS.glob("*.txt")):
        if f"\n{canonical}=={version} " in lock.read_text(encoding="utf-8"):
            return [Link(f"{canonical} {version}", sha256_file(lock), f"hash-locked in locks/{lock.name}")]
    raise _not_pinned(name, "neither pins.toml nor a lock names it: it was installed by hand")


def _require_same(root: Path, path: str, listed: str | None, sha256: str) -> None:
    if listed is None:
        raise _unlisted(root, path)
    if listed != sha256:
        raise PatchError(
            f"{path} in {root} has no provenance",
            f"upstream's bytes are {listed}",
            "keep your edits as a patch, then unpack or install it afresh",
            code="patch.modified",
        )


def _unlisted(root: Path, path: str) -> IntegrityError:
    why = "what this tree came from holds no such file"
    return _no_provenance(f"{path} in {root}", why, "it was made later, by a build or by hand")


def _no_provenance(name: object, why: str, fix: str) -> IntegrityError:
    return IntegrityError(f"{name} has no provenance", why, fix, code="integrity.provenance")


def _not_pinned(name: str, why: str) -> IntegrityError:
    fix = "remove it, then ./inv build --only sources, or ./inv up for an environment"
    return IntegrityError(f"{name} is not pinned", why, fix, code="integrity.provenance")
