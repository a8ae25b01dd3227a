"""Lay the overlay of `build --from source` over upstream's wheel of the same version, installed or unpacked.

An overlay, and no wheel of our own: upstream's holds Python that only its build brings by git (triton_kernels, parts of
flash-attention, the Rust frontend), and a second distribution with the same files would break uninstalling the first.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from sparkforge import pins
from sparkforge.audit import elf
from sparkforge.core import manifest, paths
from sparkforge.core.console import say
from sparkforge.core.documents import read_json
from sparkforge.core.errors import CompileError, UsageError
from sparkforge.core.files import atomic_file, require_space, sha256_file, write_json
from sparkforge.core.manifest import Made
from sparkforge.patching import wheels
from sparkforge.pins.wheels import TargetMachine, choose_pinned

RECORD = ".sparkforge-overlay.vllm.json"
SCHEMA = 1
STAGE = "vllm-wheel"
TARGET = TargetMachine("aarch64")  # the machine that serves, whatever this one is
UNPACKED = 3  # upstream's aarch64 wheel: 321 MB packed, 0.78 GB unpacked
AGAIN = "./inv build --from source, which makes one"


def replace_libraries(overlay: Path, tree: Path) -> bool:
    """Replace upstream's libraries in `tree` by those of `overlay`; return whether anything was changed.

    Everything is checked before the first file is replaced. A killed run is finished by the next. The hashes before and
    after are in `tree`/.sparkforge-overlay.vllm.json. Raises CompileError if overlay and tree do not fit.
    """
    record = manifest.load(overlay)
    if record is None or record.stage != "vllm":
        raise _error(f"{overlay} is no overlay", "it has no manifest of a build from source beside it", AGAIN)
    for name, sha256 in record.outputs.items():
        if not (overlay / name).is_file() or sha256_file(overlay / name) != sha256:
            raise _error(f"{overlay} is damaged", f"{name} is gone or not the one that was made", AGAIN)
    version = str(record.facts["vllm"])
    installed = [path.name.removesuffix(".dist-info").split("-")[1] for path in tree.glob("vllm-*.dist-info")]
    if [number.partition("+")[0] for number in installed] != [version]:
        raise _error(
            f"the overlay does not fit {tree}",
            f"it is for vllm {version}, and there is {', '.join(installed) or 'none'}",
            f"install upstream's wheel vllm=={version} there first",
        )
    for name in record.outputs:
        _require_same_machine(overlay / name, tree / name)
    former = _recorded(tree)
    files = {
        name: {"before": former.get(name, {}).get("before") or sha256_file(tree / name), "after": sha256}
        for name, sha256 in record.outputs.items()
    }
    unchanged = {name: former.get(name) for name in files} == files
    if unchanged and all(sha256_file(tree / name) == sha256 for name, sha256 in record.outputs.items()):
        return False
    write_json(tree / RECORD, {"schema": SCHEMA, "upstream": "vllm", "files": {**former, **files}})
    for name in files:
        with (overlay / name).open("rb") as source, atomic_file(tree / name, mode=0o755) as target:
            shutil.copyfileobj(source, target)
    return True


def _require_same_machine(library: Path, replaced: Path) -> None:
    """Raise CompileError unless both are libraries for the same CPU."""
    try:
        machines = [elf.host(elf.opened(path)).machine for path in (library, replaced)]
    except elf.MALFORMED as error:
        raise _error(
            f"{replaced} cannot be replaced", str(error), "install upstream's CUDA wheel of vllm there first"
        ) from None
    if len(set(machines)) != 1:
        raise _error(
            f"{replaced} cannot be replaced",
            f"it is for {machines[1]}, and the overlay for {machines[0]}",
            "build the overlay on a machine of that kind",
        )


def _recorded(tree: Path) -> dict[str, Mapping[str, str]]:
    try:
        value = read_json(tree / RECORD)
        return dict(value["files"]) if value["schema"] == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def unpack_wheel(stack: str) -> tuple[Path, bool]:
    """Unpack the patched wheel; return the tree and whether it was made now.

    Its machine code is the aarch64 one, whatever machine this is. Raises the errors of `wheels.patched`.
    """
    component = pins.load().component(stack, "vllm-wheel")
    filename = choose_pinned(component, TARGET).filename
    lock = wheels.locked(component, filename)[1]
    folder = wheel_folder(stack)

    def make(temporary: Path) -> Made:
        """Make the patched wheel and unpack it; the outputs are its libraries. Raises as above and StorageError."""
        require_space(folder.parent, UNPACKED * lock.size, f"unpacking {lock.file}")
        with zipfile.ZipFile(wheels.patched(component, filename).path) as opened:
            opened.extractall(temporary)
        libraries = sorted(temporary.rglob("*.so"))
        return Made({str(library.relative_to(temporary)): sha256_file(library) for library in libraries})

    return folder, manifest.once(folder, STAGE, {lock.file: lock.sha256}, make)[1]


def wheel_folder(stack: str) -> Path:
    """Return the folder that the patched wheel is unpacked to."""
    component = pins.load().component(stack, "vllm-wheel")
    lock = wheels.locked(component, choose_pinned(component, TARGET).filename)[1]
    return paths.state() / STAGE / lock.sha256[:12]


def install_overlay(overlay: Path, tree: str) -> None:
    """Lay the overlay over `tree` and report it. Raises UsageError if it is no folder."""
    folder = paths.typed(tree).absolute()
    if not folder.is_dir():
        raise UsageError(f"cannot lay the overlay over {folder}", "there is no such folder", "name a site-packages")
    say(f"{folder}: {'libraries replaced' if replace_libraries(overlay, folder) else 'unchanged'}")


def _error(failure: str, why: str, fix: str) -> CompileError:
    return CompileError(failure, why, fix, code="compile.incomplete")
