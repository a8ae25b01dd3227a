"""`./inv build.kernels`: compile FlashInfer's modules ahead of time, with no GPU, into the cache that a server reads.

    kernels.toml ─► FlashInfer writes build.ninja ─► units, most memory first ─► ninja links ─► audit ─► manifest

A server with the same paths and variables runs ninja on the same files and has nothing to compile
(docs/concepts/kernels.md). After a kill the next build takes finished units from ccache. The manifest is removed first
and written last. FlashInfer writes paths and flags into each build.ninja, and again at run time; ninja then compiles
every unit that differs. So this module sets the variables that reach build.ninja, and removes all others.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from sparkforge import environments, pins
from sparkforge.audit import rules as audit_rules
from sparkforge.audit.report import AuditReport, audit_files
from sparkforge.compile import ninja as ninja_build
from sparkforge.compile import toolchain
from sparkforge.compile.flashinfer import sets
from sparkforge.compile.flashinfer.sets import KernelModule, KernelTable
from sparkforge.compile.jobs import Schedule, Site, cost, parse_limit
from sparkforge.compile.ninja import BuildResult
from sparkforge.compile.toolchain import Toolchain
from sparkforge.core import manifest, paths
from sparkforge.core.console import say
from sparkforge.core.errors import CompileError, IntegrityError, SparkforgeError, UsageError
from sparkforge.core.files import (
    locked,
    parse_json,
    require_space,
    sha256_file,
    write_atomic,
    write_json,
)
from sparkforge.core.installed import Installed
from sparkforge.core.manifest import Manifest
from sparkforge.core.process import run
from sparkforge.pins import verify
from sparkforge.pins.verify import ImageChanges, load_patched
from sparkforge.sources import archive

STAGE, PACK = "kernels", "pack"
SPACE = 300_000_000  # bytes: objects, libraries and ccache took 0.1 GB on x86-64; the rest is for temporary files
# FlashInfer loads a module from here without a lock, ninja or a compiler (flashinfer/jit/env.py: FLASHINFER_AOT_DIR).
AHEAD_OF_TIME = "flashinfer/data/aot"
SPECS = Path(__file__).with_name("specs.py")
# Variables that flashinfer/jit/cpp_ext.py and core.py of 0.7.0.post1 read; each would change build.ninja.
REMOVED = (
    "CC", "CUDA_PATH", "FLASHINFER_NVCC", "FLASHINFER_NVCC_THREADS", "FLASHINFER_EXTRA_CFLAGS",
    "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS", "FLASHINFER_JIT_DEBUG", "FLASHINFER_JIT_VERBOSE",
    "FLASHINFER_DISABLE_JIT", "PYTHONPATH", "PYTHONHOME",
)  # fmt: skip
# The compilers' variables that the server must have too.
COMPILER_VARIABLES = ("CUDA_HOME", "CXX", "FLASHINFER_NVCC_LAUNCHER", "FLASHINFER_CXX_LAUNCHER")
# A function that puts an order's libraries at the given paths (by module name) and returns facts for the manifest,
# including PACK and the number of units. If it returns None, the libraries are compiled.
Take: TypeAlias = "Callable[[KernelOrder, Mapping[str, Path]], Mapping[str, Any] | None]"


@dataclass(frozen=True)
class KernelRequest:
    """A user's request: a set of a stack's modules.

    An empty `set_name` or `arch` means the image's, an empty `output` means `.sparkforge/kernels`, and an empty
    `python` means an environment that is made for the build. `machine` is the server's, as in `uname -m`. `output`
    is the folder of the cache, `python` the interpreter of the environment that serves, `jobs` a number or "auto".
    `checkout` is a clone of FlashInfer that this interpreter imports instead of the patched wheel.
    """

    stack: str
    set_name: str = ""
    arch: str = ""
    jobs: str = "auto"
    output: str = ""
    python: str = ""
    checkout: str = ""
    take: Take | None = None
    machine: str = toolchain.THIS_MACHINE


@dataclass(frozen=True)
class KernelEnvironment:
    """An interpreter with a patched FlashInfer: versions by distribution, Python's headers, its queue's sha256."""

    python: Path
    site_packages: Path
    versions: Mapping[str, str]
    include: str
    queue: str

    def ninja(self, chain: Toolchain) -> Path:
        """Return the ninja that FlashInfer runs; ninja 1.11 cannot read 1.13's log and would compile again."""
        own_ninja = self.python.parent / "ninja"
        return own_ninja if own_ninja.is_file() else chain.ninja


@dataclass(frozen=True)
class KernelOrder:
    """A build order: the modules of a table's set for `arch`, under `output`, for the server in `environment`."""

    table: KernelTable
    set_name: str
    modules: tuple[KernelModule, ...]
    arch: str
    output: Path
    environment: KernelEnvironment
    chain: Toolchain
    limit: int | None = None

    @property
    def variables_file(self) -> Path:
        """The file of the server's variables, DIR/kernels-SET.env; the manifest is beside it."""
        return self.output / f"kernels-{self.set_name}.env"

    @property
    def is_native(self) -> bool:
        """Whether a server of the modules can run here."""
        return self.chain.machine == toolchain.THIS_MACHINE

    @property
    def lock(self) -> Path:
        """The lock that compilers hold while they work."""
        return self.output / ".sparkforge-units.lock"

    @property
    def server_variables(self) -> dict[str, str]:
        """The variables with which a server has nothing to compile; the build sets the same."""
        variables = self.chain.environment()
        compilers = {name: variables[name] for name in COMPILER_VARIABLES}
        own = {"FLASHINFER_CUDA_ARCH_LIST": self.arch, "FLASHINFER_WORKSPACE_BASE": str(self.output)}
        return {**compilers, **self.table.environment, **self.table.server, **own}

    @property
    def env(self) -> dict[str, str]:
        """The variables of generators, compilers and ninja; the environment's own programs come first in PATH."""
        variables = self.chain.environment()
        path = f"{self.environment.python.parent}{os.pathsep}{variables['PATH']}"
        return {**variables, **self.server_variables, "PATH": path}

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs of the built modules, as name → hash, version or value."""
        return {
            **self.environment.versions, **self.server_variables, "queue": self.environment.queue,
            "modules": self.table.digest(self.modules), "audit rules": sha256_file(audit_rules.PATH),
            "python": self.environment.include, "site-packages": str(self.environment.site_packages),
            "ninja": run([self.environment.ninja(self.chain), "--version"]).stdout.strip(),
            "machine": self.chain.machine, **{name: self.chain.versions[name] for name in ("nvcc", "c++", "glibc")},
        }  # fmt: skip

    @property
    def identity(self) -> dict[str, str]:
        """The inputs that are equal on every machine: `inputs` without folders and without torch's device.

        FlashInfer's generators use nothing of torch that differs between its builds for CPU and CUDA.
        """
        folders = {*COMPILER_VARIABLES, "FLASHINFER_WORKSPACE_BASE", "python", "site-packages"}
        inputs = {name: value for name, value in self.inputs.items() if name not in folders}
        return {**inputs, "torch": inputs.get("torch", "").partition("+")[0]}

    def ninja(self, folder: Path) -> tuple[str | Path, ...]:
        """Return the command of the server's ninja for a module's folder."""
        return (self.environment.ninja(self.chain), "-C", folder, "-f", folder / "build.ninja")


def build_kernels(request: KernelRequest) -> tuple[Path, bool]:
    """Build a request; return the file of the server's variables, and whether anything was done. Raises as `build`."""
    started, order = time.monotonic(), prepare(request)
    result, changed = build(order, request.take)
    say(f"{len(order.modules)} modules in {order.output}: {result} ({time.monotonic() - started:.1f} s)")
    if not changed:
        say("unchanged: there was nothing to do")
    if order.is_native:
        say(f"the server's variables: {order.variables_file}")
    else:
        say(f"they are for {order.chain.machine}: --publish PLACE makes a kernel pack of them")
    return order.variables_file, changed


def prepare(request: KernelRequest) -> KernelOrder:
    """Resolve a request to an order. Raises UsageError and the errors of environment and toolchain."""
    stack = request.stack
    image = pins.load().image(stack)
    set_name, arch = request.set_name or image.kernels, request.arch or image.architecture
    if arch and arch not in toolchain.SINCE:
        why = f"choose from {', '.join(toolchain.SINCE)}"
        raise UsageError(f"--arch {arch[:40]!r} is not known", why, f"--arch {image.architecture or '12.1a'}")
    if not set_name or not arch:
        why = f"pins.toml names no kernels and no architecture under [stacks.{stack}.image]"
        failure = f"the stack {stack} has no kernels to build"
        raise UsageError(failure, why, "./inv build.kernels --help   # name another stack")
    table = sets.load(pins.load().component(stack, "flashinfer").version)
    modules = table.chosen(set_name)
    limit = parse_limit(request.jobs)
    if request.python:
        interpreter = Path(request.python).absolute()  # not resolved: a virtual environment's link identifies it
        if not interpreter.is_file():
            fix = "without --python"
            raise UsageError(f"cannot build for {interpreter}", "there is no such interpreter", fix)
    else:
        say("no --python: building for a new environment, which no server uses")
        interpreter = environments.build_interpreter(stack, "kernels")
    server = examine(interpreter, table, stack, Path(request.checkout) if request.checkout else None)
    chain = toolchain.find(arch, machine=request.machine)
    default = "kernels" if chain.machine == toolchain.THIS_MACHINE else f"kernels-{chain.machine}"
    folder = Path(request.output).absolute() if request.output else paths.state() / default
    return KernelOrder(table, set_name, modules, arch, folder, server, chain, limit)


def examine(python: Path, table: KernelTable, stack: str, checkout: Path | None = None) -> KernelEnvironment:
    """Return the environment of `python`. Raises CompileError if FlashInfer, torch or the stack's patches do not fit.

    If `python` imports FlashInfer from the clone `checkout`, any change to its sources is accepted.
    """
    answer = ask(python, "probe")
    versions = {name: answer[name] for name in ("flashinfer-python", "torch", "apache-tvm-ffi")}
    problems = [f"{name} is not installed" for name, value in answer.items() if not value]
    if versions["flashinfer-python"].partition("+")[0] not in ("", table.flashinfer):
        problems = [f"it has flashinfer-python {versions['flashinfer-python']} instead of {table.flashinfer}"]
    fix = "without --python   # or name another one"
    if not problems and checkout:
        if Path(answer["package"]).resolve().parent == checkout.resolve():
            parts = ("csrc", "include", "flashinfer/jit")  # the inputs of generators and compilers
            files = (path for part in parts for path in sorted((checkout / part).rglob("*")) if path.suffix != ".pyc")
            listing = {str(path.relative_to(checkout)): sha256_file(path) for path in files if path.is_file()}
            queue = f"checkout {archive.tree_sha256(listing)}"
            return KernelEnvironment(python, checkout, versions, answer["include"], queue)
        problems = [f"it imports {answer['package']} instead of the checkout {checkout}"]
        fix = "again   # first restart the container; its start makes the checkout importable"
    elif not problems:
        site_packages = Path(answer["package"]).parent
        pinned = pins.load().component(stack, "flashinfer").patches
        try:
            info = site_packages / f"flashinfer_python-{versions['flashinfer-python']}.dist-info"
            installed = Installed.read(info)
            lock = verify.require_locked(installed, load_patched())
            problems = verify.differences(installed, ImageChanges())[:5]
            if lock.queue != pinned:
                problems = [f"its FlashInfer has the patches {lock.queue} instead of {pinned}"]
            if not problems:
                return KernelEnvironment(python, site_packages, versions, answer["include"], lock.queue_sha256)
        except IntegrityError as error:
            problems = [f"{error.what}: {error.why}"]
        fix = "./inv patch   # prints the path of FlashInfer's patched wheel; install it there"
    raise CompileError(f"no kernels can be built for {python}", "; ".join(problems), fix, code="compile.environment")


def ask(python: Path, question: str, *, env: Mapping[str, str] | None = None, requests: Any = None) -> Any:
    """Run specs.py with the interpreter `python` and return its parsed output. Raises CompileError."""
    fix = "without --python   # or name an interpreter that has FlashInfer and torch"
    unset = [word for name in REMOVED for word in ("-u", name)]
    try:
        output = run(["env", *unset, python, SPECS, question], env=env, stdin=json.dumps(requests), fix=fix).stdout
        answer = parse_json((output.splitlines() or [""])[-1], f"the answer of {python}")
    except SparkforgeError as error:
        raise CompileError(f"cannot query {python}", error.why, fix, code="compile.environment") from None
    if isinstance(answer, dict) and "error" in answer:
        raise CompileError(f"FlashInfer of {python} refuses", str(answer["error"]), fix, code="compile.environment")
    if not isinstance(answer, dict if question == "probe" else list):
        raise CompileError(f"cannot query {python}", "its answer is malformed", fix, code="compile.environment")
    return answer


def write(environment: KernelEnvironment, modules: tuple[KernelModule, ...], env: Mapping[str, str]) -> dict[str, Path]:
    """Let FlashInfer write sources and build.ninja of `modules`; return each module's folder by name."""
    answer = ask(environment.python, "write", env=env, requests=[sets.request(module) for module in modules])
    return {module["name"]: Path(module["folder"]) for module in answer}


def build(order: KernelOrder, take: Take | None = None) -> tuple[BuildResult, bool]:
    """Compile missing units, link, audit and write the manifest; return the result and whether anything was done.

    With the same inputs and intact outputs it does nothing. Libraries from `take` are audited like compiled ones and
    copied into the server's FlashInfer package, from which they are loaded without ninja. Raises ProcessError for a
    unit that does not compile, CompileError (also if a server would compile again), AuditError, StorageError.
    """
    inputs = order.inputs
    with locked(order.output / ".sparkforge-kernels.lock", f"build kernels in {order.output}"):
        ninja_build.wait_for_orphans(order.lock)
        previous = manifest.current(order.variables_file, STAGE, inputs)
        if previous and manifest.is_intact(previous, order.output):
            folders = {(order.output / name).parent for name in previous.outputs}
            if PACK in previous.facts or not any(ninja_build.pending(order.ninja(folder)) for folder in folders):
                return BuildResult(0, 0, int(previous.facts["units"])), False
        require_space(order.output, SPACE, "the kernels")
        manifest.beside(order.variables_file).unlink(missing_ok=True)
        started = time.monotonic()
        modules = write(order.environment, order.modules, order.env)
        libraries = {name: folder / f"{name}.so" for name, folder in modules.items()}
        for library in libraries.values():  # not trusted without a manifest; linking them again is quick
            library.unlink(missing_ok=True)
        taken = take(order, libraries) if take else None
        result, facts = (BuildResult(0, 0, int(taken["units"])), dict(taken)) if taken else _compile(order, modules)
        for name, folder in modules.items():
            if not taken and (commands := ninja_build.pending(order.ninja(folder))):
                why = f"ninja would still run {len(commands)} commands, the first: {commands[0][:120]} …"
                fix = f"ninja -C {folder} -n -d explain   # prints the reason; one cause is a clock that was set back"
                raise CompileError(f"{name} is not finished", why, fix, code="compile.kernels")
        report = _audit(order, libraries)
        for name, library in libraries.items():
            loaded = order.environment.site_packages / AHEAD_OF_TIME / name / library.name
            if not order.is_native:
                continue
            if taken:
                loaded.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(library, loaded)
            elif loaded.is_file() and sha256_file(loaded) != sha256_file(library):
                say(f"removing {loaded}: it would be loaded instead of the compiled library")
                loaded.unlink()
        result = replace(result, seconds=round(time.monotonic() - started, 3))
        variables = order.server_variables
        write_atomic(order.variables_file, "".join(f"{name}={value}\n" for name, value in sorted(variables.items())))
        outputs = {str(path.relative_to(order.output.resolve())): sha256_file(path) for path in libraries.values()}
        audited = {name: sum(getattr(row, name) for row in report.coverage) for name in ("kernels", "fp4")}
        facts |= {key: value for key, value in asdict(result).items() if key != "seconds"}
        facts |= {"server": variables, "audit": audited}
        tools = {**order.chain.versions, **order.environment.versions}
        record = Manifest(STAGE, inputs, outputs, tools, facts, result.seconds)
        write_json(manifest.beside(order.variables_file), asdict(record))
        return result, True


def _compile(order: KernelOrder, folders: Mapping[str, Path]) -> tuple[BuildResult, dict[str, object]]:
    """Run the units that ninja would run, as memory allows, and then ninja, which links.

    Also return facts for the manifest: the number of units of each module, and the cost of each unit with its source.
    """
    modules = {name: ninja_build.read_units(folder, order.ninja(folder)[0]) for name, folder in folders.items()}
    units = [unit for module in modules.values() for unit in module]
    unlinked = {name: ninja_build.pending(order.ninja(folder)) for name, folder in folders.items()}

    def link(schedule: Schedule) -> None:
        for name, commands in unlinked.items():
            if commands:
                run([*order.ninja(folders[name]), "-j", str(schedule.max_jobs)], env=order.env)

    site = Site(order.env, order.output / "logs", order.lock, order.limit)
    result = ninja_build.build(units, set().union(*unlinked.values()), site, link)
    return result, {
        "modules": {name: len(module) for name, module in modules.items()},
        "each": {unit.name: asdict(cost(unit.name)) for unit in units},
    }


def _audit(order: KernelOrder, libraries: Mapping[str, Path]) -> AuditReport:
    rules = audit_rules.load()
    machine = order.chain.machine
    report = audit_files(list(libraries.values()), tools=toolchain.audit_tools, machine=machine, rules=rules)
    violations = list(report.violations)
    for module in order.modules:
        binaries = [binary for binary in report.binaries if binary.path == str(libraries[module.name])]
        violations += audit_rules.judge_modules(binaries, [module.audit], rules)
    report = replace(report, violations=tuple(violations))
    write_json(order.output / f"audit-{order.set_name}.json", report.document())
    report.require_clean()
    return report
