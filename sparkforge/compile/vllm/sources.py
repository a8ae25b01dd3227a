"""The sources of vLLM's extensions: a private, patched copy of the sdist's C++ files, and its repositories.

A copy is needed because vLLM's CMake writes into its source tree (generated Marlin kernels, FlashMLA's interface). A
repository that is left out is replaced by a stub folder. `targets.toml` has the CMake targets that are built for SM121.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from sparkforge import pins
from sparkforge.core import manifest
from sparkforge.core.console import say
from sparkforge.core.errors import CompileError, InputError, PatchError, ProcessError, UsageError, on
from sparkforge.core.files import read_toml, sha256_file
from sparkforge.core.git import git
from sparkforge.core.tables import Record
from sparkforge.patching import series
from sparkforge.patching.series import Queue
from sparkforge.pins import GitSource, Stack
from sparkforge.sources import archive, offline, trees

TARGETS = Path(__file__).with_name("targets.toml")
PARTS = ("CMakeLists.txt", "cmake", "csrc", "tools")  # the parts of the sdist that CMake reads
STAND_IN = '#error "left out of this build: see sparkforge/compile/vllm/targets.toml"\n'


class Arch(Record):
    """The architectures that vLLM's CMake derives from a TORCH_CUDA_ARCH_LIST, for units without and with a suffix."""

    base: str
    family: str


class CmakeTarget(Record):
    """One CMake target: whether SM121 uses it, why or why not, and the line of the sdist that defines it.

    `needs` names repositories whose headers its units include; `module` is its rule in the audit.
    """

    use: bool
    where: str
    why: str
    output: str = ""
    needs: tuple[str, ...] = ()
    module: str = ""


class RepositoryOption(Record):
    """A repository for CMake: the variable that names its folder, and the stub files if it is left out."""

    variable: str
    files: tuple[str, ...]


class TargetTable(Record):
    """The whole of targets.toml, for one vLLM version."""

    schema_: int = Field(alias="schema", ge=1, le=1)
    version: str
    arch: dict[str, Arch]
    targets: dict[str, CmakeTarget]
    repositories: dict[str, RepositoryOption]

    @property
    def used(self) -> list[str]:
        """The targets that SM121 uses, cheapest first."""
        return [name for name, target in self.targets.items() if target.use]

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Return `names` in the table's order, or all that SM121 uses. Raises UsageError for any other name."""
        for name in names:
            if name not in self.targets:
                failure = f"vLLM has no target {name}"
                raise UsageError(failure, f"choose from {', '.join(self.used)}", "--help   # name one of them")
            if not (target := self.targets[name]).use:
                failure = f"{name} is not built for SM121"
                raise UsageError(failure, f"{target.why} ({target.where})", "--help   # leave it out")
        return [name for name in self.used if not names or name in names]

    def mapped(self, arch: str) -> Arch:
        """Return CMake's architectures for `arch`. Raises UsageError for an architecture that was not tried."""
        if arch not in self.arch:
            known = ", ".join(self.arch)
            raise UsageError(f"no rule for --arch {arch}", f"choose from {known}", "--arch 12.1a")
        return self.arch[arch]


@cache
def load_targets(version: str) -> TargetTable:
    """Return the table for a vLLM release. Raises InputError for an unknown one, pydantic's errors for a bad table."""
    document = read_toml(TARGETS)
    releases, targets, left_out = (document.pop(key) for key in ("versions", "targets", "left_out"))
    if version not in releases:
        failure = f"vLLM {version} cannot be compiled here"
        fix = "--from wheel   # or extend that table (docs/concepts/vllm-extensions.md)"
        raise InputError(failure, f"{TARGETS.name} has the targets of {', '.join(releases)}", fix, code="input.pins")
    number, every = releases.index(version), dict[str, Any]()
    for name, target in (*targets.items(), *left_out.items()):
        where = target["where"]
        every[name] = {**target, "use": name in targets, "where": where if isinstance(where, str) else where[number]}
    return TargetTable.model_validate({**document, "version": version, "targets": every})


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
