"""`./inv build`: every stage from sources to audited binaries, natively; an unchanged stage does nothing.

    sources ─► patches ─► kernels ─► vllm (upstream's wheel, or compiled) ─► audit

Each stage ends in an artifact with a manifest of its own; the audit has the last word on all of them together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sparkforge import pins
from sparkforge.audit import rules as audit_rules
from sparkforge.audit.report import audit_files
from sparkforge.compile import jobs, toolchain
from sparkforge.compile.flashinfer import build as flashinfer_build
from sparkforge.compile.vllm import build as vllm_build
from sparkforge.compile.vllm import overlay as vllm_overlay
from sparkforge.compile.vllm.build import ExtensionRequest
from sparkforge.core import manifest, paths
from sparkforge.core.console import Steps, console
from sparkforge.core.errors import UsageError
from sparkforge.core.files import sha256_file, write_json
from sparkforge.core.manifest import Made
from sparkforge.image.devices import CUDA, build_command
from sparkforge.patching import wheels
from sparkforge.sources import trees


@dataclass(frozen=True)
class BuildRequest:
    """What the command line asks for: `way` is a key of WAYS; `python` serves, `compile_python` has torch with CUDA."""

    stack: str
    way: str
    jobs: str = "auto"
    python: str = ""
    compile_python: str = ""
    sources: str = ""


@dataclass(frozen=True)
class StageResult:
    """How a stage ended: its artifact, and whether it was made now."""

    stage: str
    artifact: str
    is_new: bool
    seconds: float = 0.0


Stage = Callable[[BuildRequest], tuple[str, bool]]


def unpack_sources(request: BuildRequest) -> tuple[str, bool]:
    """Unpack the registry's archives; whoever compiles from git repositories fetches them."""
    unpacked = trees.fetch_sources(request.stack, git=False)
    return str(trees.sources_folder()), any(source.state == "made" for source in unpacked)


def make_wheels(request: BuildRequest) -> tuple[str, bool]:
    """Make the stack's patched wheels for the machine that serves."""
    components = wheels.patched_components(pins.load().stack(request.stack))
    patched = [wheels.patched_wheel(component, vllm_overlay.TARGET) for component in components]
    return ", ".join(wheel.lock.file for wheel in patched), any(wheel.is_new for wheel in patched)


def compile_kernels(request: BuildRequest) -> tuple[str, bool]:
    """Compile FlashInfer's modules."""
    artifact = kernels_artifact(request)
    return str(artifact), _changes_manifest(
        artifact,
        lambda: flashinfer_build.build_kernels(request.stack, jobs=request.jobs, python=request.python),
    )


def compile_vllm(request: BuildRequest) -> tuple[str, bool]:
    """Compile vLLM's extensions."""
    artifact = vllm_build.overlay()
    return str(artifact), _changes_manifest(
        artifact,
        lambda: vllm_build.build_extensions(
            ExtensionRequest(request.stack, sources=request.sources, jobs=request.jobs, python=request.compile_python)
        ),
    )


def unpack_wheel(request: BuildRequest) -> tuple[str, bool]:
    """Take upstream's wheel, with patched Python."""
    artifact, is_new = vllm_overlay.unpack_wheel(request.stack)
    return str(artifact), is_new


def _changes_manifest(artifact: Path, work: Callable[[], Any]) -> bool:
    """Do `work` and return whether it has written another manifest of the artifact."""
    before = manifest.load(artifact)
    work()
    return manifest.load(artifact) != before


def audit_libraries(request: BuildRequest) -> tuple[str, bool]:
    """Audit all libraries together, unless the same ones passed the same rules before."""
    kernels = kernels_artifact(request)
    vllm = vllm_build.overlay() if request.way == "source" else vllm_overlay.wheel_folder(request.stack)
    files = [*_outputs(kernels, kernels.parent), *_outputs(vllm, vllm)]
    artifact = paths.state() / "build" / f"audit-{request.way}.json"
    inputs = {"rules": sha256_file(audit_rules.PATH), **{str(file): sha256_file(file) for file in files}}

    def make(temporary: Path) -> Made:
        """Audit, and keep the report only if no rule is broken. Raises AuditError."""
        report = audit_files(files, tools=toolchain.audit_tools)
        write_json(temporary, report.document())
        report.require_clean()
        return Made({artifact.name: sha256_file(temporary)}, facts={"files": len(report.binaries)})

    return str(artifact), manifest.once(artifact, "audit", inputs, make)[1]


def _outputs(artifact: Path, root: Path) -> list[Path]:
    record = manifest.load(artifact)
    return [root / name for name in sorted(record.outputs)] if record else []


def kernels_artifact(request: BuildRequest) -> Path:
    """Return the file beside which the kernels' manifest lies."""
    return paths.state() / "kernels" / f"kernels-{pins.load().image(request.stack).kernels}.env"


WAYS: dict[str, Stage] = {"wheel": unpack_wheel, "source": compile_vllm}


def run_stages(request: BuildRequest) -> list[StageResult]:
    """Run every stage and return how each ended. Raises UsageError, and each stage's own errors."""
    if request.way not in WAYS:
        raise UsageError(f"--from {request.way!r} is no way to vLLM", f"there are {' and '.join(WAYS)}", "name one")
    jobs.parse_limit(request.jobs)
    if pins.load().image(request.stack).device != CUDA:
        why = "it is built in a container image only"
        raise UsageError(f"nothing of the stack {request.stack} is built natively", why, build_command(request.stack))
    stages: dict[str, Stage] = {
        "sources": unpack_sources,
        "patches": make_wheels,
        "kernels": compile_kernels,
        "vllm": WAYS[request.way],
        "audit": audit_libraries,
    }
    steps, results = Steps(len(stages)), list[StageResult]()
    for name, stage in stages.items():
        started = time.monotonic()
        with steps.step(name) as tell:
            artifact, is_new = stage(request)
            tell("made" if is_new else "unchanged")
        results.append(StageResult(name, artifact, is_new, round(time.monotonic() - started, 1)))
    write_json(
        paths.state() / "build" / "summary.json", {"schema": 1, "stages": [asdict(result) for result in results]}
    )
    return results


def build(request: BuildRequest) -> None:
    """Run every stage, then print one table: stage, seconds, made or unchanged, artifact."""
    console().print(summary(run_stages(request)))


def summary(results: Sequence[StageResult]) -> Table:
    """Return the results as a table."""
    table = Table("stage", "seconds", "", "artifact", box=None)
    for result in results:
        table.add_row(result.stage, f"{result.seconds:.1f}", "made" if result.is_new else "unchanged", result.artifact)
    return table
