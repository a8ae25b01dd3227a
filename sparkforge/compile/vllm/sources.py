"""The sources of vLLM's extensions: a private, patched copy of the sdist's C++ files, and its repositories.

A copy is needed because vLLM's CMake writes into its source tree (generated Marlin kernels, FlashMLA's interface). A
repository that is left out is replaced by a stub folder (`targets.toml`).
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge import pins
from sparkforge.compile.vllm.targets import TargetTable
from sparkforge.core import manifest
from sparkforge.core.console import say
from sparkforge.core.errors import CompileError, PatchError, ProcessError, UsageError, on
from sparkforge.core.files import sha256_file
from sparkforge.core.git import git
from sparkforge.patching import series
from sparkforge.patching.series import Queue
from sparkforge.pins import GitSource, Stack
from sparkforge.sources import archive, offline, trees

PARTS = ("CMakeLists.txt", "cmake", "csrc", "tools")  # of the sdist; what CMake reads
STAND_IN = '#error "left out of this build: see sparkforge/compile/vllm/targets.toml"\n'


@dataclass(frozen=True)
class Repository:
    """One repository for CMake: its folder (None: a stub), and an identity of its content."""

    folder: Path | None
    identity: str


@dataclass(frozen=True)
class ExtensionSources:
    """The unpacked sdist, its listing (path → sha256), the patch queue, and each repository.

    `queue` is None for a user's checkout, which already contains its patches.
    """

    tree: Path
    listing: Mapping[str, str]
    queue: Queue | None
    repositories: Mapping[str, Repository]

    @property
    def identity(self) -> dict[str, str]:
        """The identity of each source by name."""
        repositories = {f"repository:{name}": repository.identity for name, repository in self.repositories.items()}
        tree = archive.tree_sha256(self.listing)
        return {**({"sdist": tree, "queue": self.queue.sha256} if self.queue else {"checkout": tree}), **repositories}


def fetch_sources(
    table: TargetTable,
    targets: Sequence[str],
    folder: Path | None,
    stack_name: str,
    checkout: Path | None = None,
    *,
    without_missing: bool = False,
) -> ExtensionSources:
    """Fetch the sources of `targets`; repositories come from `folder`, else from the network.

    `folder` is an unpacked bundle, or has a git checkout for each repository. `checkout` is a user's clone of vLLM,
    which is compiled unchanged instead of the sdist and the queue. `without_missing` leaves out unavailable
    repositories. Raises CompileError naming all missing repositories, and the errors of `sources`.
    """
    stack = pins.load().stack(stack_name)
    component = stack.components["vllm"]
    if folder and (folder / offline.INDEX).is_file():
        offline.use_bundle(str(folder))
    if checkout is None:
        (filename,) = [name for name in component.files if name.endswith(trees.ARCHIVE)]
        trees.unpack_archive(component, filename)
        tree = trees.tree_folder(component, filename)
    repositories, missing, users = dict[str, Repository](), dict[str, str](), dict[str, list[str]]()
    for name, option in table.repositories.items():
        users[name] = [target for target in targets if name in table.targets[target].needs]
        if not users[name]:
            repositories[name] = Repository(None, "left out")
            continue
        try:
            repositories[name] = _repository(name, option.variable, stack.git[name], folder)
        except CompileError as error:
            if error.code != "compile.inputs":
                raise
            missing[name] = error.why
            repositories[name] = Repository(None, "left out")
    if missing and without_missing:
        names = ", ".join(missing)
        say(f"without {names}, not available: a unit that includes it does not compile (--sources DIR)")
    elif missing:
        raise _missing_repositories(missing, users, stack)
    if checkout is not None:
        return ExtensionSources(checkout, list_checkout(checkout), None, repositories)
    queue = Queue.load(series.PATCHES / str(component.patches))
    return ExtensionSources(tree, archive.read_listing(tree), queue, repositories)


def list_checkout(checkout: Path) -> dict[str, str]:
    """Return path → sha256 of the files of a clone of vLLM that CMake reads."""
    files = (path for part in PARTS for path in (checkout / part, *(checkout / part).rglob("*")))
    wanted = (path for path in files if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(checkout)): sha256_file(path) for path in sorted(wanted)}


def _repository(name: str, variable: str, pin: GitSource, folder: Path | None) -> Repository:
    """Return a repository: the folder in `variable`, else a checkout in `folder`, else the pinned one, fetched.

    Raises CompileError (compile.inputs) with the reason if there is none.
    """
    if chosen := os.environ.get(variable):  # a user who sets vLLM's variable is responsible for the content
        override = Path(chosen)
        if not override.is_dir():
            raise UsageError(f"cannot build with {variable}={override}", "there is no such folder", f"unset {variable}")
        say(f"{name}: {override}, because {variable} names it; it is not compared with the pin")
        return Repository(override.absolute(), f"by hand {archive.tree_sha256(trees.list_tree(override))}")
    if folder and not offline.folder():
        return _checkout(name, pin, folder / name)
    fetched = trees.fetch_repository(name, pin.model_copy(update={"needed": True}), git=True)
    if fetched.path is None:
        raise CompileError(name, fetched.note, "", code="compile.inputs")
    record = manifest.load(fetched.path)
    return Repository(fetched.path, f"{pin.commit} {record.outputs['listing'] if record else ''}".strip())


def _checkout(name: str, pin: GitSource, folder: Path) -> Repository:
    """Return a git checkout that is at the pinned commit and clean. Raises CompileError."""
    if not (folder / ".git").exists():
        raise CompileError(name, f"there is no git checkout {folder}", "", code="compile.inputs")
    try:
        commit = git(folder, "rev-parse", "HEAD").stdout.strip()
        edited = git(folder, "status", "--porcelain", "--ignored").stdout.splitlines()
    except ProcessError as error:
        raise CompileError(name, error.why, "", code="compile.inputs") from error
    if commit != pin.commit:
        raise CompileError(name, f"{folder} is at {commit}, and {pin.commit} is pinned", "", code="compile.inputs")
    if edited:
        raise CompileError(name, f"{folder} was edited: {edited[0]}", "", code="compile.inputs")
    return Repository(folder.absolute(), f"{pin.commit} checkout")


def _missing_repositories(missing: Mapping[str, str], users: Mapping[str, Sequence[str]], stack: Stack) -> CompileError:
    why = "\n        ".join(
        f"{name} ({stack.git[name].tag[: trees.DIGITS]}): {reason}; needed for {', '.join(users[name])}: "
        f"{stack.git[name].why}"
        for name, reason in missing.items()
    )
    commands = [trees.fetch_command(name, stack.git[name], f"DIR/{name}") for name in missing]
    fixes = (
        "on a machine with a network: ./inv build --only sources",
        "  and ./inv bundle --more toolchain,build-vllm --output spark.tar",
        "  and on this one: ./inv bundle.unpack spark.tar DIR && ./inv build --from source --sources DIR",
        *(f"or by hand: {command}, then ./inv build --from source --sources DIR" for command in commands),
    )
    failure = f"{len(missing)} of vLLM's repositories are missing"
    return CompileError(failure, why, "\n        ".join(fixes), code="compile.inputs")


def copy_tree(inputs: ExtensionSources, copy: Path) -> None:
    """Make the private, patched copy at `copy`, which must not exist.

    Raises PatchError if a file of the unpacked sdist differs from the archive's, or the queue does not apply;
    CompileError if a file of a checkout changed meanwhile.
    """
    patched = inputs.queue.paths if inputs.queue else ()
    for path, sha256 in inputs.listing.items():
        if path.split("/")[0] not in PARTS and path not in patched:
            continue
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(inputs.tree / path, target)
        if sha256_file(target) != sha256 and inputs.queue is None:
            failure, why = f"{inputs.tree / path} was edited meanwhile", "its content differs from a moment ago"
            raise CompileError(failure, why, "again", code="compile.inputs")
        if sha256_file(target) != sha256:
            failure, why = f"{inputs.tree / path} was edited by hand", "it differs from the file in the archive"
            remark = "keep your edits first (lab/patches/README.md); then the same command again"
            raise PatchError(failure, why, on("rm -r", inputs.tree, remark), code="patch.modified")
    if inputs.queue:
        inputs.queue.apply_to(copy)
