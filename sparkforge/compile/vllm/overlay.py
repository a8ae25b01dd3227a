"""Copy the overlay of `build --from source` over upstream's wheel of the same version, installed or unpacked.

The result is an overlay and not a wheel, because upstream's wheel holds parts that its build fetches by git
(triton_kernels, parts of flash-attention, the Rust frontend), and because a second distribution with the same files
would break uninstalling the first.
"""

import shutil
import zipfile
from pathlib import Path

from sparkforge import pins
from sparkforge.core import manifest, paths
from sparkforge.core.console import say
from sparkforge.core.errors import CompileError
from sparkforge.core.files import atomic_file, require_space, sha256_file, write_json
from sparkforge.core.manifest import Made
from sparkforge.patching import wheels
from sparkforge.pins.wheels import TargetMachine, choose_pinned

RECORD = ".sparkforge-overlay.vllm.json"
SCHEMA = 1
STAGE = "vllm-wheel"
TARGET = TargetMachine("aarch64")  # the server's machine, which may not be this one
UNPACKED = 3  # upstream's aarch64 wheel: 321 MB packed, 0.78 GB unpacked


def install_overlay(overlay: Path, tree: str) -> None:
    """Replace upstream's libraries in the site-packages `tree` by those of `overlay`.

    Their hashes are in `tree`/.sparkforge-overlay.vllm.json afterwards. Raises CompileError, and replaces nothing, if
    the overlay is incomplete or does not fit.
    """
    packages, record = Path(tree), manifest.load(overlay)
    if record is None or record.stage != "vllm" or not manifest.is_intact(record, overlay):
        why = "it has no manifest of a build from source beside it, or a library was changed"
        raise _error(f"{overlay} is no overlay", why, "./inv build --from source   # makes one")
    version = str(record.facts["vllm"])
    installed = [path.name.removesuffix(".dist-info").split("-")[1] for path in packages.glob("vllm-*.dist-info")]
    absent = [name for name in record.outputs if not (packages / name).is_file()]
    if absent or [number.partition("+")[0] for number in installed] != [version]:
        why = f"it is for vllm {version}, and there is {', '.join(installed) or 'none'}"
        why = f"{packages} has no {absent[0]}" if absent else why
        raise _error(f"the overlay does not fit {packages}", why, f"install upstream's wheel vllm=={version} there")
    files = {name: {"after": sha256} for name, sha256 in record.outputs.items()}
    write_json(packages / RECORD, {"schema": SCHEMA, "upstream": "vllm", "files": files})
    for name in files:
        with (overlay / name).open("rb") as source, atomic_file(packages / name, mode=0o755) as target:
            shutil.copyfileobj(source, target)
    say(f"{packages}: {len(files)} libraries replaced")


def unpack_wheel(stack: str) -> tuple[Path, bool]:
    """Unpack the patched aarch64 wheel; return the tree and whether it is new. Raises as `wheels.patched`."""
    component = pins.load().component(stack, "vllm-wheel")
    filename = choose_pinned(component, TARGET).filename
    lock = wheels.locked(component, filename)[1]
    folder = paths.state() / STAGE / lock.sha256[:12]

    def make(temporary: Path) -> Made:
        require_space(folder.parent, UNPACKED * lock.size, f"unpacking {lock.file}")
        with zipfile.ZipFile(wheels.patched(component, filename).path) as opened:
            opened.extractall(temporary)
        libraries = sorted(temporary.rglob("*.so"))
        return Made({str(library.relative_to(temporary)): sha256_file(library) for library in libraries})

    return folder, manifest.once(folder, STAGE, {lock.file: lock.sha256}, make)[1]


def _error(failure: str, why: str, fix: str) -> CompileError:
    return CompileError(failure, why, fix, code="compile.incomplete")
