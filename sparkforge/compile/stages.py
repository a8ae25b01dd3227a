"""`./inv build`: every stage from sources to audited binaries, natively; an unchanged stage does nothing.

    sources ─► patches ─► kernels ─► vllm (upstream's wheel, or compiled) ─► audit

Each stage writes an artifact with its own manifest; the last stage audits all artifacts together. The `vllm`
stage compiles an overlay over upstream's wheel of the same version, not a wheel. Upstream's wheel holds parts that its
build fetches by git (triton_kernels, parts of flash-attention, the Rust frontend), and a second distribution with the
same files would break uninstalling the first.
"""

from __future__ import annotations

import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from sparkforge import pins
from sparkforge.audit import rules as audit_rules
from sparkforge.audit.report import audit_files
from sparkforge.compile import jobs, toolchain
from sparkforge.compile.flashinfer.build import KernelRequest, Take, build_kernels
from sparkforge.compile.vllm.build import ExtensionRequest, build_extensions
from sparkforge.core import manifest, paths
from sparkforge.core.console import Steps, console, say
from sparkforge.core.errors import CompileError, UsageError
from sparkforge.core.files import atomic_file, require_space, sha256_file, write_json
from sparkforge.core.manifest import Made
from sparkforge.patching import wheels
from sparkforge.pins.wheels import TargetMachine, choose_pinned
from sparkforge.sources import trees

WAYS = ("wheel", "source")
RECORD = ".sparkforge-overlay.vllm.json"
SCHEMA = 1
STAGE = "vllm-wheel"
TARGET = TargetMachine("aarch64")  # the server's machine, which may differ from this machine
UNPACKED = 3  # a wheel's unpacked size in packed sizes; upstream's for aarch64: 0.78 GB and 0.32 GB


@dataclass(frozen=True)
class BuildRequest:
    """The command line's options: `way` is one of WAYS; `python` serves, `compile_python` has torch with CUDA."""

    stack: str
    way: str = "wheel"
    jobs: str = "auto"
    python: str = ""
    compile_python: str = ""
    sources: str = ""
    take: Take | None = None


def require_way(way: str, machine: str = toolchain.THIS_MACHINE) -> None:
    """Raise UsageError unless `way` is one of WAYS and possible on this machine for `machine`.

    The ways are upstream's wheel, and compiling from source, which needs a machine of the same kind.
    """
    if way not in WAYS:
        raise UsageError(f"--from {way!r} is not known", f"it takes {' or '.join(WAYS)}", "--from wheel")
    if way == "source" and machine != toolchain.THIS_MACHINE:
        why = f"vLLM's extensions are compiled for {machine} on such a machine only"
        raise UsageError("--from source cannot be combined with --platform", why, "--from wheel")


def build(request: BuildRequest) -> dict[str, bool]:
    """Run every stage, print a table, and return which artifacts are new. Raises UsageError and the stages' errors."""
    require_way(request.way)
    jobs.parse_limit(request.jobs)
    if not pins.load().image(request.stack).kernels:
        why, fix = "it is built in a container image only", f"./inv build --engine docker --stack {request.stack}"
        raise UsageError(f"the stack {request.stack} is not built natively", why, fix)
    made, table = dict[str, bool](), Table("stage", "seconds", "", "artifact", box=None)
    artifacts, steps = dict[str, Path](), Steps(5)

    def run(name: str, stage: Callable[[], tuple[str | Path, bool]]) -> None:
        started = time.monotonic()
        with steps.step(name) as tell:
            artifact, made[name] = stage()
            tell(outcome := "made" if made[name] else "unchanged")
        artifacts[name] = Path(artifact)
        table.add_row(name, f"{time.monotonic() - started:.1f}", outcome, str(artifact))

    def unpack_sources() -> tuple[Path, bool]:
        """Unpack the package index's archives; stages that need git repositories fetch them themselves."""
        unpacked = trees.fetch_sources(request.stack, git=False)
        return trees.sources_folder(), any(source.state == "made" for source in unpacked)

    def make_wheels() -> tuple[str, bool]:
        components = wheels.patched_components(pins.load().stack(request.stack))
        patched = [wheels.patched_wheel(component, TARGET) for component in components]
        return ", ".join(wheel.lock.file for wheel in patched), any(wheel.is_new for wheel in patched)

    run("sources", unpack_sources)
    run("patches", make_wheels)
    modules = KernelRequest(request.stack, jobs=request.jobs, python=request.python, take=request.take)
    run("kernels", lambda: build_kernels(modules))
    if request.way == "source":
        extensions = ExtensionRequest(
            request.stack, sources=request.sources, jobs=request.jobs, python=request.compile_python
        )
        run("vllm", lambda: build_extensions(extensions))
    else:
        run("vllm", lambda: unpack_wheel(request.stack))
    run("audit", lambda: _audit_libraries(request.way, artifacts["kernels"], artifacts["vllm"]))
    console().print(table)
    return made


def _audit_libraries(way: str, kernels: Path, vllm: Path) -> tuple[Path, bool]:
    """Audit the libraries of both artifacts together, unless the same libraries passed the same rules before.

    The report is kept only if no rule is broken. Raises AuditError.
    """
    folders = {kernels: kernels.parent, vllm: vllm}
    records = {folder: manifest.load(artifact) for artifact, folder in folders.items()}
    files = [folder / name for folder, record in records.items() if record for name in sorted(record.outputs)]
    artifact = paths.state() / "build" / f"audit-{way}.json"
    inputs = {"rules": sha256_file(audit_rules.PATH), **{str(file): sha256_file(file) for file in files}}

    def make(temporary: Path) -> Made:
        report = audit_files(files, tools=toolchain.audit_tools)
        write_json(temporary, report.document())
        report.require_clean()
        return Made({artifact.name: sha256_file(temporary)}, facts={"files": len(report.binaries)})

    return artifact, manifest.once(artifact, "audit", inputs, make)[1]


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


def install_overlay(overlay: Path, tree: str) -> None:
    """Replace upstream's libraries in the site-packages `tree` with those of `overlay`.

    Their hashes are written to `tree`/.sparkforge-overlay.vllm.json. Raises CompileError, and replaces nothing, if
    the overlay is incomplete or does not fit.
    """
    packages, record = Path(tree), manifest.load(overlay)
    if record is None or record.stage != "vllm" or not manifest.is_intact(record, overlay):
        why = "it has no manifest of a build from source beside it, or a library was changed"
        raise _error(f"{overlay} is not an overlay", why, "./inv build --from source   # makes one")
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


def _error(failure: str, why: str, fix: str) -> CompileError:
    return CompileError(failure, why, fix, code="compile.incomplete")
