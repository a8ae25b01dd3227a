"""Fetch a git repository at a pinned commit, with its submodules.

A commit's id is a hash over its whole tree, submodules' commits included, and git checks every object that it receives.
The tree's hash is compared too. The folder `.git` is not kept.
"""

import shlex
import shutil
from pathlib import Path

from sparkforge.core.errors import InputError, IntegrityError, NetworkError, ProcessError
from sparkforge.core.files import sha256_file
from sparkforge.core.git import git
from sparkforge.core.manifest import Made, Manifest, once, remove
from sparkforge.pins import GitSource
from sparkforge.sources import archive

UNKNOWN = "unknown"
# Added to the settings of sparkforge.core.git. Our builds read no file that LFS stores.
SETTINGS = ("core.hooksPath=/dev/null", "core.symlinks=true", "advice.detachedHead=false", "init.defaultBranch=main",
            "filter.lfs.smudge=", "filter.lfs.required=false",
            "http.lowSpeedLimit=1000", "http.lowSpeedTime=60")  # fmt: skip


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
        raise IntegrityError(f"{name} is not what was pinned", why, fix, code="integrity.hash")


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
    return git(folder, *arguments, settings=SETTINGS).stdout
