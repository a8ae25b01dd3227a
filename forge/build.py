"""`./inv build`: every stage from sources to audited binaries, natively; a stage whose inputs stand does nothing.

    sources ─► patches ─► kernels ─► vllm (upstream's wheel, or compiled) ─► audit

Each stage ends in an artifact with a manifest of its own; the audit has the last word on all of them together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module as room  # a room is loaded only by the stage that needs it
from pathlib import Path
from typing import Any

from rich.table import Table

from forge import audit, audit_rules, jobs, manifest, patch, pins, sources, status, vllm_overlay
from forge.manifest import Made
from sparkforge import paths
from sparkforge.console import Steps, console
from sparkforge.errors import UsageError
from sparkforge.files import sha256_file, write_json

STACK, ARCH, KERNELS = "spark", "12.1a", "gpt-oss"
PATCHES = paths.ROOT / "patches"


@dataclass(frozen=True)
class Wish:
    """What the command line asks for: `way` is a key of WAYS; `python` serves, `compile_python` has torch with CUDA."""

    way: str
    jobs: str = "auto"
    python: str = ""
    compile_python: str = ""
    sources: str = ""


@dataclass(frozen=True)
class Done:
    """How a stage ended: its artifact, and whether it was made now."""

    stage: str
    artifact: str
    made: bool
    seconds: float = 0.0


def bring(_wish: Wish) -> tuple[str, bool]:
    """Unpack the registry's archives; repositories are brought by who compiles from them."""
    found = sources.bring(STACK, git=False)
    return str(sources.home()), any(one.state == "made" for one in found)


def patched(_wish: Wish) -> tuple[str, bool]:
    """Apply each queue of the stack to its unpacked source."""
    table, changed = pins.load(), False
    components, queues = table.stacks[STACK].components, status.queues(table, STACK, PATCHES)
    for component, queue in queues:
        for name, place in sources.unpacked(STACK, table=table):
            if components[name].patches == component.patches:
                changed |= patch.apply(place, queue).changed
    return ", ".join(f"patches/{component.patches}" for component, _ in queues), changed


def kernels(wish: Wish) -> tuple[str, bool]:
    """Compile FlashInfer's modules."""
    place = kernels_place()
    return str(place), _made(place, lambda: room("forge.kernels").show(KERNELS, ARCH, wish.jobs, "", wish.python))


def compiled(wish: Wish) -> tuple[str, bool]:
    """Compile vLLM's extensions."""
    place = room("forge.vllm_build").overlay()
    words = ("", wish.sources, wish.jobs, ARCH, wish.compile_python, "")
    return str(place), _made(place, lambda: room("forge.vllm_build").show(*words))


def unpacked(_wish: Wish) -> tuple[str, bool]:
    """Take upstream's wheel, with patched Python."""
    place, made = vllm_overlay.wheel()
    return str(place), made


def _made(place: Path, work: Callable[[], Any]) -> bool:
    """Do `work` and return whether it has written another manifest of the artifact at `place`."""
    before = manifest.load(place)
    work()
    return manifest.load(place) != before


def judged(wish: Wish) -> tuple[str, bool]:
    """Audit all libraries together, unless the same ones were found good by the same rules."""
    kernel_place, vllm_place = kernels_place(), vllm_place_of(wish)
    files = [*_outputs(kernel_place, kernel_place.parent), *_outputs(vllm_place, vllm_place)]
    place = paths.state() / "build" / f"audit-{wish.way}.json"
    inputs = {"rules": sha256_file(audit_rules.PATH), **{str(file): sha256_file(file) for file in files}}

    def make(temporary: Path) -> Made:
        """Audit, and keep the report only if no rule is broken. Raises AuditError."""
        report = audit.audit(files)
        write_json(temporary, report.document())
        report.require_clean()
        return Made({place.name: sha256_file(temporary)}, facts={"files": len(report.binaries)})

    return str(place), manifest.once(place, "audit", inputs, make)[1]


def kernels_place() -> Path:
    """Return what the kernels' manifest lies beside."""
    return paths.state() / "kernels" / f"kernels-{KERNELS}.env"


def vllm_place_of(wish: Wish) -> Path:
    """Return the artifact of the vllm stage."""
    if wish.way == "source":
        return Path(room("forge.vllm_build").overlay())
    component = pins.load().component(STACK, "vllm-wheel")
    (sha256,) = component.files.values()
    return paths.state() / "vllm-wheel" / sha256[:12]


def _outputs(place: Path, root: Path) -> list[Path]:
    known = manifest.load(place)
    return [root / name for name in sorted(known.outputs)] if known else []


WAYS: dict[str, Callable[[Wish], tuple[str, bool]]] = {"wheel": unpacked, "source": compiled}


def native(wish: Wish) -> list[Done]:
    """Run every stage and return how each ended. Raises UsageError, and each stage's own errors."""
    if wish.way not in WAYS:
        raise UsageError(f"--from {wish.way!r} is no way to vLLM", f"there are {' and '.join(WAYS)}", "name one")
    jobs.limit_of(wish.jobs)
    stages: dict[str, Callable[[Wish], tuple[str, bool]]] = {
        "sources": bring, "patches": patched, "kernels": kernels, "vllm": WAYS[wish.way], "audit": judged,
    }  # fmt: skip
    steps, done = Steps(len(stages)), list[Done]()
    for name, stage in stages.items():
        begun = time.monotonic()
        artifact, made = _step(steps, name, partial(stage, wish))
        done.append(Done(name, artifact, made, round(time.monotonic() - begun, 1)))
    write_json(paths.state() / "build" / "summary.json", {"schema": 1, "stages": [asdict(one) for one in done]})
    return done


def _step(steps: Steps, name: str, stage: Callable[[], tuple[str, bool]]) -> tuple[str, bool]:
    with steps.step(name) as tell:
        artifact, made = stage()
        tell("made" if made else "unchanged")
        return artifact, made


def show(wish: Wish) -> None:
    """Run every stage, then print one table: stage, seconds, made or unchanged, artifact."""
    console().print(table(native(wish)))


def table(done: Sequence[Done]) -> Table:
    """Return the summary."""
    made = Table("stage", "seconds", "", "artifact", box=None)
    for one in done:
        made.add_row(one.stage, f"{one.seconds:.1f}", "made" if one.made else "unchanged", one.artifact)
    return made
