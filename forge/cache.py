"""FlashInfer's kernel cache: what is in it, what a rebuild would cost, and how to remove only what must be rebuilt.

    BASE/.cache/flashinfer/VERSION/ARCH/cached_ops/MODULE/{build.ninja,.ninja_deps,*.o,MODULE.so}
    BASE/.cache/flashinfer/VERSION/ARCH/cached_ops/tmp/MODULE.lock      held while FlashInfer builds the module
    BASE/.cache/flashinfer/VERSION/ARCH/generated/

BASE is FLASHINFER_WORKSPACE_BASE or the home folder (flashinfer/jit/env.py and core.py of 0.7.0.post1). Which sources a
module is made of is asked of ninja's own files in its folder.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forge import jobs, memory, ninjafile
from forge.peaks import Peaks
from forge.pins import Pins
from sparkforge.console import say
from sparkforge.errors import CacheError, SparkforgeError, UsageError
from sparkforge.files import locked

OPS = "cached_ops"
REMOVING = ".removing"  # a module is renamed to this before it is taken apart, so that it is never half there


@dataclass(frozen=True)
class Module:
    """One compiled module of the cache under `root`."""

    root: Path
    version: str
    arch: str
    name: str

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.root / self.version / self.arch / OPS / self.name

    @property
    def library(self) -> Path:
        """What FlashInfer loads; not there while the module is half built."""
        return self.path / f"{self.name}.so"

    @cached_property
    def statements(self) -> list[ninjafile.Statement]:
        """Its build.ninja."""
        return ninjafile.statements(self.path / "build.ninja")

    @cached_property
    def sources(self) -> frozenset[Path]:
        """Every file that it is made of: the sources, and the headers that their compilers reported."""
        named = {name for one in self.statements if one.rule in ninjafile.COMPILERS for name in one.inputs}
        reported = ninjafile.reported(self.path / ".ninja_deps").values()
        return frozenset((self.path / name).resolve() for name in named.union(*reported))

    @property
    def units(self) -> list[str]:
        """Names of its translation units, as the cost table has them."""
        return [
            f"{self.name}/{Path(one.outputs[0]).name}" for one in self.statements if one.rule in ninjafile.COMPILERS
        ]

    def size(self) -> int:
        """Bytes of all files in its folder."""
        return tree_size(self.path)


def tree_size(folder: Path) -> int:
    """Return the bytes of all files under a folder, links not followed."""
    return sum(Path(top, name).lstat().st_size for top, _, names in os.walk(folder) for name in names)


def default_root() -> Path:
    """Return the cache that FlashInfer uses in this environment."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"


def modules(root: Path) -> list[Module]:
    """Return every module under `root`, half-built ones too, sorted by version, architecture and name."""
    found = []
    for folder in sorted(root.glob(f"*/*/{OPS}/*")):
        if not folder.name.startswith(".") and (folder.is_symlink() or _looks_built(folder)):
            version, arch = folder.relative_to(root).parts[:2]
            found.append(Module(root, version, arch, folder.name))
    return found


def _looks_built(folder: Path) -> bool:
    """Tell a module's folder from others, such as `tmp`."""
    return (folder / "build.ninja").exists() or (folder / f"{folder.name}.so").exists()


def named(found: Sequence[Module], names: Iterable[str]) -> list[Module]:
    """Return the modules of these names. Raises UsageError for a name that none has."""
    wanted = set(names)
    if unknown := sorted(wanted - {module.name for module in found}):
        known = ", ".join(sorted({module.name for module in found})) or "nothing"
        raise UsageError(f"no module {', '.join(unknown)} in the cache", f"it holds {known}", "./inv cache")
    return [module for module in found if module.name in wanted]


def made_from(found: Sequence[Module], changed: Iterable[Path]) -> list[Module]:
    """Return the modules that are made from one of `changed`, which may be folders and need not exist any more."""
    places = [path.resolve() for path in changed]
    return [
        module
        for module in found
        if any(source == place or place in source.parents for source in module.sources for place in places)
    ]


def why_stale(module: Module, pins: Pins) -> str:
    """Return why nothing will ever load this module again; empty if something may."""
    pinned = {one.version for one in pins.components() if one.package == "flashinfer-python"}
    if module.version not in pinned:
        return f"FlashInfer {module.version} is pinned by no stack"
    if not module.statements:
        return "it has no build.ninja, so nothing can tell whether it is current"
    if gone := sorted(source for source in module.sources if not source.exists()):
        return f"{len(gone)} of its sources are gone, such as {gone[0]}"
    return ""


def users(module: Module, proc: Path = Path("/proc")) -> list[int]:
    """Return the ids of the processes that map a file of this module.

    By path and by inode, because a container has other paths. A process that this user may not look into is not seen.
    """
    files = {(info.st_dev, info.st_ino) for path in module.path.glob("*.so") if (info := path.stat())}
    inside = f"{module.path.resolve()}/"
    return [int(entry.name) for entry in proc.glob("[0-9]*") if _maps(entry / "maps", inside, files)]


def _maps(table: Path, inside: str, files: set[tuple[int, int]]) -> bool:
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:  # proc_pid_maps(5): address perms offset major:minor inode path
        _, _, _, device, inode, *path = line.split(maxsplit=5)
        major, minor = (int(number, 16) for number in device.split(":"))
        if (os.makedev(major, minor), int(inode)) in files or (path and path[0].startswith(inside)):
            return True
    return False


def refusal(module: Module) -> str:
    """Return why this module must stay; empty if it may go."""
    expected = module.root.resolve() / module.version / module.arch / OPS / module.name
    if module.path.is_symlink() or module.path.resolve() != expected:
        return f"{module.path} is a link to {module.path.resolve()}, outside the cache"
    if pids := users(module):
        return f"process {', '.join(map(str, pids))} uses it"
    return ""


def remove(module: Module) -> int:
    """Remove one module and return the bytes freed.

    Raises CacheError if it lies outside the cache or a live process maps it, BusyError while FlashInfer builds it.
    """
    lock = module.path.parent / "tmp" / f"{module.name}.lock"
    with locked(lock, f"remove {module.name}") if lock.exists() else nullcontext():
        if why := refusal(module):
            fix = "stop what uses it: ./inv down" if "uses it" in why else f"look at it: ls -l {module.path.parent}"
            raise CacheError(f"{module.name} is not removed", why, fix)
        size = module.size()
        away = module.path.with_name(f".{module.name}.{os.getpid()}{REMOVING}")
        module.path.rename(away)
        shutil.rmtree(away)
    return size


def sweep(root: Path) -> int:
    """Finish removals that were killed half way; return the bytes freed."""
    freed = 0
    for folder in root.glob(f"*/*/{OPS}/.*{REMOVING}"):
        if not folder.is_symlink() and folder.resolve().is_relative_to(root.resolve()):
            freed += tree_size(folder)
            shutil.rmtree(folder)
    return freed


def rebuild_cost(chosen: Iterable[Module]) -> tuple[int, float, float]:
    """Return units, CPU-seconds and the wall seconds that this machine would take to build these modules again.

    An estimate from measured and learnt costs. Nothing of it is spent where ccache still has the objects.
    """
    peaks = Peaks.of_any()
    units = [unit for module in chosen for unit in module.units]
    schedule = jobs.plan(units, peaks, memory.measure())
    return len(units), sum(cost.cpu for cost in schedule.costs.values()), schedule.seconds()


def clean(  # noqa: PLR0913 - one argument a flag
    *,
    pins: Pins,
    names: Sequence[str] = (),
    changed: Sequence[Path] = (),
    stale: bool = False,
    everything: bool = False,
    dry_run: bool = False,
    yes: bool = False,
    root: Path | None = None,
    ask: Callable[[str], bool] | None = None,
) -> list[Module]:
    """Remove modules by name, by changed source, because they are stale, or all; return those removed.

    Says what goes, how much it frees and what a rebuild costs. All of them go only after a yes. What must stay is named
    in the CacheError at the end; the rest is gone by then. Raises UsageError if nothing is chosen.
    """
    place = root or default_root()
    found = modules(place)
    chosen = list(_choose(found, pins, names, changed, stale=stale, everything=everything))
    if not chosen:
        say(f"nothing to remove in {place}")
        return []
    for module in chosen:
        say(f"{'would remove' if dry_run else 'remove'} {_line(module)}")
    units, cpu, seconds = rebuild_cost(chosen)
    told = f"{len(chosen)} modules; a rebuild compiles {units} units, about {cpu:.0f} CPU-seconds, {seconds:.0f} s here"
    say(told)
    if dry_run or (everything and not yes and not (ask or _ask)(f"Remove all {told}?")):
        return []
    return _remove_all(chosen, place)


def _choose(
    found: Sequence[Module],
    pins: Pins,
    names: Sequence[str],
    changed: Sequence[Path],
    *,
    stale: bool,
    everything: bool,
) -> Iterator[Module]:
    if not (names or changed or stale or everything):
        raise UsageError("nothing chosen to remove", "no flag says what", "./inv clean-cache --stale --dry-run")
    by_name, by_source = named(found, names), made_from(found, changed)
    for path in changed:
        if not made_from(found, [path]):
            say(f"{path}: no module in the cache is made from it")
    for module in found:
        if everything or module in by_name or module in by_source or (stale and why_stale(module, pins)):
            yield module


def _remove_all(chosen: Sequence[Module], root: Path) -> list[Module]:
    removed, freed, kept = [], sweep(root), list[SparkforgeError]()
    for module in chosen:
        try:
            freed += remove(module)
            removed.append(module)
        except SparkforgeError as error:
            kept.append(error)
    say(f"removed {len(removed)} modules, freed {freed / 1e6:.1f} MB")
    if kept:
        raise CacheError(
            f"{len(kept)} of {len(chosen)} modules are not removed",
            "; ".join(f"{error.what}: {error.why}" for error in kept),
            kept[0].fix,
        )
    return removed


def _ask(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("--all asks first", "there is no terminal to ask on", "./inv clean-cache --all --yes")
    return input(f"{question} [y/N] ").strip().lower() in {"y", "yes"}


def _line(module: Module) -> str:
    state = "" if module.library.exists() else ", half built"
    return (
        f"{module.version}/{module.arch}/{module.name} ({module.size() / 1e6:.1f} MB, {len(module.units)} units{state})"
    )


def show(pins: Pins, root: Path | None = None) -> None:
    """List the cache: each module with its size, the cost of a rebuild, who uses it, and whether it is stale."""
    place = root or default_root()
    found = modules(place)
    for module in found:
        _, cpu, _ = rebuild_cost([module])
        pids = users(module)
        notes = [f"rebuild about {cpu:.0f} CPU-seconds"]
        notes += [f"used by process {', '.join(map(str, pids))}"] if pids else []
        notes += [f"stale: {why}"] if (why := why_stale(module, pins)) else []
        say(f"{_line(module)}: {'; '.join(notes)}")
    say(f"{place}: {len(found)} modules, {tree_size(place) / 1e6:.1f} MB with generated sources")
