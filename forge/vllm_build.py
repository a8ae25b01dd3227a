"""`./inv build.vllm`: compile vLLM's own extensions for SM121, without a GPU, into an overlay for upstream's wheel.

    sdist ─► private patched copy ─► cmake ─► units, hungriest first ─► ninja links ─► audit ─► overlay and manifest

Only the targets of `vllm_targets.toml` that SM121 uses. A killed build goes on where it was: what was compiled comes
from ccache. The overlay appears when it is whole and the audit has nothing against it (docs/vllm-build.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from forge import (
    audit,
    audit_rules,
    jobs,
    manifest,
    ninja_units,
    orphans,
    toolchain,
    vllm_env,
    vllm_sources,
    vllm_targets,
)
from forge.diagnosis import explained
from forge.jobs import Unit
from forge.manifest import Made, Manifest
from forge.peaks import Peaks
from forge.toolchain import Toolchain
from forge.vllm_env import Interpreter
from forge.vllm_sources import Inputs
from forge.vllm_targets import Table
from sparkforge import paths
from sparkforge.console import say
from sparkforge.errors import BuildIncompleteError, CommandError, ToolchainError, UsageError
from sparkforge.files import locked, sha256_file, write_json
from sparkforge.process import run

STAGE = "vllm"
LAYOUT = "1"  # raise it when this module would make another build of the same inputs
MINIMUM_CXX = 13  # vLLM 0.32.0, CMakeLists.txt:1561-1571
SUPPORTED = re.compile(r"CUDA supported target architectures: (.*)$", re.MULTILINE)
GENCODE = re.compile(r"-gencode arch=\w+,code=(\w+)")
# CMake's rules that make an object, before and since 3.28, which looks for C++ modules.
COMPILERS = re.compile(r"^(?:CUDA|CXX)_COMPILER__(.+?)(?:_(?:un)?scanned)?_Release$", re.MULTILINE)
OBJECT = re.compile(r"^CMakeFiles/(.+?)\.dir/(.+)$")
# Read by CMake while it configures, or by torch's and vLLM's CMake files; they would make another build of it.
CLEARED = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "CUDAFLAGS", "LDFLAGS", "CMAKE_ARGS", "PYTHONPATH", "PYTHONHOME")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DVLLM_TARGET_DEVICE=cuda",
    "-DFETCHCONTENT_FULLY_DISCONNECTED=ON",  # nothing may come from a network that pins.toml has not seen
)


@dataclass(frozen=True)
class Order:
    """What to build: `targets` for `arch`, into `output`, with these programs, from these inputs."""

    targets: tuple[str, ...]
    arch: str
    output: Path
    chain: Toolchain
    interpreter: Interpreter
    sources: Inputs
    table: Table
    limit: int | None = None

    @property
    def configuration(self) -> dict[str, str]:
        """What a configured build folder comes from, whatever targets are built in it."""
        tools = {name: self.chain.versions[name] for name in ("nvcc", "c++")}
        interpreter = {**self.interpreter.versions, "interpreter": str(self.interpreter.python)}
        return {"layout": LAYOUT, "arch": self.arch, **tools, **interpreter, **self.sources.identity}

    @property
    def inputs(self) -> dict[str, str]:
        """What the overlay comes from."""
        rules = {"targets": sha256_file(vllm_targets.PATH), "audit rules": sha256_file(audit_rules.PATH)}
        return {**self.configuration, **rules, "built": " ".join(self.targets)}

    @property
    def folder(self) -> Path:
        """The build folder: the patched copy, the stand-ins, and CMake's folder lie in it."""
        text = json.dumps(self.configuration, sort_keys=True)
        return home() / hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def lock(self) -> Path:
        """What compilers hold while they work."""
        return self.folder / "units.lock"

    @property
    def env(self) -> dict[str, str]:
        """The variables of cmake, the compilers and ninja. What lies in the build folder hashes alike in every one."""
        ours = self.chain.environment()
        places = f"{self.interpreter.python.parent}{os.pathsep}{ours['PATH']}"
        return {
            **ours, **dict.fromkeys(CLEARED, ""), "PATH": places, "CCACHE_BASEDIR": str(self.folder),
            "TORCH_CUDA_ARCH_LIST": self.arch, "VLLM_TARGET_DEVICE": "cuda",
        }  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a build did: units compiled, taken from ccache, in all; wall and CPU-seconds; peak and budget in bytes.

    `code` counts the units by the machine code that they are compiled to.
    """

    compiled: int
    cached: int
    units: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak: int = 0
    budget: int = 0
    code: Mapping[str, int] | None = None


def home() -> Path:
    """Return the folder of all build folders."""
    return paths.state() / "build" / "vllm"


def overlay() -> Path:
    """Return where the overlay goes unless told otherwise."""
    return paths.state() / "vllm-overlay"


def show(targets: str, sources: str, jobs_wanted: str, arch: str, python: str, output: str) -> Path:
    """Build and say what was done; return the overlay. Raises UsageError and the errors of `build`."""
    order = prepare(targets, sources, jobs_wanted, arch, python, output)
    done = build(order)
    if done.compiled + done.cached == 0:
        say(f"{order.output}: unchanged, {len(order.targets)} targets of {done.units} units")
    else:
        told = f"{done.compiled} of {done.units} units compiled, {done.cached} from ccache"
        say(f"{order.output}: {', '.join(order.targets)}; {told} ({done.seconds:.1f} s)")
    return order.output


def prepare(targets: str, sources: str, jobs_wanted: str, arch: str, python: str, output: str) -> Order:
    """Return what the words of a command line ask for. What costs most to bring is looked for last."""
    table = vllm_targets.load()
    chosen = table.chosen([name for name in targets.split(",") if name])
    table.mapped(arch)
    limit = jobs.limit_of(jobs_wanted)
    place = paths.typed(output).absolute() if output else overlay()
    if place.exists() and manifest.load(place) is None:
        raise UsageError(f"cannot write {place}", "it exists and is no overlay of ours", "name another folder")
    inputs = vllm_sources.bring(table, chosen, paths.typed(sources) if sources else None)
    chain = toolchain.find(arch, minimum_cxx=MINIMUM_CXX)
    if not shutil.which("patch"):  # CMakeLists.txt:402 mends a header of torch 2.13 with it
        raise ToolchainError("cannot build vLLM", "its CMake files run `patch`", "sudo apt install patch")
    interpreter = vllm_env.examine(paths.typed(python).absolute() if python else vllm_env.ensure())
    return Order(tuple(chosen), arch, place, chain, interpreter, inputs, table, limit)


def build(order: Order) -> Outcome:
    """Build what is not built, audit it, and put the overlay in place; with the same inputs do nothing.

    Raises CommandError for what does not configure or compile, MemoryShortError, CompilerKilledError, AuditError,
    BuildIncompleteError, BusyError; the overlay that stood there stands there then.
    """
    if known := _current(order):
        return Outcome(0, 0, int(known.facts["units"]))
    with locked(home().with_suffix(".lock"), "build vLLM's extensions"):
        begun = time.monotonic()
        orphans.wait(order.lock)
        configure(order)
        outcome = _compile(order)
        staged = _install(order)
        report = _audited(order, staged)
        outcome = replace(outcome, seconds=round(time.monotonic() - begun, 3))
        _publish(order, staged, outcome, report)
        _remove_others(order)
        return outcome


def _current(order: Order) -> Manifest | None:
    """Return the manifest if inputs and outputs are what it says."""
    known = manifest.current(order.output, STAGE, order.inputs)
    if known is None:
        return None
    intact = all((order.output / name).is_file() and sha256_file(order.output / name) == sha256
                 for name, sha256 in known.outputs.items())  # fmt: skip
    return known if intact else None


def configure(order: Order) -> None:
    """Make the build folder unless it stands. Raises CommandError, and BuildIncompleteError for another mapping."""
    tree = order.folder / "tree"
    order.folder.mkdir(parents=True, exist_ok=True)
    stamp = order.folder / "configured.json"
    if stamp.is_file():
        return
    for stale in (tree, order.folder / "cmake"):  # of a run that was killed
        manifest.remove(stale)
    say("configuring: half a minute and more")
    vllm_sources.copy_tree(order.sources, tree)
    variables = vllm_sources.stand_ins(order.table, order.sources, order.folder / "left-out")
    words = [f"-D{name}={place}" for name, place in variables.items() if name != "TRITON_KERNELS_SRC_DIR"]
    command: list[str | Path] = [
        order.interpreter.cmake, "-G", "Ninja", "-S", tree, "-B", order.folder / "cmake", *OPTIONS, *words,
        f"-DCMAKE_MAKE_PROGRAM={order.chain.ninja}", f"-DVLLM_PYTHON_EXECUTABLE={order.interpreter.python}",
        f"-DFETCHCONTENT_BASE_DIR={order.folder / 'fetched'}",
    ]  # fmt: skip
    try:
        told = run(command, env={**order.env, **variables}).stdout
    except CommandError as error:
        raise explained(error) from None
    _require_mapping(order, told)
    write_json(stamp, order.configuration)


def _require_mapping(order: Order, told: str) -> None:
    """Raise BuildIncompleteError if CMake has made something else of the architecture than the table says."""
    wanted, found = order.table.mapped(order.arch).base, SUPPORTED.search(told)
    if found is None or found[1] != wanted:
        raise BuildIncompleteError(
            f"vLLM's CMake files do not make {wanted} of {order.arch}",
            f"they make {found[1] if found else 'nothing'} of it",
            "read CMakeLists.txt:108-131 of this vLLM, and correct [arch] in forge/vllm_targets.toml",
        )


def units_of(order: Order) -> list[Unit]:
    """Return the compilations of the order's targets, named TARGET/SOURCE.o wherever they are built.

    Raises BuildIncompleteError if CMake's rules are not the ones we know: what is not planned would be compiled by
    ninja without regard to memory.
    """
    folder = order.folder / "cmake"
    told = run([order.chain.ninja, "-C", folder, "-t", "rules"]).stdout
    known = {target.lstrip("_"): target for target in order.targets}  # CMake writes one underscore for several
    rules = [rule[0] for rule in COMPILERS.finditer(told) if rule[1].lstrip("_") in known]
    found = ninja_units.found(folder, order.chain.ninja, rules, named=_named) if rules else []
    if without := set(order.targets) - {unit.name.partition("/")[0] for unit in found}:
        raise BuildIncompleteError(
            f"no units of {', '.join(sorted(without))} were found",
            f"{folder}/build.ninja names them in a way of its own",
            f"use the CMake of locks/build-vllm.txt; here it is {order.interpreter.versions['cmake']}",
        )
    return found


def _named(_folder: Path, output: str) -> str:
    found = OBJECT.match(output)
    return f"{found[1]}/{found[2]}" if found else output


def _compile(order: Order) -> Outcome:
    """Run the units that ninja would run, as memory allows, and then ninja, which records them and links."""
    folder, every = order.folder / "cmake", units_of(order)
    command: tuple[str | Path, ...] = (order.chain.ninja, "-C", folder)
    commands = set(ninja_units.pending(command, *order.targets, env=order.env))
    report, schedule = ninja_units.build(
        [unit for unit in every if unit.command[-1] in commands],
        Peaks(f"nvcc {order.chain.versions['nvcc']} {order.arch}"),
        ninja_units.Site(order.env, order.folder / "logs", order.lock, order.limit),
        lambda made: run([*command, "-j", str(made.max_jobs), *order.targets], env=order.env),
    )
    cached = sum(done.cached for done in report.units.values())
    return Outcome(
        len(report.units) - cached, cached, len(every), cpu_seconds=round(report.cpu_seconds, 1), peak=report.peak,
        budget=schedule.budget, code=code_of(every),
    )  # fmt: skip


def code_of(units: Sequence[Unit]) -> dict[str, int]:
    """Count the CUDA units by the machine code, and PTX, that their commands ask for."""
    found = (" ".join(sorted(set(GENCODE.findall(unit.command[-1])))) for unit in units)
    return dict(Counter(code for code in found if code))


def _install(order: Order) -> Path:
    """Have CMake install each target, which takes the build's own run paths out of it; return the folder."""
    staged = order.folder / "stage"
    manifest.remove(staged)
    for target in order.targets:
        run([order.interpreter.cmake, "--install", order.folder / "cmake", "--component", target, "--prefix", staged])
        if not (staged / order.table.targets[target].output).is_file():
            raise BuildIncompleteError(
                f"{target} was built, but there is no {order.table.targets[target].output}",
                "CMake installs it under another name; an interpreter without the stable ABI does this",
                "name an interpreter that is not free-threaded: ./inv build.vllm --python PATH",
            )
    return staged


def _audited(order: Order, staged: Path) -> audit.Report:
    """Audit each library, and that it is the one that it claims to be. Raises AuditError."""
    rules = audit_rules.load()
    files = [staged / order.table.targets[target].output for target in order.targets]
    modules = [name for target in order.targets if (name := order.table.targets[target].module)]
    report = audit.audit(files, modules=modules, machine=os.uname().machine, rules=rules)
    write_json(order.folder / "audit.json", report.document())
    report.require_clean()
    return report


def _publish(order: Order, staged: Path, outcome: Outcome, report: audit.Report) -> None:
    """Put the overlay in place, and its manifest beside it."""
    outputs = {name: sha256_file(staged / name) for name in (order.table.targets[one].output for one in order.targets)}
    counted = {name: sum(getattr(row, name) for row in report.coverage) for name in ("cubins", "kernels", "fp4")}
    facts = {**asdict(outcome), "vllm": order.table.version, "machine": os.uname().machine, "audit": counted}

    def make(temporary: Path) -> Made:
        """Copy, so that a killed publication leaves what was staged."""
        for name in outputs:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(staged / name, temporary / name)
        return Made(outputs, {**order.chain.versions, **order.interpreter.versions}, facts)

    manifest.beside(order.output).unlink(missing_ok=True)
    manifest.once(order.output, STAGE, order.inputs, make)


def _remove_others(order: Order) -> None:
    """Remove build folders of other inputs, gigabytes each; ccache still has their objects."""
    for folder in home().iterdir():
        if folder != order.folder:
            manifest.remove(folder)
