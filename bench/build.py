"""`./inv bench.build`: what compiling the kernels costs, and whether it stays within the memory that there is.

Measured from outside, through `./inv build.kernels` and the manifests that it leaves. Each part is measured on its own
(`--only PART,…`) and keeps its own facts of the machine, because the whole takes more than an hour of CPU time.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.machine import facts
from sparkforge import paths
from sparkforge.console import console, say
from sparkforge.errors import CommandError, UsageError
from sparkforge.files import require_writable, write_json
from sparkforge.paths import ROOT
from sparkforge.process import Child, run

MODULE = "fused_moe_120_fp8xfp4"
OPS = ".cache/flashinfer/0.7.0.post1/121a/cached_ops"
LIMITS_GIB = (6, 12, 20)
REFUSED = 53  # MemoryShortError
LOOK = 0.2  # seconds between two looks at a compiler
# How many of upstream's 96 units are compiled, by kind; the others of a kind count as their mean. With 0 our own units
# of that kind stand for them: for SM120 files of eight kernels in the same tiles, else the same files.
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
class Site:
    """A folder with a built set, and the interpreter that it was built for."""

    output: Path
    python: Path

    @property
    def ninja(self) -> Path:
        """The environment's own: another version does not understand its logs."""
        return self.python.parent / "ninja"

    def build(self, name: str, *more: str, output: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `./inv build.kernels`; never raises for its failure."""
        return run([*self.command(name, output), *more], cwd=ROOT, env=env, check=False)

    def command(self, name: str, output: Path | None = None) -> list[str]:
        """Return the command that builds a set."""
        words = ["./inv", "build.kernels", "--set", name, "--output", str(output or self.output)]
        return [*words, "--python", str(self.python)]

    def manifest(self, name: str, output: Path | None = None) -> dict[str, Any]:
        """Return what a build left. Raises UsageError if there was none, or it was killed."""
        place = (output or self.output) / f"kernels-{name}.env.manifest.json"
        if not place.is_file():
            raise UsageError(f"nothing is built in {place.parent}", f"{place.name} is not there",
                             "./inv bench.build --only whole")  # fmt: skip
        return dict(json.loads(place.read_text(encoding="utf-8")))


def main(output: str, only: str, kernels: str, python: str) -> None:
    """Measure the parts that are asked for, show them, and keep the others of an earlier run. Raises UsageError."""
    chosen = [part for part in only.split(",") if part] or list(PARTS)
    if unknown := sorted(set(chosen) - PARTS.keys()):
        raise UsageError(
            f"no part {', '.join(unknown)}", f"there are {', '.join(PARTS)}", "./inv bench.build --only audit"
        )
    ours = paths.state() / "envs" / "kernels" / "bin" / "python"
    site = Site(Path(kernels).absolute() if kernels else paths.state() / "kernels", Path(python) if python else ours)
    place = require_writable(paths.typed(output))
    result = _load(place)
    for part in chosen:
        say(f"{part}: {(PARTS[part].__doc__ or '').splitlines()[0]}")
        begun, load = time.monotonic(), os.getloadavg()
        figures = PARTS[part](site)
        shared = {"load_before": [round(one, 2) for one in load], "seconds": round(time.monotonic() - begun, 1)}
        result[part] = {"machine": {**facts(), **shared}, **figures}
        write_json(place, result)
    _show(result)
    say(f"saved {place}; on a shared machine read CPU-seconds, not seconds")


def _load(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def whole(site: Site) -> dict[str, Any]:
    """The whole set, compiled anew with an empty ccache: wall, CPU, memory against the bound, every unit.

    With BENCH_BUILT it is not compiled again: an earlier build counts, such as that of a whole `./inv build`, if it
    compiled every unit. Raises UsageError if it did not.
    """
    if built := bool(os.environ.get("BENCH_BUILT")):
        _require_cold(site)
    else:
        shutil.rmtree(site.output, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="sparkforge-ccache-") as empty:
            _require(site.build("gpt-oss", CCACHE_DIR=empty))
    made = site.manifest("gpt-oss")
    return {
        **{name: value for name, value in made["facts"].items() if name != "server"},
        "wall_seconds": made["seconds"],
        "source": "the manifest of a build that ended before this" if built else "built for this",
    }


def _require_cold(site: Site) -> None:
    facts = site.manifest("gpt-oss")["facts"]
    if facts["compiled"] != facts["units"]:
        why = f"{facts['cached']} of {facts['units']} units came from ccache, {facts['compiled']} were compiled"
        raise UsageError(f"the build in {site.output} is no whole one", why, "unset BENCH_BUILT; it takes 25 minutes")


def experts(site: Site) -> dict[str, Any]:
    """The experts' module: our 18 units, as the last build measured them, against a sample of upstream's 96."""
    made = site.manifest("gpt-oss")["facts"]
    ours = {name: each for name, each in made["each"].items() if name.startswith(f"{MODULE}/")}
    if any(not each["source"].startswith("learnt") for each in ours.values()):
        raise UsageError(
            "not every unit was measured here", "ccache had some", "./inv bench.build --only whole,experts"
        )
    theirs = _sample(_upstream(site), site, made["server"], ours)
    cpu = sum(one["cpu"] for one in ours.values())
    estimate = sum(kind["mean_cpu"] * kind["units"] for kind in theirs)
    return {
        "ours": {"units": len(ours), "cpu_seconds": round(cpu, 1), "peak": max(one["peak"] for one in ours.values())},
        "upstream": {
            "units": sum(kind["units"] for kind in theirs), "cpu_seconds": round(estimate, 1), "kinds": theirs,
            "how": "an estimate: the mean of the sample of a kind, times the units of that kind",
        },
        "ratio": round(cpu / estimate, 3),
    }  # fmt: skip


def _upstream(site: Site) -> Path:
    """Have FlashInfer write the unfiltered module's build.ninja; return its folder."""
    base = site.output.with_name(site.output.name + "-upstream")
    server = site.manifest("gpt-oss")["facts"]["server"]
    env = {**server, "FLASHINFER_WORKSPACE_BASE": str(base), "FLASHINFER_MOE_SM120_DTYPES": ""}
    generator = "flashinfer.jit.fused_moe:gen_cutlass_fused_moe_sm120_module"
    question = json.dumps([{"name": "fused_moe_120", "generator": generator, "arguments": {}}])
    told = run([site.python, ROOT / "forge" / "flashinfer_specs.py", "write"], env=env, stdin=question).stdout
    return Path(json.loads(told.splitlines()[-1])[0]["folder"])


def _sample(folder: Path, site: Site, server: Mapping[str, str], ours: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compile some units of each kind, alone; return counts, means and the largest peak by kind."""
    rows = json.loads(run([site.ninja, "-C", folder, "-t", "compdb", "compile", "cuda_compile"]).stdout)
    left = {Path(row["output"]).name: row["command"] for row in rows}
    known = {name.partition("/")[2]: each for name, each in ours.items()}
    found = []
    for kind, pattern, number in KINDS:
        names = sorted(name for name in left if fnmatch.fnmatch(name, pattern))
        commands = {name: left.pop(name) for name in names}
        same = sorted(name for name in known if fnmatch.fnmatch(name, pattern))
        stand_in = [{"unit": name, **known.pop(name)} for name in same]
        used = [_compile(name, commands[name], folder, server) for name in spread(names, number)] or stand_in
        mean = sum(one["cpu"] for one in used) / len(used)
        peak = max(one["peak"] for one in used)
        found.append({"kind": kind, "units": len(names), "sample": used, "mean_cpu": round(mean, 2), "peak": peak})
    return found


def spread(names: Sequence[str], number: int) -> list[str]:
    """Return `number` of the names, at equal distances, from the first on."""
    return list(names[:: max(1, len(names) // max(1, number))][:number])


def _compile(name: str, command: str, folder: Path, server: Mapping[str, str]) -> dict[str, Any]:
    """Run a compile command, alone and without ccache, and return what it used; a killed run keeps what it measured."""
    kept = folder / "measured.json"
    measured = _load(kept)
    if measured.get(name, {}).get("command") != command:
        say(f"  {name}")
        child = Child(
            ["sh", "-c", command], log=folder / "bench.log", env={**server, "CCACHE_DISABLE": "1"}, cwd=folder
        )
        try:
            while (used := child.poll()) is None:
                time.sleep(LOOK)
        finally:
            child.end()
        if used.code:
            raise CommandError(f"{name} did not compile", f"code {used.code}", f"less {folder / 'bench.log'}")
        measured[name] = {"command": command, "cpu": round(used.cpu_seconds, 1), "peak": used.peak}
        write_json(kept, measured)
    return {"unit": name, "cpu": measured[name]["cpu"], "peak": measured[name]["peak"]}


def memory(gib: int) -> Callable[[Site], dict[str, Any]]:
    """Return the part that builds the experts' module in a cgroup of so many GiB, each unit compiled anew."""

    def part(site: Site) -> dict[str, Any]:
        """Sizes and times of one build, as `_limited` gives them."""
        return _limited(site, gib << 30)

    part.__doc__ = f"The experts' module within {gib} GiB: refused before it begins, or built and never over."
    return part


def _limited(site: Site, limit: int) -> dict[str, Any]:
    place = site.output.with_name(f"{site.output.name}-{limit >> 30}g")
    shutil.rmtree(place, ignore_errors=True)
    words = site.command("experts", place)
    with _cgroup(limit) as group, tempfile.TemporaryDirectory(prefix="sparkforge-ccache-") as empty:
        joined = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        done = run(["sh", "-c", joined, "sh", *words], cwd=ROOT, env={"CCACHE_DIR": empty}, check=False)
        kernel = {name: value for name in PEAKS if (value := _number(group / name)) is not None}
    told = {
        "limit": limit,
        "exit_code": done.returncode,
        "kernels_peak_with_file_cache": max(kernel.values(), default=0),
    }
    if done.returncode == REFUSED:
        why = next(line for line in done.stderr.splitlines() if line.startswith("  why:"))
        return {**told, "refused": re.sub(r"\(/[^)]*\)", "(the cgroup)", why.removeprefix("  why:").strip())}
    _require(done)
    made = site.manifest("experts", place)["facts"]
    killed = done.stderr.count("killed: out of memory")
    shutil.rmtree(place)
    return {**told, "killed": killed, **{key: made[key] for key in ("budget", "peak", "jobs", "cpu_seconds")}}


PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


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


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def ccache(site: Site) -> dict[str, Any]:
    """A module's folder removed and built again from ccache; and one header touched."""
    folder = site.output / OPS / MODULE
    shutil.rmtree(folder)
    removed = _again(site)
    header = next(folder.glob("*.cuda.o"))
    told = run([site.ninja, "-C", folder, "-t", "deps", str(header)]).stdout.splitlines()
    touched = next(line.strip() for line in told if line.strip().endswith("moe_gemm_kernels.h"))
    os.utime(touched)
    return {
        "module": MODULE,
        "folder_removed": removed,
        "header_touched": {"header": Path(touched).name, **_again(site)},
    }


def _again(site: Site) -> dict[str, Any]:
    begun = time.monotonic()
    _require(site.build("gpt-oss"))
    made = site.manifest("gpt-oss")["facts"]
    wall = round(time.monotonic() - begun, 2)
    return {key: made[key] for key in ("compiled", "cached", "units", "cpu_seconds")} | {"wall_seconds": wall}


def unchanged(site: Site) -> dict[str, Any]:
    """Nothing changed: three runs of the same command."""
    times = []
    for _ in range(3):
        begun = time.monotonic()
        done = _require(site.build("gpt-oss"))
        times.append(round(time.monotonic() - begun, 2))
        if "unchanged" not in done.stderr:
            raise CommandError("something was built", done.stderr[-300:], "./inv bench.build --only unchanged")
    return {"wall_seconds": times}


def audit(site: Site) -> dict[str, Any]:
    """The audit of the built libraries, in seconds a GB; a wheel as well if BENCH_WHEEL names one."""
    _require(site.build("gpt-oss"))
    found = {"built libraries": _rate(site.output / "audit-gpt-oss.json")}
    if wheel := os.environ.get("BENCH_WHEEL"):
        report, before = paths.state() / "bench" / "audit.json", _cpu_of_children()
        run(["./inv", "audit", wheel, "--output", str(report)], cwd=ROOT, check=False)
        found[Path(wheel).name] = {**_rate(report), "cpu_seconds": round(_cpu_of_children() - before, 1)}
    return found


def _cpu_of_children() -> float:
    """Return the CPU-seconds of all processes that ended below us: with those of `./inv`'s own start."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _rate(report: Path) -> dict[str, Any]:
    read = json.loads(report.read_text(encoding="utf-8"))
    rate = {"seconds_per_gb": round(read["seconds"] / read["bytes"] * 1e9, 1), "mb_per_second": read["mb_per_second"]}
    return {"files": len(read["files"]), "bytes": read["bytes"], "wall_seconds": read["seconds"], **rate}


def projection(site: Site) -> dict[str, Any]:
    """What the planner expects on a Spark, from the figures of this machine: a projection, not a measurement."""
    made = site.manifest("gpt-oss")["facts"]
    return {**made["projection"], "cpu_seconds_here": round(sum(one["cpu"] for one in made["each"].values()), 1)}


PARTS: dict[str, Callable[[Site], dict[str, Any]]] = {
    **{each.__name__: each for each in (whole, experts, ccache, unchanged, audit, projection)},
    **{f"memory-{gib}": memory(gib) for gib in LIMITS_GIB},
}


def _require(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-3:]
        raise CommandError(
            "a build failed", " · ".join(lines) or f"code {done.returncode}", "run the same build by hand"
        )
    return done


def _show(result: Mapping[str, Any]) -> None:
    table = Table("part", "figure", "value", title="./inv bench.build")
    for part, figures in result.items():
        for name, value in figures.items():
            if name not in ("machine", "each", "server") and not isinstance(value, Sequence | Mapping):
                table.add_row(part, name, str(value))
    console().print(table)
