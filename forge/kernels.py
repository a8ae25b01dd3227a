"""`./inv build.kernels`: compile FlashInfer's modules ahead of time, with no GPU, into the cache that a server reads.

    kernels.toml ─► FlashInfer writes build.ninja ─► units, hungriest first ─► ninja links ─► audit ─► manifest

A server runs ninja on the same files and finds nothing to do, if its paths and variables are the same
(docs/kernels.md). A killed build goes on where it was: what was compiled comes from ccache. The manifest is removed
first and written last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from forge import (
    audit,
    audit_rules,
    jobs,
    kernel_env,
    kernel_home,
    kernel_sets,
    manifest,
    ninja_units,
    orphans,
    toolchain,
)
from forge.jobs import Plan
from forge.kernel_env import Environment
from forge.kernel_sets import Module
from forge.manifest import Manifest
from forge.memory import Machine
from forge.peaks import Peaks
from forge.toolchain import Toolchain
from sparkforge import paths
from sparkforge.console import say
from sparkforge.errors import KernelsIncompleteError, UsageError
from sparkforge.files import locked, require_space, sha256_file, write_atomic, write_json
from sparkforge.process import run

STAGE = "kernels"
ROOM = 300_000_000  # bytes: objects, libraries and ccache took 0.1 GB on x86-64; the rest is the compilers' own files
SPARK = Machine(119 << 30, 20)  # bytes and cores, docs/hardware.md; for a projection, with nothing else running


@dataclass(frozen=True)
class Order:
    """What to build: modules for `arch`, under `output`, for the server whose interpreter is in `where`."""

    name: str
    modules: tuple[Module, ...]
    arch: str
    output: Path
    where: Environment
    chain: Toolchain
    limit: int | None = None

    @property
    def place(self) -> Path:
        """What the manifest lies beside: DIR/kernels-SET, with the variables for the server."""
        return self.output / f"kernels-{self.name}.env"

    @property
    def lock(self) -> Path:
        """What compilers hold while they work."""
        return self.output / ".sparkforge-units.lock"

    @property
    def server(self) -> dict[str, str]:
        """The variables that the server must have."""
        return kernel_env.served(self.chain, kernel_sets.load(), self.arch, self.output)

    @property
    def env(self) -> dict[str, str]:
        """The variables of generators, compilers and ninja; the environment's own programs are found first."""
        ours = self.chain.environment()
        return {**ours, **self.server, "PATH": f"{self.where.python.parent}{os.pathsep}{ours['PATH']}"}

    @property
    def inputs(self) -> dict[str, str]:
        """What the modules come from."""
        return kernel_env.inputs(self.where, self.chain, self.modules, self.server)


@dataclass(frozen=True)
class Outcome:
    """What a build did: units compiled, taken from ccache, in all; wall and CPU-seconds.

    `peak` is the largest sampled sum of resident sizes, `budget` what they had to stay below, both in bytes; `modules`
    has the number of each one's units, `each` what every unit takes and how that is known, and `projection` what the
    planner expects of all units on a Spark whose cores are as fast as ours.
    """

    compiled: int
    cached: int
    units: int
    unchanged: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak: int = 0
    budget: int = 0
    jobs: int = 0
    modules: Mapping[str, int] = field(default_factory=dict)
    projection: Mapping[str, float] = field(default_factory=dict)
    each: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def show(name: str, arch: str, jobs_wanted: str, output: str, python: str) -> None:
    """Build a set and say what was done. Raises UsageError and the errors of `build`."""
    begun = time.monotonic()
    modules = kernel_sets.load().chosen(name)
    where = kernel_env.examine(_interpreter(python), kernel_sets.load())
    place = Path(output).absolute() if output else paths.state() / "kernels"
    order = Order(name, modules, arch, place, where, toolchain.find(arch), jobs.limit_of(jobs_wanted))
    done = build(order)
    told = f"{done.compiled} of {done.units} units compiled, {done.cached} from ccache"
    say(f"{len(modules)} modules in {place}: {told} ({time.monotonic() - begun:.1f} s)")
    if done.unchanged:
        say("unchanged: there was nothing to do")
    say(f"the server's variables: {order.place}")


def _interpreter(python: str) -> Path:
    if not python:
        say("no --python: building for an environment of our own, which no server has")
        return kernel_home.ensure()
    path = Path(python).absolute()  # not resolved: a virtual environment is found by its link
    if not path.is_file():
        raise UsageError(
            f"cannot build for {path}", "there is no such interpreter", "./inv build.kernels --python PATH/bin/python"
        )
    return path


def build(order: Order) -> Outcome:
    """Build what is not built, audit it, and write the manifest; with the same inputs and intact outputs do nothing.

    Raises KernelEnvironmentError, CommandError for what does not compile, MemoryShortError, CompilerKilledError,
    AuditError, KernelsIncompleteError where a server would compile again, BusyError.
    """
    inputs = order.inputs
    with locked(order.output / ".sparkforge-kernels.lock", f"build kernels in {order.output}"):
        orphans.wait(order.lock)
        if known := _current(order, inputs):
            return Outcome(0, 0, int(known.facts["units"]), unchanged=True)
        require_space(order.output, ROOM, "the kernels")
        manifest.beside(order.place).unlink(missing_ok=True)
        begun = time.monotonic()
        folders = kernel_env.write(order.where, order.modules, order.env)
        for name, folder in folders.items():  # a library without a manifest is not trusted; to link it takes no time
            (folder / f"{name}.so").unlink(missing_ok=True)
        outcome = _compile(order, folders)
        _require_finished(order, folders)
        report = _audited(order, folders)
        _record(order, inputs, folders, replace(outcome, seconds=round(time.monotonic() - begun, 3)), report)
        return outcome


def _current(order: Order, inputs: Mapping[str, str]) -> Manifest | None:
    """Return the manifest if inputs and outputs are what it says, and ninja would do nothing."""
    known = manifest.current(order.place, STAGE, inputs)
    if known is None:
        return None
    intact = all((order.output / name).is_file() and sha256_file(order.output / name) == sha256
                 for name, sha256 in known.outputs.items())  # fmt: skip
    folders = [(order.output / name).parent for name in known.outputs]
    ninja = order.where.ninja(order.chain)
    return known if intact and not any(pending(folder, ninja) for folder in folders) else None


def pending(folder: Path, ninja: Path) -> list[str]:
    """Return the commands that ninja would run in a module's folder. Raises CommandError."""
    return ninja_units.pending(_ninja(folder, ninja))


def _ninja(folder: Path, ninja: Path) -> tuple[str | Path, ...]:
    return (ninja, "-C", folder, "-f", folder / "build.ninja")


def _compile(order: Order, folders: Mapping[str, Path]) -> Outcome:
    """Run the units that ninja would run, as memory allows, and then ninja, which links."""
    ninja = order.where.ninja(order.chain)
    found = {name: ninja_units.found(folder, ninja) for name, folder in folders.items()}
    every = [unit for each in found.values() for unit in each]
    left = {name: pending(folder, ninja) for name, folder in folders.items()}
    commands = {command for lines in left.values() for command in lines}
    peaks = Peaks(f"nvcc {order.chain.versions['nvcc']} {order.arch}")
    report, schedule = ninja_units.build(
        [unit for unit in every if unit.command[-1] in commands],
        peaks,
        ninja_units.Site(order.env, order.output / "logs", order.lock, order.limit),
        partial(_link, [folders[name] for name, lines in left.items() if lines], order),
    )
    compiled = sum(not done.cached for done in report.units.values())
    return Outcome(
        compiled, len(report.units) - compiled, len(every), cpu_seconds=round(report.cpu_seconds, 1),
        peak=report.peak, budget=schedule.budget, jobs=schedule.jobs,
        each={unit.name: asdict(peaks.cost(unit.name)) for unit in every},
        modules={name: len(each) for name, each in found.items()},
        projection=_projected([unit.name for unit in every], peaks),
    )  # fmt: skip


def _projected(names: list[str], peaks: Peaks) -> dict[str, float]:
    """Return what all units would take on a Spark, by the planner and the costs known here."""
    wall = jobs.plan(names, peaks, SPARK).seconds()
    return {"cores": SPARK.cores, "available": SPARK.available, "wall_seconds": round(wall, 1)}


def _link(modules: list[Path], order: Order, schedule: Plan) -> None:
    """Have ninja take the objects from ccache, record them, and link. If ccache lost some, memory still bounds it."""
    for folder in modules:
        run([*_ninja(folder, order.where.ninja(order.chain)), "-j", str(schedule.max_jobs)], env=order.env)


def _require_finished(order: Order, folders: Mapping[str, Path]) -> None:
    """Raise KernelsIncompleteError if ninja, as a server will run it, would do anything."""
    for name, folder in folders.items():
        if commands := pending(folder, order.where.ninja(order.chain)):
            why = f"ninja would still run {len(commands)} commands, the first: {commands[0][:120]} …"
            fix = f"ninja -C {folder} -n -d explain says why; a clock that was put back does this"
            raise KernelsIncompleteError(f"{name} is not finished", why, fix)


def _audited(order: Order, folders: Mapping[str, Path]) -> audit.Report:
    """Audit each module's library, and that it is the module that it claims to be. Raises AuditError."""
    rules = audit_rules.load()
    libraries = {name: folder / f"{name}.so" for name, folder in folders.items()}
    report = audit.audit(list(libraries.values()), machine=os.uname().machine, rules=rules)
    claims = [
        one
        for module in order.modules
        for one in audit_rules.judge_modules(
            [binary for binary in report.binaries if binary.path == str(libraries[module.name])], [module.audit], rules
        )
    ]
    report = replace(report, violations=(*report.violations, *claims))
    write_json(order.output / f"audit-{order.name}.json", report.document())
    report.require_clean()
    return report


def _record(
    order: Order, inputs: Mapping[str, str], folders: Mapping[str, Path], outcome: Outcome, report: audit.Report
) -> None:
    """Write the server's variables, then the manifest."""
    write_atomic(order.place, "".join(f"{name}={value}\n" for name, value in sorted(order.server.items())))
    libraries = [folder / f"{name}.so" for name, folder in folders.items()]
    outputs = {str(path.relative_to(order.output.resolve())): sha256_file(path) for path in libraries}
    facts: dict[str, Any] = {
        **{key: value for key, value in asdict(outcome).items() if key not in ("seconds", "unchanged")},
        "server": order.server,
        "audit": {
            "kernels": sum(one.kernels for one in report.coverage),
            "fp4": sum(one.fp4 for one in report.coverage),
        },
    }
    tools = {**order.chain.versions, **order.where.versions}
    made = Manifest(STAGE, inputs, outputs, tools, facts, outcome.seconds)
    write_json(manifest.beside(order.place), asdict(made))
