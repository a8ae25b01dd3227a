"""Lay what `build.vllm` made over upstream's wheel of the same version: in a site-packages, or in the wheel unpacked.

An overlay, and no wheel of our own: upstream's holds Python that only its build brings by git (triton_kernels, parts of
flash-attention, the Rust frontend), and a second distribution with the same files would break uninstalling the first.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from forge import elf, fetch, manifest, patch, pins
from forge.manifest import Made, Manifest
from forge.vllm_sources import STACK
from sparkforge import paths
from sparkforge.console import say
from sparkforge.errors import BuildIncompleteError, UsageError
from sparkforge.files import atomic_file, require_space, sha256_file, write_json
from sparkforge.paths import ROOT

RECORD = ".sparkforge-overlay.vllm.json"
SCHEMA = 1
STAGE = "vllm-wheel"
UNPACKED = 3  # upstream's aarch64 wheel: 321 MB packed, 0.78 GB unpacked
AGAIN = "./inv build.vllm, or name the overlay that it made"


def put(overlay: Path, tree: Path) -> bool:
    """Replace upstream's libraries in `tree` by those of `overlay`; return whether anything was changed.

    All of it is checked before the first file is replaced. A killed run is finished by the next. What was there and
    what is there now stands in `tree`/.sparkforge-overlay.vllm.json. Raises BuildIncompleteError if they do not fit.
    """
    made = _intact(overlay)
    _require_version(tree, str(made.facts["vllm"]))
    for name in made.outputs:
        _require_same_kind(overlay / name, tree / name)
    former = _recorded(tree)
    files = {
        name: {"before": former.get(name, {}).get("before") or sha256_file(tree / name), "after": sha256}
        for name, sha256 in made.outputs.items()
    }
    kept = {name: former.get(name) for name in files} == files
    if kept and all(sha256_file(tree / name) == each["after"] for name, each in files.items()):
        return False
    write_json(tree / RECORD, {"schema": SCHEMA, "upstream": "vllm", "files": {**former, **files}})
    for name in files:
        with (overlay / name).open("rb") as source, atomic_file(tree / name, mode=0o755) as target:
            shutil.copyfileobj(source, target)
    return True


def _intact(overlay: Path) -> Manifest:
    """Return the overlay's manifest if each file is what it says."""
    made = manifest.load(overlay)
    if made is None or made.stage != "vllm":
        raise BuildIncompleteError(f"{overlay} is no overlay", "it has no manifest of build.vllm beside it", AGAIN)
    for name, sha256 in made.outputs.items():
        if not (overlay / name).is_file() or sha256_file(overlay / name) != sha256:
            raise BuildIncompleteError(f"{overlay} is damaged", f"{name} is gone or not the one that was made", AGAIN)
    return made


def _require_version(tree: Path, wanted: str) -> None:
    found = [path.name.removesuffix(".dist-info").split("-")[1] for path in tree.glob("vllm-*.dist-info")]
    if [version.partition("+")[0] for version in found] != [wanted]:
        raise BuildIncompleteError(
            f"the overlay does not fit {tree}", f"it is for vllm {wanted}, and there is {', '.join(found) or 'none'}",
            f"install upstream's wheel vllm=={wanted} there first",
        )  # fmt: skip


def _require_same_kind(ours: Path, theirs: Path) -> None:
    """Raise BuildIncompleteError unless both are libraries for the same CPU."""
    try:
        machines = [elf.host(elf.opened(path)).machine for path in (ours, theirs)]
    except elf.MALFORMED as error:
        raise BuildIncompleteError(
            f"{theirs} cannot be replaced", str(error), "install upstream's CUDA wheel of vllm there first"
        ) from None
    if len(set(machines)) != 1:
        raise BuildIncompleteError(
            f"{theirs} cannot be replaced",
            f"it is for {machines[1]}, and the overlay for {machines[0]}",
            "build the overlay on a machine of that kind",
        )


def _recorded(tree: Path) -> dict[str, Mapping[str, str]]:
    try:
        value = json.loads((tree / RECORD).read_text(encoding="utf-8"))
        return dict(value["files"]) if value["schema"] == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def wheel() -> tuple[Path, bool]:
    """Bring upstream's pinned wheel, unpack it, and patch its Python; return the tree and whether it was made now.

    Its machine code is the aarch64 one, whatever machine this is. Raises the errors of `fetch` and `patch`.
    """
    component = pins.load().component(STACK, "vllm-wheel")
    ((filename, sha256),) = component.files.items()
    queue = patch.Queue.load(ROOT / "patches" / str(component.patches))
    place = paths.state() / "vllm-wheel" / sha256[:12]

    def make(temporary: Path) -> Made:
        """Bring, unpack and patch; the outputs are its libraries. Raises as above and DiskFullError."""
        file = fetch.fetch(component.package or "", filename, sha256)
        require_space(place.parent, UNPACKED * file.stat().st_size, f"unpacking {filename}")
        with zipfile.ZipFile(file) as opened:
            opened.extractall(temporary)
        patch.apply(temporary, queue)
        libraries = sorted(temporary.rglob("*.so"))
        return Made({str(one.relative_to(temporary)): sha256_file(one) for one in libraries})

    inputs = {filename: sha256, "queue": queue.sha256}
    return place, manifest.once(place, STAGE, inputs, make)[1]


def show_put(overlay: Path, tree: str) -> None:
    """Lay the overlay over `tree` and say so. Raises UsageError if it is no folder."""
    place = paths.typed(tree).absolute()
    if not place.is_dir():
        raise UsageError(f"cannot lay the overlay over {place}", "there is no such folder", "name a site-packages")
    say(f"{place}: {'libraries replaced' if put(overlay, place) else 'unchanged'}")
