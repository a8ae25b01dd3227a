"""The sources of a build from source, unpacked or checked out in the state folder, by hash.

A tree is in `sources/NAME-VERSION/HASH`, where HASH is the first 12 digits of the archive's sha256 or of the commit.
Beside it, `HASH.sha256` lists its files in the format of `sha256sum --check`, and `HASH.manifest.json`, written last,
names its origin. The id of a commit is a hash over its whole tree, submodules included, and git checks every object
that it receives; the tree's hash is compared too. The folder `.git` is not kept.
"""

import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkforge import pins
from sparkforge.core import git, paths
from sparkforge.core.console import say
from sparkforge.core.errors import InputError, IntegrityError, NetworkError, ProcessError, SparkforgeError
from sparkforge.core.files import sha256_file
from sparkforge.core.manifest import Made, Manifest, once, remove
from sparkforge.pins import Component, GitSource, Pins
from sparkforge.sources import archive, fetch, offline

UNPACKER = "1"  # increase it when archive.py unpacks the same archive differently
DIGITS = 12
ARCHIVE = ".tar.gz"
UNKNOWN = "unknown"
# Added to the settings of sparkforge.core.git. Our builds read no file that Git LFS stores.
SETTINGS = ("core.hooksPath=/dev/null", "core.symlinks=true", "advice.detachedHead=false", "init.defaultBranch=main",
            "filter.lfs.smudge=", "filter.lfs.required=false",
            "http.lowSpeedLimit=1000", "http.lowSpeedTime=60")  # fmt: skip

State = Literal["made", "unchanged", "file", "left out", "missing"]


@dataclass(frozen=True)
class SourceTree:
    """One source: its folder or file (None: there is none), its state, and a note for the user."""

    name: str
    version: str
    path: Path | None
    state: State
    note: str
    variable: str | None = None  # the variable that names the folder for a build

    def __str__(self) -> str:
        mark = {"missing": "✗", "left out": "-"}.get(self.state, "✓")
        return f"{mark} {self.name} {self.version}: {self.state} · {self.note}"


def fetch_sources(stack: str, *, table: Pins | None = None, git: bool = True) -> list[SourceTree]:
    """Fetch every source of `stack` and return them, including those that are left out on purpose.

    With `git` False only files of the package index are fetched. A repository that cannot be fetched is returned as
    missing (`require_all`). Raises the errors of `fetch` and `archive`.
    """
    chosen = (table or pins.load()).stack(stack)
    trees = [tree for name, component in chosen.components.items() for tree in _fetch_component(name, component)]
    return [*trees, *(fetch_repository(name, pin, git=git) for name, pin in chosen.git.items())]


def print_sources(stack: str, *, git: bool) -> None:
    """Fetch every source of `stack` and print where each is. Raises as `fetch_sources` and `require_all` do."""
    table = pins.load()
    trees = fetch_sources(stack, table=table, git=git)
    for tree in trees:
        say(str(tree))
    require_all(trees, table.stack(stack).git)


def require_all(trees: list[SourceTree], pinned: Mapping[str, GitSource]) -> None:
    """Raise NetworkError that names each missing source, with the command that fetches it by hand."""
    if missing := [tree for tree in trees if tree.state == "missing"]:
        why = "\n        ".join(f"{tree.name}: {tree.note}" for tree in missing)
        fix = "\n        ".join(fetch_command(tree.name, pinned[tree.name]) for tree in missing)
        raise NetworkError(f"{len(missing)} of {len(trees)} sources are missing", why, fix, code="network.fetch")


def tree_folder(component: Component, filename: str) -> Path:
    """Return the folder to which an archive of `component` is unpacked."""
    return sources_folder() / filename.removesuffix(ARCHIVE) / component.files[filename][:DIGITS]


def repository_folder(name: str, pin: GitSource) -> Path:
    """Return the folder to which a repository is checked out."""
    return sources_folder() / f"{name}-{pin.tag[:DIGITS]}" / pin.commit[:DIGITS]


def sources_folder() -> Path:
    """Return the folder of all sources."""
    return paths.state() / "sources"


def _fetch_component(name: str, component: Component) -> Iterator[SourceTree]:
    if component.kind != "sdist":
        return
    for filename in component.files:
        if filename.endswith(ARCHIVE):
            manifest, new = unpack_archive(component, filename)
            folder, note = tree_folder(component, filename), f"{manifest.facts['files']} files"
            yield SourceTree(name, component.version, folder, "made" if new else "unchanged", note)
        else:
            path = fetch.fetch_pinned(component, filename)
            yield SourceTree(name, component.version, path, "file", filename)


def unpack_archive(component: Component, filename: str) -> tuple[Manifest, bool]:
    """Fetch and unpack an archive of `component` unless that is done; return its manifest and whether it is new."""
    target, inputs = tree_folder(component, filename), {filename: component.files[filename], "unpacker": UNPACKER}

    def make(temporary: Path) -> Made:
        file = fetch.fetch_pinned(component, filename)
        archive.require_space_for(file, target)
        listing = archive.unpack(file, temporary, top=filename.removesuffix(ARCHIVE))
        archive.write_listing(target, listing)
        return Made({"listing": archive.tree_sha256(listing)}, facts={"files": len(listing)})

    return once(target, "sources", inputs, make)


def fetch_repository(name: str, pin: GitSource, *, git: bool) -> SourceTree:
    """Fetch a needed repository; report one that is not needed or could not be fetched."""
    version = pin.tag[:DIGITS]
    if not pin.needed:
        return SourceTree(name, version, None, "left out", pin.why)
    if not git:
        return SourceTree(name, version, None, "left out", "not requested: files of the package index only")
    target = repository_folder(name, pin)
    fetch_tree = _unpack_bundled if offline.folder() else clone
    try:
        _, new = fetch_tree(name, pin, target)
    except IntegrityError:
        raise
    except SparkforgeError as error:
        return SourceTree(name, version, None, "missing", error.why.splitlines()[-1])
    return SourceTree(name, version, target, "made" if new else "unchanged", pin.why, pin.src_dir)


def _unpack_bundled(name: str, pin: GitSource, target: Path) -> tuple[Manifest, bool]:
    """Unpack a repository's copy from the bundle. Raises NetworkError if the bundle has no copy of this commit."""
    file = Path(offline.folder() or "") / bundled_path(name, pin)

    def make(temporary: Path) -> Made:
        if not file.is_file():
            fix = "without --offline   # or read the list `absent` in the bundle's index.json"
            raise NetworkError(f"cannot fetch {name}", "the bundle has no copy", fix, code="network.fetch")
        listing = archive.unpack(file, temporary)
        archive.write_listing(target, listing)
        # The outputs have no commit, because git compared nothing: only the bundle claims the commit of these files.
        facts = {"bundle": file.name, "claimed_commit": pin.commit}
        return Made({"listing": archive.tree_sha256(listing)}, facts=facts)

    return once(target, "git", manifest_inputs(pin), make)


def bundled_path(name: str, pin: GitSource) -> str:
    """Return the path of a repository's copy in a bundle."""
    return f"git/{name}-{pin.commit}.tar"


def clone(name: str, pin: GitSource, target: Path) -> tuple[Manifest, bool]:
    """Check out `pin` to `target` unless it exists; return its manifest and whether it was fetched now.

    Raises InputError if its commit is unknown, NetworkError if it cannot be fetched, IntegrityError if it differs from
    the pin or has a link that points outside; nothing is left then.
    """
    if pin.commit == UNKNOWN:
        why = f"pins.toml does not know the commit of {pin.tag}, and a tag can be moved"
        fix = f"git ls-remote {pin.repository} 'refs/tags/{pin.tag}*'   # then write the commit into pins.toml"
        raise InputError(f"{name} cannot be fetched", why, fix, code="input.pins")
    return once(target, "git", manifest_inputs(pin), lambda temporary: _clone(name, pin, temporary, target))


def manifest_inputs(pin: GitSource) -> dict[str, str]:
    """Return the inputs of a repository's copy, for its manifest."""
    return {"repository": pin.repository, "commit": pin.commit, "tree": pin.tree}


def fetch_command(name: str, pin: GitSource, folder: str = "") -> str:
    """Return the shell command that fetches `pin` by hand on a machine with a network."""
    folder, repository = shlex.quote(folder or name), shlex.quote(pin.repository)
    revision = shlex.quote(pin.tag if pin.commit == UNKNOWN else pin.commit)
    return (f"git init -q {folder} && git -C {folder} fetch -q --depth 1 {repository} {revision} && "
            f"git -C {folder} checkout -q FETCH_HEAD && "
            f"git -C {folder} submodule update -q --init --recursive --depth 1")  # fmt: skip


def _clone(name: str, pin: GitSource, temporary: Path, target: Path) -> Made:
    fix = f"{fetch_command(name, pin)}   # by hand; or check the network"
    try:
        temporary.mkdir(parents=True)
        _git(temporary, "init", "--quiet")
        _git(temporary, "fetch", "--quiet", "--depth", "1", "--no-tags", pin.repository, pin.commit)
        commit, tree = (_git(temporary, "rev-parse", f"FETCH_HEAD^{{{kind}}}").strip() for kind in ("commit", "tree"))
        _require(name, "commit", pin.commit, commit)
        _require(name, "tree", pin.tree, tree)
        _git(temporary, "checkout", "--quiet", "--detach", "FETCH_HEAD")
        _git(temporary, "submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1")
    except ProcessError as error:
        failure = f"cannot fetch {name} from {pin.repository}"
        raise NetworkError(failure, error.why, fix, code="network.fetch") from error
    submodules = _git(temporary, "submodule", "status", "--recursive").split("\n")
    for bookkeeping in [*temporary.rglob(".git")]:
        remove(bookkeeping)
    _copy_links(name, temporary)
    listing = list_tree(temporary)
    archive.write_listing(target, listing)
    version = _git(temporary, "--version").strip()
    return Made(
        {"commit": commit, "tree": tree, "listing": archive.tree_sha256(listing)},
        {"git": version.removeprefix("git version ")},
        {"submodules": {path: sha for sha, path, *_ in (line.split() for line in submodules if line)}},
    )


def _require(name: str, kind: str, expected: str, actual: str) -> None:
    if expected not in (UNKNOWN, actual):
        why = f"wanted the {kind} {expected}, got {actual}; nothing was kept"
        fix = "less pins.toml   # do not trust this source; compare it with upstream"
        raise IntegrityError(f"{name} does not match its pin", why, fix, code="integrity.hash")


def _copy_links(name: str, root: Path) -> None:
    for link in sorted(path for path in root.rglob("*") if path.is_symlink()):
        target = link.resolve()
        if not (target.is_relative_to(root.resolve()) and target.exists()) or link.is_relative_to(target):
            why = f"{link.relative_to(root)} points outside the repository or to no file"
            fix = "less pins.toml   # do not trust this source; compare it with upstream"
            raise IntegrityError(f"{name} is refused", why, fix, code="integrity.archive")
        link.unlink()
        if target.is_dir():
            shutil.copytree(target, link)
        else:
            shutil.copyfile(target, link)


def list_tree(root: Path) -> dict[str, str]:
    """Return the sha256 of every file under `root`, which holds no links."""
    return {str(path.relative_to(root)): sha256_file(path) for path in root.rglob("*") if path.is_file()}


def _git(folder: Path, *arguments: str) -> str:
    return git.git(folder, *arguments, settings=SETTINGS).stdout
