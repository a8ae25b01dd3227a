"""Releases of the upstreams that a stack has patch queues for: the newest ones, and the unpacked sources of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from lab.patches import status, upstream
from lab.patches.upstream import Release
from sparkforge.core.errors import NetworkError
from sparkforge.core.files import read_bytes
from sparkforge.core.paths import secure_state
from sparkforge.patching import series
from sparkforge.patching.series import Queue
from sparkforge.pins import Component, Pins
from sparkforge.pins.index import client, project_page
from sparkforge.sources import archive, fetch, offline

REQUIREMENTS = Path("requirements/cuda.txt")  # of vLLM's source archive
LARGEST = 1 << 20  # bytes of a requirements file


@dataclass(frozen=True)
class Candidate:
    """A release that a stack may move one of its components to."""

    component: Component
    queue: Queue
    release: Release

    @property
    def name(self) -> str:
        """Such as `vllm-0.33.0`, as `--against` takes it."""
        return f"{self.queue.upstream}-{self.release.version}"


def newest(versions: Iterable[str | None]) -> str | None:
    """Return the highest final release among `versions`; names that are no versions are ignored."""
    finals = {}
    for text in versions:
        try:
            version = Version(text or "")
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            finals[version] = text
    return finals[max(finals)] if finals else None


def candidates(table: Pins, stack: str, against: Sequence[str] = (), patches: Path = series.PATCHES) -> list[Candidate]:
    """Return the releases that `against` names, or the newest release of each component with a queue.

    Raises InputError for an unknown stack or upstream, NetworkError if the index does not answer or has no release.
    """
    chosen = [status.chosen(table, stack, text, patches) for text in against]
    if not against:
        queues = series.queues(table, stack, patches)
        chosen = [(component, queue, _newest_version(component)) for component, queue in queues]
    return [
        Candidate(component, queue, upstream.release(table, component, version)) for component, queue, version in chosen
    ]


def _newest_version(component: Component) -> str:
    """Ask the index for the newest release; the pinned one where the package has no source archives."""
    if offline.folder():
        raise NetworkError(
            f"cannot look for a newer {component.package}",
            "an offline bundle has the pinned files only",
            "run this where there is a network, or name a release that the cache has: --against VERSION",
            code="network.fetch",
        )
    with client() as http:
        listed = project_page(str(component.package), http).packages
    sources = (entry for entry in listed if entry.package_type == "sdist" and not entry.is_yanked)
    return newest(entry.version for entry in sources) or component.version


def work_folder() -> Path:
    """Return the folder of unpacked releases, after removing the remains of killed runs."""
    return secure_state() / "upstream"


@contextmanager
def unpacked(release: Release, queue: Queue | None = None) -> Iterator[Path]:
    """Yield a folder with the files that a check reads: Python, build files, requirements, and files of `queue`.

    Raises the errors of `fetch` and of `archive.unpack`.
    """
    file = fetch.fetch(release.package, release.filename, release.sha256, release.size)
    paths = status.paths_of(queue) if queue else set()
    folder = work_folder()
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=folder) as work:
        root = Path(work) / "tree"
        archive.require_space_for(file, root)
        archive.unpack(file, root, top=release.top, wanted=lambda path: path in paths or _is_read(PurePosixPath(path)))
        yield root


def _is_read(path: PurePosixPath) -> bool:
    """Tell whether a check reads a file of a release; metadata counts, because running Python needs it."""
    return (
        path.suffix in (".py", ".cmake")
        or path.name.endswith(".cmake.in")
        or path.name in ("CMakeLists.txt", "Cargo.lock", "PKG-INFO")
        or path == PurePosixPath(REQUIREMENTS)
        or path.parts[0].endswith((".egg-info", ".dist-info"))
    )


def exact_requirements(root: Path) -> dict[str, str]:
    """Return the versions that vLLM's requirements name with `==`, by package; empty without such a file."""
    try:
        lines = read_bytes(root / REQUIREMENTS, largest=LARGEST).decode(errors="replace").splitlines()
    except OSError:
        return {}
    versions = {}
    for line in lines:
        try:
            requirement = Requirement(line.partition("#")[0].strip())
        except InvalidRequirement:  # a blank line, or an option of pip
            continue
        if len(requirement.specifier) == 1 and (only := next(iter(requirement.specifier))).operator == "==":
            versions[requirement.name] = only.version
    return versions
