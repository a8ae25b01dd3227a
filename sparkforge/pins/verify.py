"""Compare an installed patched distribution with `locks/patched.toml`: the same wheel, and unchanged files.

An image's manifest lists the files of a wheel that its build left out, or replaced by compiled ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import Field, RootModel

from sparkforge.core.errors import IntegrityError
from sparkforge.core.files import DocumentError, read_json
from sparkforge.core.installed import REINSTALL, Installed
from sparkforge.core.paths import ROOT
from sparkforge.core.tables import Record, load, parse_record
from sparkforge.pins.table import Pins, Sha256, Text

PATH = ROOT / "locks" / "patched.toml"  # not locks.LOCKS: the validator runs without `pins.locks`
LOCAL = "sparkforge"  # in the version of every patched wheel: 0.32.0+sparkforge.1
ORIGIN = "patches/upstream.json"  # in its dist-info folder, beside the patches
# FlashInfer loads modules that were compiled ahead of time from here (flashinfer/jit/env.py: FLASHINFER_AOT_DIR).
ADDED_LATER = ("flashinfer/data/aot",)


class PatchedFile(Record):
    """The patched form of an upstream file: its queue (folder under patches/), and the resulting file."""

    queue: Text
    queue_sha256: Sha256
    revision: int = Field(gt=0, strict=True)  # N of the version's +sparkforge.N
    file: Text
    sha256: Sha256
    size: int = Field(gt=0, strict=True)  # bytes
    record: Sha256 | None = None  # for a wheel: `record_digest` of its RECORD (core/installed.py)


class PatchedLock(RootModel[dict[str, PatchedFile]]):
    """Every patched file by upstream's file name."""


def load_patched(path: Path | None = None) -> Mapping[str, PatchedFile]:
    """Read the lock, by default PATH; empty if there is no file. Raises InputError."""
    path = path or PATH
    return load(path, PatchedLock).root if path.exists() else {}


class PatchHash(Record):
    """An applied patch: its file name and the sha256 of its bytes."""

    name: Text
    sha256: Sha256


class FileHashes(Record):
    """Hex sha256 of one file in upstream's wheel and in the patched wheel; None if the wheel lacks it."""

    before: Sha256 | None
    after: Sha256 | None


class WheelOrigin(Record):
    """`patches/upstream.json` of a patched wheel: its inputs, and the files that its patches changed."""

    schema_: Literal[1] = Field(alias="schema")
    upstream: Text
    version: Text
    filename: Text
    sha256: Sha256
    queue_sha256: Sha256
    patches: tuple[PatchHash, ...]
    files: dict[str, FileHashes]


class ImageChanges(Record, extra="ignore"):
    """The changes of an image's build to installed wheels: paths left out, and sha256 by path of compiled files."""

    left_out: tuple[Text, ...] = ()
    compiled: dict[str, Sha256] = Field(default_factory=dict)

    @classmethod
    def read(cls, manifest: Path) -> ImageChanges:
        """Read the changes from an image's manifest; empty if the file is missing. Raises OSError, ValueError."""
        return cls.model_validate(read_json(manifest)) if manifest.is_file() else cls()


def patched_packages(pins: Pins, stack: str) -> list[str]:
    """Return the normalised names of the distributions that a stack patches."""
    components = pins.stack(stack).components.values()
    return sorted({canonicalize_name(pin.package) for pin in components if pin.patches and pin.package})


def is_patched(version: str) -> bool:
    """Tell whether a version is that of a patched wheel: its local part is, or ends in, `sparkforge.N`."""
    parsed = _version(version)
    local = ((parsed and parsed.local) or "").split(".")
    return len(local) > 1 and local[-2] == LOCAL


def read_origin(info: Path) -> WheelOrigin:
    """Read the records of a patched wheel in a dist-info folder. Raises IntegrityError."""
    file = info / ORIGIN
    try:
        return parse_record(read_json(file), str(file), WheelOrigin)
    except (OSError, DocumentError) as error:
        why = error.why if isinstance(error, DocumentError) else error.strerror or str(error)
        raise IntegrityError(f"{file} cannot be read", why, REINSTALL, code="integrity.installed") from error


def require_locked(installed: Installed, lock: Mapping[str, PatchedFile]) -> PatchedFile:
    """Return the locked wheel from which a distribution was installed, by version and RECORD.

    Raises IntegrityError, which names the difference: upstream's wheel, another revision, or another RECORD.
    """
    wheels = []
    for wheel in lock.values():
        try:
            distribution, version, _, _ = parse_wheel_filename(wheel.file)
        except InvalidWheelFilename:  # a source archive
            continue
        if distribution == installed.name:
            wheels.append((wheel, version))
    candidates = [wheel for wheel, version in wheels if version == _version(installed.version)]
    name = f"{installed.name} {installed.version}"
    if not is_patched(installed.version):
        failure, why = f"{name} is upstream's wheel", "it does not have our patches"
    elif not wheels:
        failure, why = f"{name} is not locked", f"locks/patched.toml has no wheel of {installed.name}"
    elif not candidates:
        locked = ", ".join(sorted({str(version) for _, version in wheels}))
        failure, why = f"{name} is not the locked version", f"locks/patched.toml has {locked}"
    elif not (installed.info / ORIGIN).is_file():
        failure, why = f"{name} is not from a wheel of ours", f"it has no {ORIGIN} in its metadata"
    else:
        for wheel in candidates:
            if wheel.record == installed.record:
                return wheel
        failure = f"{name} is not from the locked wheel"
        why = f"its RECORD is not that of {' or '.join(wheel.file for wheel in candidates)}"
    raise IntegrityError(failure, why, REINSTALL, code="integrity.installed")


def differences(installed: Installed, changes: ImageChanges) -> list[str]:
    """Return the files that differ from RECORD and from the changes of the image's build, as `path: change`."""
    return installed.differences(left_out=changes.left_out, compiled=changes.compiled, added=ADDED_LATER)


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
