"""`./inv build --from source`: compile vLLM's extensions for SM121, without a GPU, into an overlay for its wheel.

    sdist ─► private patched copy ─► cmake ─► units, largest first ─► ninja links ─► audit ─► overlay and manifest

It builds only the targets of `targets.toml` that SM121 uses. After a kill the next build takes finished units from
ccache. The overlay appears when it is complete and has passed the audit (docs/concepts/vllm-extensions.md).
`compile_units` compiles and audits only some units, for a developer who edits one. vLLM's CMake files run a Python
interpreter (`ExtensionRequest.python`): its torch supplies headers and flags, and its jinja2 generates kernels.
"""

import fnmatch
import functools
import hashlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from sparkforge import environments, pins
from sparkforge.audit import rules as audit_rules
from sparkforge.audit.report import audit_files
from sparkforge.compile import ninja as ninja_build
from sparkforge.compile import toolchain
from sparkforge.compile.jobs import Site, Unit, parse_limit
from sparkforge.compile.ninja import BuildResult, explained
from sparkforge.compile.toolchain import Toolchain
from sparkforge.compile.vllm import sources as vllm_sources
from sparkforge.compile.vllm.sources import ExtensionSources, TargetTable
from sparkforge.core import manifest, paths
from sparkforge.core.console import say
from sparkforge.core.errors import CompileError, ProcessError, UsageError
from sparkforge.core.files import DocumentError, locked, sha256_file, write_atomic, write_json
from sparkforge.core.manifest import Made
from sparkforge.core.process import run, run_unchecked
from sparkforge.core.tables import parse_record

STAGE = "vllm"
LAYOUT = "1"  # increase it when this module makes a different build from the same inputs
MINIMUM_CXX = 13  # vLLM 0.32.0, CMakeLists.txt:1561-1571
SUPPORTED = re.compile(r"CUDA supported target architectures: (.*)$", re.MULTILINE)
GENCODE = re.compile(r"-gencode arch=\w+,code=(\w+)")
# CMake's rules that make an object. Since 3.28, which scans for C++ modules, the names have a suffix.
COMPILERS = re.compile(r"^(?:CUDA|CXX)_COMPILER__(.+?)(?:_(?:un)?scanned)?_Release$", re.MULTILINE)
OBJECT = re.compile(r"^CMakeFiles/(.+?)\.dir/(.+)$")
# Variables that CMake, or torch's and vLLM's CMake files, read; they would change the build.
CLEARED = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "CUDAFLAGS", "LDFLAGS", "CMAKE_ARGS", "PYTHONPATH", "PYTHONHOME")
# CMake may download nothing: every input is pinned in pins.toml.
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DVLLM_TARGET_DEVICE=cuda", "-DFETCHCONTENT_FULLY_DISCONNECTED=ON")
MINIMUM_CMAKE = (3, 26, 1)  # vLLM 0.32.0, pyproject.toml
PROBE = """
import importlib.util, json, sys, sysconfig
from pathlib import Path
facts = {"python": sys.version.split()[0], "include": sysconfig.get_path("include")}
facts["header"] = (Path(facts["include"]) / "Python.h").is_file()
facts["missing"] = [name for name in ("jinja2", "setuptools") if importlib.util.find_spec(name) is None]
try:
    import torch
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
except Exception as error:
    facts |= {"torch": "", "cuda": "", "error": repr(error)}
print(json.dumps(facts))
"""
FIX = "./inv build --from source without --compile-python makes an environment that fits"


class Facts(BaseModel):
    """The output of PROBE."""

    python: str
    include: str
    header: bool
    missing: list[str]
    torch: str
    cuda: str
    error: str = ""


@dataclass(frozen=True)
class Interpreter:
    """A fitting interpreter, its CMake, and the versions of torch, Python and CMake."""

    python: Path
    cmake: Path
    versions: dict[str, str]


def examine(python: Path, stack: str) -> Interpreter:
    """Return the versions in the environment of `python`. Raises CompileError, which names all that is missing."""
    try:
        lines = run([python, "-c", PROBE], fix=FIX).stdout.splitlines() or [""]
        facts = parse_record(lines[-1], f"the answer of {python}", Facts)
    except (ProcessError, DocumentError) as error:
        raise CompileError(f"cannot build with {python}", str(error), FIX, code="compile.inputs") from None
    pinned = pins.load().component(stack, "torch").version
    problems = {
        f"it has no torch: {facts.error}": not facts.torch,
        f"its torch is {facts.torch} instead of {pinned}": facts.torch.partition("+")[0] not in ("", pinned),
        f"its torch {facts.torch} is built without CUDA, which vLLM's CMake files need":
            facts.torch and not facts.cuda,
        f"it lacks {', '.join(facts.missing)}": facts.missing,
    }  # fmt: skip
    if reasons := [text for text, holds in problems.items() if holds]:
        raise CompileError(f"cannot build with {python}", "; ".join(reasons), FIX, code="compile.inputs")
    if not facts.header:
        why = f"{facts.include} has no Python.h, which every extension includes"
        fix = f"sudo apt install python{facts.python.rpartition('.')[0]}-dev"
        raise CompileError(f"cannot build with {python}", why, fix, code="compile.toolchain")
    cmake, version = find_cmake(python)
    versions = {"torch": facts.torch, "built for python": facts.python, "cmake": version}
    return Interpreter(python, cmake, versions)


def find_cmake(python: Path) -> tuple[Path, str]:
    """Return the CMake beside `python`, else that on PATH, and its version. Raises CompileError."""
    rejected = []
    for folder in (str(python.parent), None):
        if cmake := shutil.which("cmake", path=folder):
            version = re.search(r"(\d+)\.(\d+)\.(\d+)", run_unchecked([cmake, "--version"]).stdout)
            if version and tuple(map(int, version.groups())) >= MINIMUM_CMAKE:
                return Path(cmake).absolute(), version[0]
            rejected.append(f"{cmake} is {version[0] if version else 'no CMake'}")
    wanted = ".".join(map(str, MINIMUM_CMAKE))
    why = f"vLLM requires {wanted}, and there is {', '.join(rejected) or 'none'}"
    fix = f"{python} -m pip install 'cmake>={wanted},<5', or {FIX}"
    raise CompileError("no CMake that fits", why, fix, code="compile.toolchain")


@dataclass(frozen=True)
class ExtensionOrder:
    """A build order: `targets` for `arch`, into the overlay `output`, with these programs, from these sources."""

    targets: tuple[str, ...]
    arch: str
    output: Path
    chain: Toolchain
    interpreter: Interpreter
    sources: ExtensionSources
    table: TargetTable
    limit: int | None = None

    @property
    def configuration(self) -> dict[str, str]:
        """The inputs that determine a configured build folder; they do not depend on the targets."""
        tools = {name: self.chain.versions[name] for name in ("nvcc", "c++")}
        interpreter = {**self.interpreter.versions, "interpreter": str(self.interpreter.python)}
        return {"layout": LAYOUT, "arch": self.arch, **tools, **interpreter, **self.sources.identity}

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs of the overlay."""
        rules = {"targets": sha256_file(vllm_sources.TARGETS), "audit rules": sha256_file(audit_rules.PATH)}
        return {**self.configuration, **rules, "built": " ".join(self.targets)}

    @property
    def folder(self) -> Path:
        """The build folder: the patched copy, placeholder files for left-out repositories, and CMake's folder."""
        text = json.dumps(self.configuration, sort_keys=True)
        return home() / hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def lock(self) -> Path:
        """The lock that compilers hold while they work."""
        return self.folder / "units.lock"

    @property
    def env(self) -> dict[str, str]:
        """The variables of cmake, the compilers and ninja; with them ccache ignores the build folder's path."""
        variables = self.chain.environment()
        return {
            **variables,
            **dict.fromkeys(CLEARED, ""),
            "PATH": f"{self.interpreter.python.parent}{os.pathsep}{variables['PATH']}",
            "CCACHE_BASEDIR": str(self.folder),
            "TORCH_CUDA_ARCH_LIST": self.arch,
            "VLLM_TARGET_DEVICE": "cuda",
        }


def home() -> Path:
    """Return the folder of all build folders."""
    return paths.state() / "build" / "vllm"


@dataclass(frozen=True)
class ExtensionRequest:
    """A user's request: a stack's extensions.

    `targets` are comma-separated CMake targets (empty: all for SM121); `sources` is the folder of an unpacked bundle or
    of git checkouts (empty: the network); `arch` is the architecture (empty: that of the stack's image); `python` is an
    interpreter with torch and CUDA (empty: a new environment); `output` is the overlay's folder; `checkout` is a clone
    of vLLM that is compiled unchanged (empty: the pinned sdist with our patches applied). `units` are patterns of
    source files: only these are compiled and audited, nothing is linked, and unavailable repositories are left out.
    """

    stack: str
    targets: str = ""
    sources: str = ""
    jobs: str = "auto"
    arch: str = ""
    python: str = ""
    output: str = ""
    checkout: str = ""
    units: tuple[str, ...] = ()


def build_extensions(request: ExtensionRequest) -> tuple[Path, bool]:
    """Build a stack's vLLM extensions, print a summary, and return the overlay and whether it is new."""
    order = prepare(request)
    if request.units:
        compile_units(order, request.units)
        return order.output, False
    before = manifest.load(order.output)
    result = build(order)
    if result.compiled + result.cached == 0:
        say(f"{order.output}: unchanged, {len(order.targets)} targets of {result.units} units")
    else:
        say(f"{order.output}: {', '.join(order.targets)}; {result} ({result.seconds:.1f} s)")
    return order.output, manifest.load(order.output) != before


def prepare(request: ExtensionRequest) -> ExtensionOrder:
    """Check a request and fetch its inputs, the most expensive ones last."""
    stack, inputs_folder = request.stack, paths.typed(request.sources) if request.sources else None
    table = vllm_sources.load_targets(pins.load().component(stack, "vllm").version)
    chosen = table.chosen([name for name in request.targets.split(",") if name])
    arch = request.arch or pins.load().image(stack).architecture
    table.mapped(arch)
    limit = parse_limit(request.jobs)
    folder = paths.typed(request.output).absolute() if request.output else paths.state() / "vllm-overlay"
    if folder.exists() and manifest.load(folder) is None:
        failure = f"cannot write {folder}"
        raise UsageError(failure, "it exists and is not an overlay of ours", "--help   # name another folder")
    checkout = Path(request.checkout).absolute() if request.checkout else None
    some = bool(request.units)
    inputs = vllm_sources.fetch_sources(table, chosen, inputs_folder, stack, checkout, without_missing=some)
    chain = toolchain.find(arch, minimum_cxx=MINIMUM_CXX)
    if not shutil.which("patch"):  # CMakeLists.txt:402 uses it to patch a header of torch 2.13
        failure = "cannot build vLLM"
        raise CompileError(failure, "its CMake files run `patch`", "sudo apt install patch", code="compile.toolchain")
    python = paths.typed(request.python).absolute() if request.python else environments.build_interpreter(stack, "vllm")
    return ExtensionOrder(tuple(chosen), arch, folder, chain, examine(python, stack), inputs, table, limit)


def build(order: ExtensionOrder) -> BuildResult:
    """Build missing units, audit the libraries, and publish the overlay; with the same inputs do nothing.

    Raises ProcessError for a failed configuration or unit, CompileError, AuditError, StorageError; an earlier overlay
    then stays.
    """
    previous = manifest.current(order.output, STAGE, order.inputs)
    if previous and manifest.is_intact(previous, order.output):
        return BuildResult(0, 0, int(previous.facts["units"]))
    with locked(home().with_suffix(".lock"), "build vLLM's extensions"):
        started = time.monotonic()
        ninja_build.wait_for_orphans(order.lock)
        configure(order)
        units = units_of(order)
        result = _compile(order, units, order.targets)
        staged = _install(order)
        targets = [order.table.targets[name] for name in order.targets]
        files, modules = [staged / target.output for target in targets], [row.module for row in targets if row.module]
        report = audit_files(files, tools=toolchain.audit_tools, modules=modules, machine=os.uname().machine)
        write_json(order.folder / "audit.json", report.document())
        report.require_clean()
        result = replace(result, seconds=round(time.monotonic() - started, 3))
        outputs = {target.output: sha256_file(staged / target.output) for target in targets}
        audited = {name: sum(getattr(row, name) for row in report.coverage) for name in ("cubins", "kernels", "fp4")}
        facts = {**asdict(result), "code": code_of(units), "vllm": order.table.version, "machine": os.uname().machine}

        def make(temporary: Path) -> Made:
            """Copy, so that the staged files survive a kill."""
            for name in outputs:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(staged / name, temporary / name)
            tools = {**order.chain.versions, **order.interpreter.versions}
            return Made(outputs, tools, {**facts, "audit": audited})

        manifest.beside(order.output).unlink(missing_ok=True)
        manifest.once(order.output, STAGE, order.inputs, make)
        _remove_others(order)
        return result


def compile_units(order: ExtensionOrder, patterns: Sequence[str]) -> list[Path]:
    """Compile the units whose source matches one of `patterns`, audit each object, link nothing; return the objects.

    A source is named as in the checkout, such as csrc/topk.cu, and `*` stands for any text. Raises UsageError for a
    pattern that matches no unit, and the errors of `build`.
    """
    with locked(home().with_suffix(".lock"), "build vLLM's extensions"):
        started = time.monotonic()
        ninja_build.wait_for_orphans(order.lock)
        configure(order)
        sources = {unit.name.partition("/")[2].removesuffix(".o"): unit for unit in units_of(order)}
        for pattern in patterns:
            if not fnmatch.filter(sources, pattern):
                why = f"the targets that SM121 uses have {len(sources)} units, such as {', '.join(sorted(sources)[:3])}"
                raise UsageError(f"no unit matches {pattern}", why, "./inv dev.build vllm --units 'csrc/*.cu'")
        units = [unit for source, unit in sources.items() if any(fnmatch.fnmatch(source, name) for name in patterns)]
        objects = [order.folder / "cmake" / _object_of(unit) for unit in units]
        result = _compile(order, units, [_object_of(unit) for unit in units])
        report = audit_files(objects, tools=toolchain.audit_tools, machine=os.uname().machine)
        _remove_others(order)
    code = ", ".join(f"{number} for {name}" for name, number in code_of(units).items()) or "host code only"
    kernels = sum(row.kernels for row in report.coverage)
    seconds = time.monotonic() - started
    say(f"{result} ({seconds:.1f} s), at most {result.jobs} at once; {code}; {kernels} kernels audited")
    for path in objects:
        say(f"  {path}")
    report.require_clean()
    return objects


def _remove_others(order: ExtensionOrder) -> None:
    """Remove the build folders of other inputs, which take gigabytes each; ccache still has their objects."""
    for folder in home().iterdir():
        if folder != order.folder:
            manifest.remove(folder)


def _object_of(unit: Unit) -> str:
    target, _, source = unit.name.partition("/")
    return f"CMakeFiles/{target}.dir/{source}"


def configure(order: ExtensionOrder) -> None:
    """Make the build folder if there is none.

    Raises ProcessError, and CompileError if vLLM's CMake files select other architectures than targets.toml expects for
    `order.arch`.
    """
    tree = order.folder / "tree"
    order.folder.mkdir(parents=True, exist_ok=True)
    stamp = order.folder / "configured.json"
    if stamp.is_file():
        return
    for stale in (tree, order.folder / "cmake"):  # left by a killed run
        manifest.remove(stale)
    say("configuring: takes half a minute or more")
    vllm_sources.copy_tree(order.sources, tree)
    variables = {}
    for name, option in order.table.repositories.items():
        folder = order.sources.repositories[name].folder
        if folder is None:
            folder = order.folder / "left-out" / name
            for file in option.files:
                write_atomic(folder / file, vllm_sources.STAND_IN)
        variables[option.variable] = str(folder)
    command: list[str | Path] = [
        order.interpreter.cmake, "-G", "Ninja", "-S", tree, "-B", order.folder / "cmake", *OPTIONS,
        *(f"-D{name}={value}" for name, value in variables.items() if name != "TRITON_KERNELS_SRC_DIR"),
        f"-DCMAKE_MAKE_PROGRAM={order.chain.ninja}", f"-DVLLM_PYTHON_EXECUTABLE={order.interpreter.python}",
        f"-DFETCHCONTENT_BASE_DIR={order.folder / 'fetched'}",
    ]  # fmt: skip
    try:
        output = run(command, env={**order.env, **variables}).stdout
    except ProcessError as error:
        raise explained(error) from None
    expected, match = order.table.mapped(order.arch).base, SUPPORTED.search(output)
    if match is None or match[1] != expected:
        failure = f"vLLM's CMake files do not select {expected} for {order.arch}"
        why = f"they select {match[1] if match else 'nothing'}"
        fix = f"less {vllm_sources.TARGETS}   # correct [arch] according to CMakeLists.txt:108-131 of this vLLM"
        raise CompileError(failure, why, fix, code="compile.incomplete")
    write_json(stamp, order.configuration)


def units_of(order: ExtensionOrder) -> list[Unit]:
    """Return the compilations of the order's targets, named TARGET/SOURCE.o wherever they are built.

    Raises CompileError if CMake's rules are unknown, because ninja would compile such units without regard to memory.
    """
    folder = order.folder / "cmake"
    listing = run([order.chain.ninja, "-C", folder, "-t", "rules"]).stdout
    targets = {target.lstrip("_") for target in order.targets}  # CMake replaces several underscores by one
    rules = [rule[0] for rule in COMPILERS.finditer(listing) if rule[1].lstrip("_") in targets]
    unit_name = functools.partial(OBJECT.sub, r"\1/\2")
    units = ninja_build.read_units(folder, order.chain.ninja, rules, unit_name=unit_name) if rules else []
    if without := set(order.targets) - {unit.name.partition("/")[0] for unit in units}:
        failure = f"no units of {', '.join(sorted(without))} were found"
        why, cmake = f"{folder}/build.ninja has unknown rules or names", order.interpreter.versions["cmake"]
        fix = f"again   # first install the CMake of locks/build-vllm.txt; this one is {cmake}"
        raise CompileError(failure, why, fix, code="compile.incomplete")
    return units


def _compile(order: ExtensionOrder, units: Sequence[Unit], outputs: Sequence[str]) -> BuildResult:
    """Run the units that ninja would run for `outputs`, as memory allows, then ninja, which records them and links."""
    ninja: tuple[str | Path, ...] = (order.chain.ninja, "-C", order.folder / "cmake")
    commands = set(ninja_build.pending(ninja, *outputs, env=order.env))
    site = Site(order.env, order.folder / "logs", order.lock, order.limit)
    return ninja_build.build(
        units, commands, site, lambda schedule: run([*ninja, "-j", str(schedule.max_jobs), *outputs], env=order.env)
    )


def code_of(units: Sequence[Unit]) -> dict[str, int]:
    """Count the CUDA units by the machine code, and PTX, that their commands request."""
    codes = (" ".join(sorted(set(GENCODE.findall(unit.command[-1])))) for unit in units)
    return dict(Counter(code for code in codes if code))


def _install(order: ExtensionOrder) -> Path:
    """Let CMake install each target, which removes the build's run paths; return the folder."""
    staged = order.folder / "stage"
    manifest.remove(staged)
    for target in order.targets:
        run([order.interpreter.cmake, "--install", order.folder / "cmake", "--component", target, "--prefix", staged])
        if not (staged / order.table.targets[target].output).is_file():
            failure = f"{target} was built, but there is no {order.table.targets[target].output}"
            why = "CMake installs it under another name; an interpreter without the stable ABI does this"
            fix = "without --compile-python   # or name an interpreter that is not free-threaded"
            raise CompileError(failure, why, fix, code="compile.incomplete")
    return staged
