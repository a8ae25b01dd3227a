"""Audit patched wheels, and packages that were installed from them, against `locks/patched.toml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import sha256_file
from sparkforge.core.installed import Installed
from sparkforge.pins import verify
from sparkforge.pins.patched import PatchedFile, load_patched
from sparkforge.pins.verify import ImageChanges


@dataclass(frozen=True)
class AuditedWheel:
    """A patched wheel, or a package installed from one: where it is, and file name, sha256 and RECORD by the lock.

    `problems` says how it differs from that wheel; `wheel` is empty if the lock does not have it.
    """

    path: str
    wheel: str = ""
    sha256: str = ""
    record: str = ""
    problems: tuple[str, ...] = ()


def audit_patched(paths: Sequence[Path]) -> list[AuditedWheel]:
    """Compare with the lock every patched wheel among `paths`, and every package installed from one, by its version.

    Raises InputError for a malformed lock.
    """
    lock: Mapping[str, PatchedFile] | None = None
    audited = list[AuditedWheel]()
    for path in _patched(paths):
        lock = load_patched() if lock is None else lock
        if not path.is_file():
            audited.append(audit_installed(path, lock))
        elif wheel := next((wheel for wheel in lock.values() if wheel.file == path.name), None):
            sha256 = sha256_file(path)
            problems = () if sha256 == wheel.sha256 else (f"its sha256 is {sha256}, and {wheel.sha256} is locked",)
            audited.append(AuditedWheel(str(path), wheel.file, wheel.sha256, str(wheel.record), problems))
        else:
            audited.append(AuditedWheel(str(path), problems=("locks/patched.toml has no such wheel",)))
    return audited


def audit_installed(info: Path, lock: Mapping[str, PatchedFile], changes: ImageChanges | None = None) -> AuditedWheel:
    """Compare an installed package, by its dist-info folder, with the lock: version, RECORD, and every file."""
    try:
        installed = Installed.read(info)
        wheel = verify.require_locked(installed, lock)
    except IntegrityError as error:
        return AuditedWheel(str(info), problems=(f"{error.what}: {error.why}",))
    problems = verify.differences(installed, changes or ImageChanges())
    return AuditedWheel(str(info), wheel.file, wheel.sha256, str(wheel.record), tuple(problems))


def _patched(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        searched = path.is_dir() and path.suffix != ".dist-info"
        candidates = sorted([*path.rglob("*.whl"), *path.rglob("*.dist-info")]) if searched else [path]
        yield from (candidate for candidate in candidates if verify.is_patched(_version(candidate)))


def _version(path: Path) -> str:
    if path.suffix != ".whl":
        return path.stem.partition("-")[2] if path.suffix == ".dist-info" else ""
    try:
        return str(parse_wheel_filename(path.name)[1])
    except InvalidWheelFilename:
        return ""
