"""Facts about our patched wheels: the wheels that the stack needs, and whether the installed wheels match the lock."""

from contextlib import suppress
from pathlib import Path

from sparkforge import pins
from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import sha256_file
from sparkforge.core.installed import Installed
from sparkforge.core.paths import ROOT
from sparkforge.core.process import ProbeError
from sparkforge.pins import verify
from sparkforge.pins.verify import ImageChanges, WheelOrigin, load_patched
from validate.facts.fact import Reading
from validate.facts.target import Target, once

SECONDS = 60.0  # to read 1 GB, even from a slow or busy disk


def expected(target: Target) -> list[str]:
    """Names of the distributions that this profile's stack patches."""
    return verify.patched_packages(pins.load(), target.stack)


@once
def installed(target: Target) -> list[Installed]:
    """The expected distributions that are installed. Raises IntegrityError for unreadable metadata."""
    return [Installed.read(target.metadata()[name]) for name in expected(target) if name in target.metadata()]


def versions(target: Target) -> list[str]:
    """Installed patched distributions, as `name version`."""
    return [f"{distribution.name} {distribution.version}" for distribution in installed(target)]


def foreign(target: Target) -> list[str]:
    """Return a line for each expected distribution that is not our locked wheel, or that Python does not import."""
    lock, reasons = load_patched(), list[str]()
    for name in expected(target):
        if name not in target.metadata():
            reasons.append(f"{name} is not installed")
            continue
        try:
            distribution = Installed.read(target.metadata()[name])
            verify.require_locked(distribution, lock)
        except IntegrityError as error:
            reasons.append(f"{error.what}: {error.why}")
            continue
        paths = sorted(Path(line.path) for line in distribution.lines if line.path.endswith("/__init__.py"))
        for package in [path.parts[0] for path in paths if len(path.parts) == 2]:
            with suppress(ProbeError):  # the package is missing; changed_files reports it
                if (folder := target.package_directory(package)).parent != distribution.packages:
                    packages = distribution.packages
                    reasons.append(f"Python imports {package} from {folder}, and {name} is in {packages}")
    return reasons


def changed_files(target: Target) -> list[str]:
    """Files of the patched distributions that differ from RECORD, as `path: change`."""
    changes = ImageChanges.read(ROOT / "image.json")
    return [line for distribution in installed(target) for line in verify.differences(distribution, changes)]


@once
def origins(target: Target) -> list[WheelOrigin]:
    """Return the origin records in the patched distributions' metadata."""
    return [verify.read_origin(distribution.info) for distribution in installed(target)]


def names(target: Target) -> list[str]:
    """File names of the patches in the installed wheels."""
    return [patch.name for origin in origins(target) for patch in origin.patches]


def outdated(target: Target) -> list[str] | None:
    """Patches that differ between wheels and this checkout's series, as `name: difference`; None without a checkout."""
    queues = [(origin, ROOT / "patches" / f"{origin.upstream}-{origin.version}") for origin in origins(target)]
    if not all((queue / "series").is_file() for _, queue in queues):
        return None
    return [line for origin, queue in queues for line in _outdated(origin, queue)]


def _outdated(origin: WheelOrigin, queue: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (queue / "series").read_text(encoding="utf-8").splitlines())
    series = {Path(line).name: sha256_file(queue / line) for line in lines if line}
    applied = {patch.name: patch.sha256 for patch in origin.patches}
    wheel, changed = f"the installed {origin.upstream}", [n for n in applied if series.get(n, applied[n]) != applied[n]]
    return [
        *(f"{name}: is in the series, not in {wheel}" for name in series if name not in applied),
        *(f"{name}: is in {wheel}, not in the series" for name in applied if name not in series),
        *(f"{name}: was changed since it was applied" for name in changed),
    ]


READINGS = (
    Reading("patches.expected", "pins.toml", expected),
    Reading("patches.installed", "package metadata", versions),
    Reading("patches.foreign", "RECORD against locks/patched.toml", foreign),
    Reading("patches.changed_files", "files against RECORD and the image's image.json", changed_files, SECONDS),
    Reading("patches.names", f"{verify.ORIGIN} in the package metadata", names),
    Reading("patches.outdated", f"{verify.ORIGIN} against patches/*/series of this checkout", outdated),
)
