"""`python -m lab.build`: what compiling the kernels costs, and whether it stays within the available memory.

Measured from outside, through `./inv build.kernels` and its manifests. Each part is measured on its own
(`--only PART,…`) and keeps its own facts of the machine, because the whole takes more than an hour of CPU time.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from sparkforge.bench.context import facts
from sparkforge.compile.jobs import make_schedule
from sparkforge.compile.peaks import Cost, Peaks
from sparkforge.core import paths
from sparkforge.core.console import console, say
from sparkforge.core.documents import read_json
from sparkforge.core.errors import CompileError, ProcessError, UsageError
from sparkforge.core.files import require_writable, write_json
from sparkforge.core.memory import Machine
from sparkforge.core.paths import ROOT
from sparkforge.core.process import Child, run, run_unchecked
from sparkforge.core.program import exit_code

MODULE = "fused_moe_120_fp8xfp4"
MODULE_FOLDER = f".cache/flashinfer/*/121a/cached_ops/{MODULE}"
LIMITS_GIB = (6, 12, 20)
POLL_SECONDS = 0.2
SPARK = Machine(119 << 30, 20)  # bytes and cores, docs/hardware.md; for a projection, with nothing else running
PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
# How many of upstream's 96 units are compiled, by kind; the others of a kind count as their mean. With 0 our own units
# of that kind are used instead: for SM120 files of eight kernels in the same tiles, else the same files.
KINDS = (
    ("grouped GEMM for SM120", "*gemm_grouped_sm120_*", 0),
    ("grouped GEMM for SM80", "*gemm_grouped_sm80_*", 1),
    ("GEMM for 9.0, empty for 12.1", "*gemm_sm90_*", 1),
    ("per-type GEMM", "*moe_gemm_kernels_*", 2),
    ("instantiation", "*cutlass_fused_moe_instantiation*", 1),
    ("binding", "*fused_moe_binding*", 1),
    ("other CUDA units", "*.cuda.o", 0),
    ("C++", "*", 0),
)


@dataclass(frozen=True)
class BuildSite:
    """A folder with a built set, and the interpreter that it was built for."""

    output: Path
    python: Path

    @property
    def ninja(self) -> Path:
        """The environment's own: another version does not understand its logs."""
        return self.python.parent / "ninja"

    def build(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Build the whole set. Raises ProcessError if it fails."""
        return _require(run_unchecked(self.command("gpt-oss", self.output), cwd=ROOT, env=env))

    def command(self, name: str, output: Path) -> list[str]:
        """Return the command that builds a set."""
        return ["./inv", "build.kernels", "--set", name, "--output", str(output), "--python", str(self.python)]

    def manifest(self, name: str, output: Path | None = None) -> dict[str, Any]:
        """Return a build's manifest. Raises UsageError if there is none, which means no build or a killed one."""
        file = (output or self.output) / f"kernels-{name}.env.manifest.json"
        if not file.is_file():
            why, fix = f"{file.name} is missing", ".venv/bin/python -m lab.build --only whole"
            raise UsageError(f"nothing is built in {file.parent}", why, fix)
        return dict(read_json(file))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the whole set's manifest. Raises UsageError as `manifest` does."""
        return dict(self.manifest("gpt-oss")["facts"])


def main(output: str, only: str, kernels: str, python: str) -> None:
    """Measure the parts of `only`, print all, and keep the others of an earlier run. Raises UsageError."""
    chosen = [part for part in only.split(",") if part] or list(PARTS)
    if unknown := sorted(set(chosen) - PARTS.keys()):
        raise UsageError(
            f"no part {', '.join(unknown)}",
            f"there are {', '.join(PARTS)}",
            ".venv/bin/python -m lab.build --only audit",
        )
    ours = paths.state() / "envs" / "kernels" / "bin" / "python"
    site = BuildSite(
        Path(kernels).absolute() if kernels else paths.state() / "kernels", Path(python) if python else ours
    )
    file = require_writable(paths.typed(output))
    result = _load(file)
    for part in chosen:
        say(f"{part}: {PARTS[part].summary}")
        start, load = time.monotonic(), os.getloadavg()
        figures = PARTS[part].measure(site)
        shared = {"load_before": [round(value, 2) for value in load], "seconds": round(time.monotonic() - start, 1)}
        result[part] = {"machine": {**facts(), **shared}, **figures}
        write_json(file, result)
    table = Table("part", "figure", "value", title=".venv/bin/python -m lab.build")
    for part, figures in result.items():
        for name, value in figures.items():
            if name not in ("machine", "each", "server") and not isinstance(value, Sequence | Mapping):
                table.add_row(part, name, str(value))
    console().print(table)
    say(f"saved {file}; on a shared machine read CPU-seconds, not seconds")


def _load(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path} holds no figures", " ".join(str(error).split()), "move it away, or name another: --output FILE"
        ) from error


def whole(site: BuildSite) -> dict[str, Any]:
    """The whole set, compiled anew with an empty ccache: wall, CPU, memory against the bound, every unit.

    With BENCH_BUILT it is not compiled again: an earlier build counts, such as that of a whole `./inv build`, if it
    compiled every unit. Raises UsageError if it did not.
    """
    if built := bool(os.environ.get("BENCH_BUILT")):
        units = site.facts
        if units["compiled"] != units["units"]:
            why = f"{units['cached']} of {units['units']} units came from ccache, {units['compiled']} were compiled"
            fix = "unset BENCH_BUILT; it takes 25 minutes"
            raise UsageError(f"the build in {site.output} is no whole one", why, fix)
    else:
        shutil.rmtree(site.output, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="sparkforge-ccache-") as empty:
            site.build(CCACHE_DIR=empty)
    manifest = site.manifest("gpt-oss")
    return {
        **{name: value for name, value in manifest["facts"].items() if name != "server"},
        "wall_seconds": manifest["seconds"],
        "source": "the manifest of a build that ended before this" if built else "built for this",
    }


def experts(site: BuildSite) -> dict[str, Any]:
    """The experts' module: our 18 units, as the last build measured them, against a sample of upstream's 96."""
    ours = {name: unit for name, unit in site.facts["each"].items() if name.startswith(f"{MODULE}/")}
    if any(not unit["source"].startswith("learnt") for unit in ours.values()):
        raise UsageError(
            "not every unit was measured here", "ccache had some", ".venv/bin/python -m lab.build --only whole,experts"
        )
    upstream = _sample(_upstream(site), site, ours)
    cpu = sum(unit["cpu"] for unit in ours.values())
    estimate = sum(kind["mean_cpu"] * kind["units"] for kind in upstream)
    return {
        "ours": {
            "units": len(ours),
            "cpu_seconds": round(cpu, 1),
            "peak": max(unit["peak"] for unit in ours.values()),
        },
        "upstream": {
            "units": sum(kind["units"] for kind in upstream),
            "cpu_seconds": round(estimate, 1),
            "kinds": upstream,
            "how": "an estimate: the mean of the sample of a kind, times the units of that kind",
        },
        "ratio": round(cpu / estimate, 3),
    }


def _upstream(site: BuildSite) -> Path:
    """Let FlashInfer write the unfiltered module's build.ninja; return its folder."""
    base = site.output.with_name(site.output.name + "-upstream")
    env = {**site.facts["server"], "FLASHINFER_WORKSPACE_BASE": str(base), "FLASHINFER_MOE_SM120_DTYPES": ""}
    generator = "flashinfer.jit.fused_moe:gen_cutlass_fused_moe_sm120_module"
    question = json.dumps([{"name": "fused_moe_120", "generator": generator, "arguments": {}}])
    specs = ROOT / "sparkforge" / "compile" / "flashinfer" / "specs.py"
    output = run([site.python, specs, "write"], env=env, stdin=question).stdout
    return Path(json.loads(output.splitlines()[-1])[0]["folder"])


def _sample(folder: Path, site: BuildSite, ours: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compile some units of each kind, alone; return counts, means and the largest peak by kind."""
    server = site.facts["server"]
    rows = json.loads(run([site.ninja, "-C", folder, "-t", "compdb", "compile", "cuda_compile"]).stdout)
    commands_by_name = {Path(row["output"]).name: row["command"] for row in rows}
    known = {name.partition("/")[2]: unit for name, unit in ours.items()}
    kinds = []
    for kind, pattern, number in KINDS:
        names = sorted(name for name in commands_by_name if fnmatch.fnmatch(name, pattern))
        commands = {name: commands_by_name.pop(name) for name in names}
        matching = sorted(name for name in known if fnmatch.fnmatch(name, pattern))
        ours_of_kind = [{"unit": name, **known.pop(name)} for name in matching]
        chosen = names[:: max(1, len(names) // max(1, number))][:number]  # at equal distances
        sample = [_compile(name, commands[name], folder, server) for name in chosen] or ours_of_kind
        mean = sum(unit["cpu"] for unit in sample) / len(sample)
        peak = max(unit["peak"] for unit in sample)
        kinds.append({"kind": kind, "units": len(names), "sample": sample, "mean_cpu": round(mean, 2), "peak": peak})
    return kinds


def _compile(name: str, command: str, folder: Path, server: Mapping[str, str]) -> dict[str, Any]:
    """Run a compile command, alone and without ccache, and return its usage, which is saved for a later run."""
    saved, log = folder / "measured.json", folder / "bench.log"
    measured = _load(saved)
    if measured.get(name, {}).get("command") != command:
        say(f"  {name}")
        child = Child(["sh", "-c", command], log=log, env={**server, "CCACHE_DISABLE": "1"}, cwd=folder)
        try:
            while (usage := child.poll()) is None:
                time.sleep(POLL_SECONDS)
        finally:
            child.end()
        if usage.code:
            raise ProcessError(f"{name} did not compile", f"code {usage.code}", f"less {log}", code="process.failed")
        measured[name] = {"command": command, "cpu": round(usage.cpu_seconds, 1), "peak": usage.peak}
        write_json(saved, measured)
    return {"unit": name, "cpu": measured[name]["cpu"], "peak": measured[name]["peak"]}


def build_within(limit: int, site: BuildSite) -> dict[str, Any]:
    """The experts' module in a cgroup of `limit` bytes, each unit compiled anew."""
    output = site.output.with_name(f"{site.output.name}-{limit >> 30}g")
    shutil.rmtree(output, ignore_errors=True)
    with _cgroup(limit) as group, tempfile.TemporaryDirectory(prefix="sparkforge-ccache-") as empty:
        joined = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", joined, "sh", *site.command("experts", output)]
        build = run_unchecked(command, cwd=ROOT, env={"CCACHE_DIR": empty})
        peak = max((int((group / name).read_text("ascii")) for name in PEAKS if (group / name).is_file()), default=0)
    figures = {"limit": limit, "exit_code": build.returncode, "kernels_peak_with_file_cache": peak}
    killed = build.stderr.count("killed: out of memory")
    if build.returncode == CompileError.exit_code and not killed:
        why = next(line for line in build.stderr.splitlines() if line.startswith("  why:"))
        return {**figures, "refused": re.sub(r"\(/[^)]*\)", "(the cgroup)", why.removeprefix("  why:").strip())}
    _require(build)
    measured = site.manifest("experts", output)["facts"]
    shutil.rmtree(output)
    return {**figures, "killed": killed, **{key: measured[key] for key in ("budget", "peak", "jobs", "cpu_seconds")}}


@contextmanager
def _cgroup(limit: int) -> Iterator[Path]:
    """Make a memory cgroup below ours, of either version. Raises UsageError where this user may not."""
    relative = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    own = {controllers: path.lstrip("/") for _, controllers, path in relative}
    parents = [
        (Path("/sys/fs/cgroup/memory") / own.get("memory", ""), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup") / own.get("", ""), "memory.max"),
    ]
    for parent, file in parents:
        group = parent / f"sparkforge-bench-{uuid.uuid4().hex}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / file).write_text(str(limit), encoding="ascii")
                yield group
            finally:
                group.rmdir()
            return
    raise UsageError("no memory cgroup can be made", "this user may not, or there is no controller", "run it as root")


def ccache(site: BuildSite) -> dict[str, Any]:
    """A module's folder removed and built again from ccache; and one header touched."""
    folder = next(site.output.glob(MODULE_FOLDER))
    shutil.rmtree(folder)
    removed = _rebuild(site)
    unit = next(folder.glob("*.cuda.o"))
    dependencies = run([site.ninja, "-C", folder, "-t", "deps", str(unit)]).stdout.splitlines()
    header = next(line.strip() for line in dependencies if line.strip().endswith("moe_gemm_kernels.h"))
    os.utime(header)
    return {
        "module": MODULE,
        "folder_removed": removed,
        "header_touched": {"header": Path(header).name, **_rebuild(site)},
    }


def _rebuild(site: BuildSite) -> dict[str, Any]:
    start = time.monotonic()
    site.build()
    units, wall = site.facts, round(time.monotonic() - start, 2)
    return {key: units[key] for key in ("compiled", "cached", "units", "cpu_seconds")} | {"wall_seconds": wall}


def unchanged(site: BuildSite) -> dict[str, Any]:
    """Nothing changed: three runs of the same command."""
    times = []
    for _ in range(3):
        start = time.monotonic()
        messages = site.build().stderr
        times.append(round(time.monotonic() - start, 2))
        if "unchanged" not in messages:
            raise ProcessError(
                "something was built",
                messages[-300:],
                ".venv/bin/python -m lab.build --only unchanged",
                code="process.failed",
            )
    return {"wall_seconds": times}


def audit(site: BuildSite) -> dict[str, Any]:
    """The audit of the built libraries, in seconds a GB; a wheel as well if BENCH_WHEEL names one."""
    site.build()
    rates = {"built libraries": _audit_rate(site.output / "audit-gpt-oss.json")}
    if wheel := os.environ.get("BENCH_WHEEL"):
        report, before = paths.state() / "bench" / "audit.json", _cpu_of_children()
        run_unchecked(["./inv", "audit", wheel, "--output", str(report)], cwd=ROOT)
        rates[Path(wheel).name] = {**_audit_rate(report), "cpu_seconds": round(_cpu_of_children() - before, 1)}
    return rates


def _cpu_of_children() -> float:
    """Return the CPU-seconds of all child processes that ended, with those of `./inv`'s own start."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _audit_rate(file: Path) -> dict[str, Any]:
    report = read_json(file)
    return {
        "files": len(report["files"]),
        "bytes": report["bytes"],
        "wall_seconds": report["seconds"],
        "seconds_per_gb": round(report["seconds"] / report["bytes"] * 1e9, 1),
        "mb_per_second": report["mb_per_second"],
    }


def projection(site: BuildSite) -> dict[str, Any]:
    """What the planner expects on a Spark, from the figures of this machine: a projection, not a measurement."""
    peaks = Peaks("")
    peaks.learnt = {name: Cost(unit["peak"], unit["cpu"]) for name, unit in site.facts["each"].items()}
    wall = make_schedule(list(peaks.learnt), peaks, SPARK).seconds()
    cpu = sum(cost.cpu for cost in peaks.learnt.values())
    machine = {"cores": SPARK.cores, "available": SPARK.available}
    return {**machine, "wall_seconds": round(wall, 1), "cpu_seconds_here": round(cpu, 1)}


@dataclass(frozen=True)
class BuildPart:
    """A measurement that can be made on its own."""

    summary: str
    measure: Callable[[BuildSite], dict[str, Any]]


PARTS = {
    "whole": BuildPart("the whole set, compiled anew with an empty ccache", whole),
    "experts": BuildPart("our units of the experts' module against a sample of upstream's", experts),
    "ccache": BuildPart("a module built again from ccache, and after one header was touched", ccache),
    "unchanged": BuildPart("three runs with nothing changed", unchanged),
    "audit": BuildPart("the audit of the built libraries", audit),
    "projection": BuildPart("the planner's projection for a Spark", projection),
    **{
        f"memory-{gib}": BuildPart(
            f"the experts' module within {gib} GiB: refused before it begins, or built and never over",
            partial(build_within, gib << 30),
        )
        for gib in LIMITS_GIB
    },
}


def _require(build: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if build.returncode:
        why = " · ".join(build.stderr.strip().splitlines()[-3:]) or f"code {build.returncode}"
        raise ProcessError("a build failed", why, "run the same build by hand", code="process.failed")
    return build


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.build", description=__doc__)
    parser.add_argument("--only", default="", help=f"parts, with commas: {', '.join(PARTS)}; default: all (an hour)")
    parser.add_argument("--kernels", default="", help="folder of built kernels; default: .sparkforge/kernels")
    parser.add_argument("--python", default="", help="interpreter that they were built for")
    parser.add_argument("--output", default="bench/results/build.json", help="JSON file for the figures")
    options = parser.parse_args()
    sys.exit(exit_code(lambda: main(options.output, options.only, options.kernels, options.python)))
