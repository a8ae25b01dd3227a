"""What vLLM's extensions are compiled from: a private, patched copy of the sdist's C++ side, and its repositories.

A copy, because vLLM's CMake writes into its own source tree (generated Marlin kernels, FlashMLA's interface). Each
repository is real, or a folder that stands in for one that is left out (`vllm_targets.toml`).
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge import archive, gitsource, manifest, offline, patch, pins, sources
from forge.patch import Queue
from forge.pins import GitSource, Stack
from forge.vllm_targets import Table
from sparkforge.console import say
from sparkforge.errors import BuildInputsError, CommandError, TreeModifiedError, UsageError
from sparkforge.files import sha256_file, write_atomic
from sparkforge.paths import ROOT
from sparkforge.process import run

STACK = "spark"
PARTS = ("CMakeLists.txt", "cmake", "csrc", "tools")  # of the sdist; what CMake reads
STAND_IN = '#error "left out of this build: see forge/vllm_targets.toml"\n'


@dataclass(frozen=True)
class Repository:
    """One repository for CMake: its folder (None: a stand-in), and what identifies its content."""

    place: Path | None
    identity: str


@dataclass(frozen=True)
class Inputs:
    """The unpacked sdist, its listing (path → sha256), the patch queue, and each repository."""

    tree: Path
    listing: Mapping[str, str]
    queue: Queue
    repositories: Mapping[str, Repository]

    @property
    def identity(self) -> dict[str, str]:
        """What all of it hashes to."""
        found = {f"repository:{name}": one.identity for name, one in self.repositories.items()}
        return {"sdist": archive.tree_sha256(self.listing), "queue": self.queue.sha256, **found}


def bring(table: Table, targets: Sequence[str], folder: Path | None) -> Inputs:
    """Bring what `targets` are compiled from; repositories come from `folder`, else from the network.

    `folder` is an unpacked bundle, or has a git checkout for each repository. Raises BuildInputsError naming all that
    is missing, and the errors of `sources`.
    """
    stack = pins.load().stack(STACK)
    component = stack.components["vllm"]
    if component.version != table.version:
        raise UsageError(
            f"vLLM {component.version} cannot be built", f"vllm_targets.toml is for {table.version}", "adapt the table"
        )
    if folder and (folder / offline.INDEX).is_file():
        offline.use_bundle(str(folder))
    (filename,) = [name for name in component.files if name.endswith(sources.ARCHIVE)]
    sources.unpack(component, filename)
    tree = sources.place(component, filename)
    repositories = _repositories(table, targets, stack, folder)
    queue = Queue.load(ROOT / "patches" / str(component.patches))
    return Inputs(tree, archive.read_listing(tree), queue, repositories)


def _repositories(table: Table, targets: Sequence[str], stack: Stack, folder: Path | None) -> dict[str, Repository]:
    needed = {name: [one for one in targets if name in table.targets[one].needs] for name in table.repositories}
    found, missing = dict[str, Repository](), dict[str, str]()
    for name, users in needed.items():
        if not users:
            found[name] = Repository(None, "left out")
            continue
        try:
            found[name] = _repository(name, table.repositories[name].variable, stack.git[name], folder)
        except BuildInputsError as error:
            missing[name] = error.why
    if missing:
        raise _missing(missing, needed, table, stack)
    return found


def _repository(name: str, variable: str, pin: GitSource, folder: Path | None) -> Repository:
    if chosen := os.environ.get(variable):
        return _by_hand(name, variable, Path(chosen))
    if folder and not offline.folder():
        return _checkout(name, pin, folder / name)
    brought = sources.repository(name, pin.model_copy(update={"needed": True}), git=True)
    if brought.place is None:
        raise BuildInputsError(name, brought.told, "")
    made = manifest.load(brought.place)
    return Repository(brought.place, f"{pin.commit} {made.outputs['listing'] if made else ''}".strip())


def _by_hand(name: str, variable: str, place: Path) -> Repository:
    """Take the folder that a variable of vLLM's own names; whoever sets it answers for it."""
    if not place.is_dir():
        raise UsageError(f"cannot build with {variable}={place}", "there is no such folder", f"unset {variable}")
    say(f"{name}: {place}, because {variable} names it; it is not compared with the pin")
    return Repository(place.absolute(), f"by hand {archive.tree_sha256(gitsource.list_tree(place))}")


def _checkout(name: str, pin: GitSource, place: Path) -> Repository:
    """Take a git checkout if it is at the pinned commit and clean."""
    if not (place / ".git").exists():
        raise BuildInputsError(name, f"there is no git checkout {place}", "")
    try:
        commit = run(["git", "-C", place, "rev-parse", "HEAD"]).stdout.strip()
        edited = run(["git", "-C", place, "status", "--porcelain", "--ignored"]).stdout.splitlines()
    except CommandError as error:
        raise BuildInputsError(name, error.why, "") from None
    if commit != pin.commit:
        raise BuildInputsError(name, f"{place} is at {commit}, and {pin.commit} is pinned", "")
    if edited:
        raise BuildInputsError(name, f"{place} was edited: {edited[0]}", "")
    return Repository(place.absolute(), f"{pin.commit} checkout")


def _missing(
    missing: Mapping[str, str], needed: Mapping[str, Sequence[str]], table: Table, stack: Stack
) -> BuildInputsError:
    """Say which repositories are missing, why each is needed, and every way to bring them."""
    why = "\n        ".join(
        f"{name} ({stack.git[name].tag[: sources.DIGITS]}): {told}; needed for {', '.join(needed[name])}: "
        f"{stack.git[name].why}"
        for name, told in missing.items()
    )
    without = [one for one in table.used if not set(table.targets[one].needs) & missing.keys()]
    by_hand = [gitsource.command(name, stack.git[name], f"DIR/{name}") for name in missing]
    ways = (
        "on a machine with a network: ./inv sources && ./inv bundle --more toolchain,build-vllm --output spark.tar",
        "  and here: ./inv bundle.unpack spark.tar DIR && ./inv build.vllm --sources DIR",
        *(f"or by hand: {command}, then ./inv build.vllm --sources DIR" for command in by_hand),
        f"or only what needs none of it: ./inv build.vllm --targets {','.join(without)}",
    )
    return BuildInputsError(f"{len(missing)} of vLLM's repositories are missing", why, "\n        ".join(ways))


def copy_tree(inputs: Inputs, place: Path) -> None:
    """Make the private, patched copy at `place`, which must not exist.

    Raises TreeModifiedError if a file of the unpacked sdist is not the one that the archive held.
    """
    wanted = [path for path in inputs.listing if path.split("/")[0] in PARTS or path in inputs.queue.paths]
    original = patch.originals(inputs.tree, inputs.queue.upstream)
    for path in wanted:
        target = place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in inputs.queue.paths:
            target.write_bytes(original(path) or b"")
        else:
            shutil.copyfile(inputs.tree / path, target)
        if sha256_file(target) != inputs.listing[path]:
            raise TreeModifiedError(
                f"{inputs.tree / path} was edited by hand",
                "it is not the file that the archive held",
                f"keep your edits as a patch (./inv patch.new), then rm -r {shlex.quote(str(inputs.tree))} and again",
            )
    patch.apply(place, inputs.queue)


def stand_ins(table: Table, inputs: Inputs, place: Path) -> dict[str, str]:
    """Make the folders that stand in under `place`; return every repository's variable with its folder."""
    found = {}
    for name, repository in inputs.repositories.items():
        folder = repository.place or place / name
        if repository.place is None:
            _write(folder, table.repositories[name].files)
        found[table.repositories[name].variable] = str(folder)
    return found


def _write(folder: Path, files: Iterable[str]) -> None:
    for name in files:
        write_atomic(folder / name, STAND_IN)
