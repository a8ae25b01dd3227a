"""FlashInfer's kernel cache: list it, and remove only modules that must be rebuilt.

    BASE/.cache/flashinfer/VERSION/ARCH/cached_ops/MODULE/{build.ninja,.ninja_deps,*.o,MODULE.so}
    BASE/.cache/flashinfer/VERSION/ARCH/cached_ops/tmp/MODULE.lock      held while FlashInfer builds the module
    BASE/.cache/flashinfer/VERSION/ARCH/generated/

BASE is FLASHINFER_WORKSPACE_BASE or the home folder (flashinfer/jit/env.py and core.py of 0.7.0.post1). In our images
it is a folder of the volume, one for each image that used the volume (deploy/start). A module's build.ninja names its
sources, and .ninja_deps the headers that compilers reported.

Inside an image, which has no `./inv`: `python -m sparkforge.compile.cache list` and `… clean --module 'fused_moe_*'`.
"""

import argparse
import fnmatch
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sparkforge import pins
from sparkforge.compile.flashinfer import sets
from sparkforge.core import paths
from sparkforge.core.console import confirmed, say
from sparkforge.core.errors import SparkforgeError, StorageError, UsageError, on
from sparkforge.core.files import locked, tree_size
from sparkforge.core.program import exit_code

OPS = "cached_ops"
KEY = "key"  # a file of an image with the name of its folder in the volume (Dockerfile, deploy/start)
REMOVING = ".removing"  # a module gets this name before its deletion, so that nothing loads a half-deleted module
SOURCE = re.compile(r"^build \S+: (?:cuda_)?compile (\S+)", re.MULTILINE)  # as flashinfer/jit/cpp_ext.py writes it


@dataclass(frozen=True)
class CachedModule:
    """One compiled module of the cache under `root`."""

    root: Path
    version: str
    arch: str
    name: str

    @property
    def path(self) -> Path:
        """The module's folder."""
        return self.root / self.version / self.arch / OPS / self.name

    @cached_property
    def ninja_files(self) -> bytes:
        """The contents of the module's build.ninja and .ninja_deps, which has the headers' paths as plain bytes."""
        files = (self.path / "build.ninja", self.path / ".ninja_deps")
        return b"\n".join(file.read_bytes() for file in files if file.is_file())

    @property
    def sources(self) -> list[Path]:
        """The sources that the module's build.ninja compiles, without headers."""
        return [self.path / name for name in SOURCE.findall(self.ninja_files.decode(errors="replace"))]

    def __str__(self) -> str:
        state = "" if (self.path / f"{self.name}.so").exists() else ", half built"
        return f"{self.version}/{self.arch}/{self.name} ({tree_size(self.path) / 1e6:.1f} MB{state})"


def default_root() -> Path:
    """Return the cache that FlashInfer uses in this environment."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"


def default_roots() -> list[Path]:
    """Return the caches of this environment: FlashInfer's, or in an image those of the volume."""
    if os.environ.get("FLASHINFER_WORKSPACE_BASE") or not (paths.ROOT / KEY).is_file():
        return [default_root()]
    volume = Path(os.environ.get("SPARKFORGE_CACHE_DIR") or "/var/cache/sparkforge")
    return sorted(volume.glob("*/.cache/flashinfer"))


def advised(*options: str) -> str:
    """Return the command for `./inv clean-cache` with options; inside an image, one to run on its host."""
    in_image = (paths.ROOT / KEY).is_file()
    arguments = ["./inv clean-cache", *(["--container"] if in_image else []), *options]
    return " ".join(arguments) + ("   # on the host" if in_image else "")


def modules(root: Path) -> list[CachedModule]:
    """Return every module under `root`, half-built ones too, sorted by version, architecture and name."""
    modules = []
    for folder in sorted(root.glob(f"*/*/{OPS}/*")):
        # Other folders, such as `tmp`, are not modules.
        built = (folder / "build.ninja").exists() or (folder / f"{folder.name}.so").exists()
        if not folder.name.startswith(".") and (folder.is_symlink() or built):
            version, arch = folder.relative_to(root).parts[:2]
            modules.append(CachedModule(root, version, arch, folder.name))
    return modules


def made_from(modules: Sequence[CachedModule], changed: Path) -> list[CachedModule]:
    """Return the modules that are built from `changed`, a file or folder, which need not exist any more."""
    names = b"|".join({re.escape(os.fsencode(path)) for path in (changed.absolute(), changed.resolve())})
    # In ninja's log a path ends with zeros or with the record's checksum, whose upper bytes are 0xff.
    named = re.compile(rb"(?<![\w.+/-])(?:" + names + rb")(?:/|[\s\0:|$]|..\xff\xff|\Z)", re.DOTALL)
    return [module for module in modules if named.search(module.ninja_files)]


def generated_from(cached: Sequence[CachedModule], changed: Path) -> list[CachedModule]:
    """Return the modules that FlashInfer's Python file or folder `changed` generates, by the tables of kernels.

    No compiler reads a generator, so ninja's files do not name it. Modules of the same family count too, such as
    fused_moe_120 beside the fused_moe_120_fp8xfp4 of the table.
    """
    parts = changed.resolve().with_suffix("").parts
    if "flashinfer" not in parts or changed.suffix not in ("", ".py"):
        return []
    start = len(parts) - parts[::-1].index("flashinfer") - 1
    place = "/".join((*parts[start:], "")).removesuffix("__init__/")
    families = set[str]()
    for release in sets.releases():
        for module in sets.load(release).module:
            generator = f"{module.generator.partition(':')[0].replace('.', '/')}/"
            if generator.startswith(place) or place.startswith(generator):
                families.add("_".join(module.name.split("_")[:2]))
    return [module for module in cached if any(f"{module.name}_".startswith(f"{name}_") for name in families)]


def why_stale(module: CachedModule) -> str:
    """Return the reason why no process will load this module again; empty if a process may load it."""
    pinned = {component.version for component in pins.load().components() if component.package == "flashinfer-python"}
    if module.version not in pinned:
        return f"FlashInfer {module.version} is not pinned by any stack"
    if not module.sources:
        return "it has no build.ninja, so it cannot be compared with its sources"
    if gone := [source for source in module.sources if not source.exists()]:
        return f"{len(gone)} of its sources are gone, such as {gone[0]}"
    return ""


def users(module: CachedModule) -> list[int]:
    """Return the ids of the processes that map a file of this module, among those that we may inspect."""
    inside, pids = f" {module.path.resolve()}/", []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if inside in (entry / "maps").read_text(encoding="utf-8", errors="replace"):
                pids.append(int(entry.name))
    return pids


def remove(module: CachedModule) -> int:
    """Remove one module and return the bytes freed.

    Raises StorageError if it lies outside the cache, a live process maps it, or FlashInfer is building it, and
    FileNotFoundError if another process has removed it.
    """
    lock = module.path.parent / "tmp" / f"{module.name}.lock"
    with locked(lock, f"remove {module.name}") if lock.exists() else nullcontext():
        expected = module.root.resolve() / module.version / module.arch / OPS / module.name
        why = fix = ""
        if module.path.is_symlink() or module.path.resolve() != expected:
            why = f"{module.path} is a link to {module.path.resolve()}, outside the cache"
            fix = on("ls -l", module.path.parent)
        elif pids := users(module):
            why, fix = f"process {', '.join(map(str, pids))} uses it", "./inv down   # stop the process that uses it"
        if why:
            raise StorageError(f"{module.name} is not removed", why, fix, code="storage.cache")
        size = tree_size(module.path)
        shutil.rmtree(module.path.rename(module.path.with_name(f".{module.name}{REMOVING}")))
    return size


@dataclass(frozen=True)
class Selection:
    """The modules to remove: by name, because a source changed, because they are stale, or everything.

    `names` may have wildcards, such as `fused_moe_*`. A name without wildcard includes its variants: fused_moe_120
    selects fused_moe_120_fp8xfp4. A changed source may be a generator of modules.
    """

    names: Sequence[str] = ()
    changed: Sequence[Path] = ()
    stale: bool = False
    everything: bool = False

    def of(self, cached: Sequence[CachedModule]) -> list[CachedModule]:
        """Return the selected modules of `cached`. Raises UsageError for a name that no module has."""
        known = sorted({module.name for module in cached})
        matching = {name: {*fnmatch.filter(known, name), *fnmatch.filter(known, f"{name}_*")} for name in self.names}
        by_name = set[str]().union(*matching.values())
        if unknown := sorted(name for name, variants in matching.items() if not variants):
            why = f"it holds {', '.join(known) or 'nothing'}"
            raise UsageError(f"no module {', '.join(unknown)} in the cache", why, advised("--list"))
        by_source = list[CachedModule]()
        for path in self.changed:
            affected = [*made_from(cached, path), *generated_from(cached, path)]
            if not affected:
                say(f"{path}: no module in the cache is made from it or generated by it")
            by_source += affected
        return [
            module
            for module in cached
            if self.everything or module.name in by_name or module in by_source or (self.stale and why_stale(module))
        ]


def clean(selection: Selection, *, dry_run: bool = False, yes: bool = False, root: Path | None = None) -> list[str]:
    """Remove the selected modules of the cache `root`, or of `default_roots`; return the names of those removed.

    It also completes the removals of an interrupted run. `everything` asks for confirmation, unless `yes`. Raises
    StorageError at the end, which names the modules that could not be removed, and UsageError if nothing is selected.
    """
    if not (selection.names or selection.changed or selection.stale or selection.everything):
        raise UsageError("nothing chosen to remove", "no flag selects a module", advised("--stale", "--dry-run"))
    roots = [root] if root else default_roots()
    chosen = selection.of([module for cache in roots for module in modules(cache)])
    for module in chosen:
        say(f"{'would remove' if dry_run else 'remove'} {module}")
    if not chosen:
        say(f"nothing to remove in {', '.join(map(str, roots)) or 'the volume: it has no cache'}")
    if dry_run:
        return []
    question, asks = f"Remove all {len(chosen)} modules?", chosen and selection.everything and not yes
    if asks and not confirmed(question, "--all asks first", advised("--all", "--yes")):
        return []
    return _remove_all(chosen, roots)


def _remove_all(chosen: Sequence[CachedModule], roots: Sequence[Path]) -> list[str]:
    for cache in roots:
        for folder in cache.glob(f"*/*/{OPS}/.*{REMOVING}"):
            if folder.resolve().is_relative_to(cache.resolve()):
                shutil.rmtree(folder, ignore_errors=True)  # another process may be removing it too
    removed, freed, errors = list[str](), 0, list[SparkforgeError]()
    for module in chosen:
        try:
            freed += remove(module)
            removed.append(module.name)
        except FileNotFoundError:
            say(f"{module.name} is already removed by another process")
        except SparkforgeError as error:
            errors.append(error)
    say(f"removed {len(removed)} modules, freed {freed / 1e6:.1f} MB")
    if errors:
        failure = f"{len(errors)} of {len(chosen)} modules are not removed"
        why = "; ".join(f"{error.what}: {error.why}" for error in errors)
        raise StorageError(failure, why, errors[0].fix, code=errors[0].code)
    return removed


def print_cache(root: Path | None = None) -> None:
    """List the cache: each module with its size, the processes that use it, and whether it is stale."""
    for cache in [root] if root else default_roots():
        cached = modules(cache)
        for module in cached:
            pids, why = users(module), why_stale(module)
            notes = [f"used by process {', '.join(map(str, pids))}"] if pids else []
            notes += [f"stale: {why}"] if why else []
            say("; ".join([str(module), *notes]))
        say(f"{cache}: {len(cached)} modules, {tree_size(cache) / 1e6:.1f} MB with generated sources")


def main(arguments: Sequence[str]) -> int:
    """List or clean, as `./inv clean-cache --list` and `./inv clean-cache` do; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sparkforge.compile.cache", description=__doc__)
    parser.add_argument("step", choices=("list", "clean"))
    parser.add_argument("--module", default="", help="modules to remove, comma-separated, such as 'fused_moe_*'")
    for name in ("--stale", "--all", "--dry-run", "--yes"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args(arguments)
    names = [name for name in options.module.split(",") if name]
    selection = Selection(names, stale=options.stale, everything=options.all)
    if options.step == "list":
        return exit_code(print_cache)
    return exit_code(lambda: clean(selection, dry_run=options.dry_run, yes=options.yes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
