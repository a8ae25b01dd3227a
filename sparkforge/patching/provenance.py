"""Where a file comes from: from its bytes, through the patches it carries, to a hash in `pins.toml`.

Every link of the chain is checked, and one that does not hold is an error. Whoever changes the file can also change the
listings, manifests and RECORDs beside it: a link that rests only on them is claimed. It is proven when the pinned
archive is in the cache, has the hash in pins.toml and holds the same bytes, and the patches of this checkout, applied
to them again, give the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from sparkforge import pins
from sparkforge.core import manifest
from sparkforge.core.console import echo
from sparkforge.core.errors import IntegrityError, PatchError
from sparkforge.core.files import sha256_file
from sparkforge.core.installed import parse_record
from sparkforge.core.manifest import Manifest
from sparkforge.core.paths import ROOT
from sparkforge.patching import upstream
from sparkforge.patching.fit import fit
from sparkforge.patching.hunks import Content, digest
from sparkforge.patching.series import Patch, Queue
from sparkforge.pins import Pins, verify
from sparkforge.pins.locks import LOCKS
from sparkforge.pins.verify import WheelOrigin
from sparkforge.sources import archive, fetch


@dataclass(frozen=True)
class Link:
    """One step of the chain: its subject, its hash, how that is known, and whether a hash that we hold proves it."""

    subject: str
    sha256: str | None
    known: str
    proven: bool
    proof: str  # what proves it, or what only claims it

    def __str__(self) -> str:
        verdict = "proven by" if self.proven else "claimed by"
        return f"{self.subject}\n    sha256 {self.sha256 or '(none)'}\n    {self.known}\n    {verdict} {self.proof}"


@dataclass(frozen=True)
class UpstreamFile:
    """Upstream's file: its links, whether a pinned archive proves them, and the patches that changed it, last first."""

    links: list[Link]
    proven: bool
    content: Content = None
    queue: str = ""
    patches: tuple[Patch, ...] = ()


def provenance(file: Path, *, patches: Path = ROOT / "patches", table: Pins | None = None) -> list[Link]:
    """Return the chain from `file` back to a pinned artifact, the file itself first.

    `file` lies in a source tree that `sources` unpacked or in an environment's site-packages. Raises IntegrityError if
    a link is missing or does not fit, PatchError if the file was edited by hand.
    """
    file = Path(os.path.normpath(file.absolute()))  # without `..`
    root = tree_of(file)
    path, table = str(file.relative_to(root)), table or pins.load()
    if (root.resolve() / path) != file.resolve():
        raise _no_provenance(file, "a symbolic link leads elsewhere", "name the file that it leads to")
    sha256 = sha256_file(file)
    if root.name == "site-packages":
        origin = _installed(root, path, sha256, table, patches)
    else:
        origin = _unpacked(root, path, sha256, table)
    if origin.proven:
        rebuilt = origin.content
        for change in (change for patch in reversed(origin.patches) for change in patch.changes if change.path == path):
            rebuilt = fit(change, rebuilt).content
        if digest(rebuilt) != sha256:
            raise PatchError(
                f"{file} has no provenance",
                f"its pinned archive and patches make {digest(rebuilt)}, and it is {sha256}",
                "the records beside it were changed: remove the tree, then unpack or install it afresh",
                code="patch.modified",
            )
    evidence = "the links below" if origin.proven else "the records beside it: upstream's bytes are not proven"
    applied = f"patches/{origin.queue} of this checkout, applied again"
    return [
        Link(str(file), sha256, f"{path} in {root}", origin.proven, evidence),
        *(
            Link(
                f"patched by {origin.queue}/{patch.name}",
                patch.sha256,
                " · ".join(patch.header[field].splitlines()[0] for field in ("Description", "Origin")),
                origin.proven,
                applied if origin.proven else evidence,
            )
            for patch in origin.patches
        ),
        *origin.links,
    ]


def print_provenance(file: Path) -> None:
    """Print the chain of `file` to stdout. Raises the errors of `provenance`, and IntegrityError for a mere claim."""
    chain = provenance(file)
    echo("\n".join(map(str, chain)))
    if claimed := [link for link in chain if not link.proven]:
        raise IntegrityError(
            f"the provenance of {file} is claimed, not proven",
            f"{claimed[-1].subject} is claimed by {claimed[-1].proof}",
            "docs/concepts/sources.md says what proves a link; "
            "in a source tree ./inv build --only sources fetches the pinned archive",
            code="integrity.provenance",
        )
    echo(f"proven by {chain[-1].subject}, {chain[-1].known}")


def tree_of(file: Path) -> Path:
    """Return the tree that `file` lies in. Raises IntegrityError if none is recorded."""
    if not file.is_file():
        raise _no_provenance(file, "there is no such file", "name a file of a source tree or an environment")
    for folder in file.absolute().parents:
        if folder.name == "site-packages" or manifest.load(folder):
            return folder
    raise _no_provenance(
        file,
        "no folder above it has a manifest of ours beside it, or is a site-packages",
        "name a file under .sparkforge/sources or .sparkforge/envs",
    )


def _patches(path: str, wheel: WheelOrigin, folder: Path) -> tuple[Patch, ...]:
    """Return the patches of a wheel that touch `path`, the last applied first, as this checkout has them."""
    queue = Queue.load(folder / f"{wheel.upstream}-{wheel.version}")
    present = {patch.name: patch.sha256 for patch in queue.patches}
    for patch in wheel.patches:
        if present.get(patch.name) != patch.sha256:
            raise IntegrityError(
                f"the patch {patch.name} cannot be shown",
                f"it is not in {folder / queue.name}/series, or not the one that the wheel has: {patch.sha256}",
                "git log -- patches shows its history; ./inv up installs the wheel of the queue as it is now",
                code="integrity.provenance",
            )
    applied = queue.for_files(wheel.files).patches
    touching = [patch for patch in applied if any(change.path == path for change in patch.changes)]
    return tuple(reversed(touching))


def _held(name: str, sha256: str, path: str) -> Content:
    """Return the bytes of `path` in a pinned archive; None if it is not in the cache, or not the pinned one."""
    file = fetch.cached(name, sha256)
    if not file.is_file() or sha256_file(file) != sha256:
        return None
    return upstream.members(file, name.removesuffix(".tar.gz") if name.endswith(".tar.gz") else None, {path})[path]


def _unpacked(root: Path, path: str, sha256: str, table: Pins) -> UpstreamFile:
    """Return upstream's file, and the archive or repository that the tree at `root` was made from."""
    tree_manifest = manifest.load(root)
    try:
        listing = archive.read_listing(root)
    except (OSError, UnicodeDecodeError):
        listing = {}
    if tree_manifest is None or archive.tree_sha256(listing) != tree_manifest.outputs.get("listing"):
        raise _no_provenance(
            root,
            "its listing is gone or not the one its manifest names",
            f"rm -r {root}*, then ./inv build --only sources",
        )
    _require_same(root, path, listing.get(path), sha256)
    listing_name = archive.listing_path(root).name
    known = f"listed in {listing_name}, made by stage {tree_manifest.stage}"
    subject = f"{path} as upstream has it"
    if tree_manifest.stage == "git":
        evidence = f"{listing_name}: pins.toml has the commit, and no hash of the files"
        return UpstreamFile(
            [Link(subject, sha256, known, False, evidence), _repository(tree_manifest, table, evidence)], proven=False
        )
    archives = [(name, value) for name, value in tree_manifest.inputs.items() if name.endswith((".tar.gz", ".whl"))]
    for name, value in archives:
        pinned = _pinned(name, value, table)
        if (content := _held(name, value, path)) is not None:
            _require_same(root, path, digest(content), sha256)
            evidence = f"the bytes of {name} in the cache, whose sha256 pins.toml has"
            return UpstreamFile(
                [Link(subject, sha256, known, True, evidence), Link(name, value, pinned, True, "pins.toml")],
                True,
                content,
            )
    evidence = f"{listing_name}: the pinned archive is not in the cache, or has no such file"
    links = [Link(name, value, _pinned(name, value, table), False, evidence) for name, value in archives]
    return UpstreamFile([Link(subject, sha256, known, False, evidence), *links], proven=False)


def _pinned(name: str, sha256: str, table: Pins) -> str:
    """Return where pins.toml has a file. Raises IntegrityError if it has it nowhere."""
    for stack_name, stack in table.stacks.items():
        for component_name, component in stack.components.items():
            if component.files.get(name) == sha256:
                return f"pinned in pins.toml as {stack_name}/{component_name}: {component.package} {component.version}"
    raise IntegrityError(
        f"{name} is not pinned",
        f"pins.toml has no file of that name with sha256 {sha256}",
        "./inv build --only sources",
        code="integrity.provenance",
    )


def _repository(tree_manifest: Manifest, table: Pins, evidence: str) -> Link:
    inputs = tree_manifest.inputs
    for stack_name, stack in table.stacks.items():
        for name, pin in stack.git.items():
            if (inputs.get("repository"), inputs.get("commit")) == (pin.repository, pin.commit):
                known = f"pinned in pins.toml as {stack_name}/git/{name}"
                return Link(f"{pin.repository} at {pin.commit}", None, known, False, evidence)
    raise IntegrityError(
        "this repository is not pinned",
        f"pins.toml has no {inputs}",
        "./inv build --only sources",
        code="integrity.provenance",
    )


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


def _installed(root: Path, path: str, sha256: str, table: Pins, patches: Path) -> UpstreamFile:
    """Return where an installed file comes from: its wheel's RECORD, then upstream's wheel and the patches in it."""
    for record in sorted(root.glob("*.dist-info/RECORD")):
        info = record.parent
        if (listed := _recorded(record, path)) is None:
            continue
        _require_same(root, path, listed, sha256)
        if not (info / verify.ORIGIN).is_file():
            links, content = _distribution(info.name.removesuffix(".dist-info"), path, table)
            return _as_listed(path, sha256, f"{info.name}/RECORD", links, content)
        wheel = verify.read_origin(info)
        if path.startswith(f"{info.name}/"):
            raise _no_provenance(path, "it was written when the wheel was patched", "look at its patches/upstream.json")
        hashes = wheel.files.get(path)
        before = hashes.before if hashes else sha256
        touching = _patches(path, wheel, patches) if hashes else ()
        pinned = _pinned(wheel.filename, wheel.sha256, table)
        queue = f"{wheel.upstream}-{wheel.version}"
        if before is None:
            subject = f"{path} does not exist upstream"
            link = Link(subject, None, "the patches above make it", True, "the patches themselves")
            return UpstreamFile([link], True, None, queue, touching)
        content = _held(wheel.filename, wheel.sha256, path)
        if content is not None:
            _require_same(root, path, digest(content), before)
        listing = f"{info.name}/{'patches/upstream.json' if hashes else 'RECORD'}"
        evidence = "pins.toml" if content is not None else "the wheel's name: it is not in the cache"
        link = Link(wheel.filename, wheel.sha256, pinned, content is not None, evidence)
        return replace(_as_listed(path, before, listing, [link], content), queue=queue, patches=touching)
    raise _unlisted(root, path)


def _as_listed(path: str, sha256: str, listing: str, links: list[Link], content: Content) -> UpstreamFile:
    """Return upstream's file as `listing` has it; `content` has its bytes where the wheel is in the cache."""
    proven = content is not None
    if proven and digest(content) != sha256:
        raise _no_provenance(path, f"its wheel holds {digest(content)}, and {sha256} is recorded", "install it afresh")
    evidence = "the bytes of a wheel in the cache, whose sha256 pins.toml has"
    if not proven:
        evidence = f"{listing}, which lies beside it"
    link = Link(f"{path} as the wheel has it", sha256, f"listed in {listing}", proven, evidence)
    return UpstreamFile([link, *links], proven, content)


def _recorded(record: Path, path: str) -> str | None:
    """Return the hex sha256 that a RECORD has for `path`. Raises IntegrityError if it cannot be read."""
    try:
        text = record.read_text(encoding="utf-8")
    except ValueError as error:
        raise _no_provenance(path, f"{record} cannot be read: {error}", "install that package afresh") from error
    if path not in text:
        return None
    return next((line.sha256 for line in parse_record(text, str(record), strict=False) if line.path == path), None)


def _distribution(name: str, path: str, table: Pins) -> tuple[list[Link], Content]:
    """Return the pins of one installed distribution (`name-version`), else the lock that names it.

    With the bytes of `path` in one of its wheels, if that is in the cache.
    """
    evidence = "the distribution's name: its wheel is not in the cache, or has no such file"
    package, _, version = name.rpartition("-")
    canonical = canonicalize_name(package)
    for stack_name, stack in table.stacks.items():
        for component_name, component in stack.components.items():
            is_package = component.package and canonicalize_name(component.package) == canonical
            if is_package and component.version == version:
                known = f"pinned in pins.toml as {stack_name}/{component_name}"
                for file, sha256 in component.files.items():
                    if file.endswith(".whl") and (content := _held(file, sha256, path)) is not None:
                        return [Link(file, sha256, known, True, "pins.toml")], content
                known += ": one of its files"
                return [Link(file, sha256, known, False, evidence) for file, sha256 in component.files.items()], None
    for lock in sorted(LOCKS.glob("*.txt")):
        if f"\n{canonical}=={version} " in lock.read_text(encoding="utf-8"):
            known = f"hash-locked in locks/{lock.name}"
            return [Link(f"{canonical} {version}", sha256_file(lock), known, False, evidence)], None
    raise IntegrityError(
        f"{name} is not pinned",
        "neither pins.toml nor a lock names it",
        "it was installed by hand",
        code="integrity.provenance",
    )
