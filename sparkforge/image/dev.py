"""What of the mounted checkouts must be compiled again: `python -m sparkforge.image.dev`.

It runs at every start of the development image.

A checkout at /src/NAME serves instead of the installed package (a .pth file). Its native modules are the installed
ones, linked into it, as long as the sources that they are made of are those of the release; where they differ, this
says which, and what compiles them. FlashInfer's cached modules that a change made stale are named, not removed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge import pins
from sparkforge.compile import cache
from sparkforge.core import paths
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import SparkforgeError, StorageError
from sparkforge.core.files import sha256_file, write_atomic
from sparkforge.image import compose, rootfs
from sparkforge.patching import status

SOURCES = Path("/src")
TREE = Path("/opt/venv")
NATIVE = "*.so"


@dataclass(frozen=True)
class Checkout:
    """A repository that may be mounted: its package, what its native modules are made of, and what compiles them."""

    name: str
    package: str
    sources: tuple[str, ...]
    rebuild: str


CHECKOUTS = (
    Checkout("vllm", "vllm", ("csrc", "cmake", "CMakeLists.txt"), "./inv build.vllm --python /opt/venv/bin/python"),
    Checkout("flashinfer", "flashinfer", ("csrc", "include"), "./inv clean-cache --changed PATH; the server compiles"),
)


def mounted(checkout: Checkout, sources: Path = SOURCES) -> bool:
    """Tell whether the checkout is there: an empty folder is none. Raises StorageError if it may not be read."""
    folder = sources / checkout.name
    try:
        return (folder / checkout.package / "__init__.py").is_file()
    except PermissionError as error:
        why = f"{error.strerror} (running as uid {os.getuid()})"
        raise StorageError(
            f"cannot read the checkout in {folder}", why, "chmod -R a+rX it on the host", code="storage.access"
        ) from error


def use(checkouts: Sequence[Checkout], packages: Path, sources: Path = SOURCES) -> None:
    """Let exactly these checkouts be imported instead of the installed packages."""
    folders = [f"{sources / checkout.name}" for checkout in checkouts]
    # A .pth line is appended to sys.path, too late; an import line can put it in front (site.py).
    code = f"import sys; sys.path[:0] = {folders!r}\n" if folders else ""
    write_atomic(packages / "aaa-sparkforge-dev.pth", code)


def link_natives(checkout: Checkout, packages: Path, sources: Path = SOURCES) -> list[str]:
    """Link installed native modules into the checkout where it has none of its own; return the names."""
    installed, own = packages / checkout.package, sources / checkout.name / checkout.package
    linked = []
    for library in sorted(installed.rglob(NATIVE)):
        link = own / library.relative_to(installed)
        if link.is_symlink() and not link.exists():
            link.unlink()  # of an image that is gone
        if not link.exists() and link.parent.is_dir():
            link.symlink_to(library)
            linked.append(str(library.relative_to(installed)))
    return linked


def fingerprints(checkout: Checkout, sources: Path = SOURCES) -> dict[str, str]:
    """Return path → sha256 of everything that the checkout's native modules are made of."""
    root = sources / checkout.name
    files = (path for name in checkout.sources for path in _files(root / name))
    return {str(path.relative_to(root)): sha256_file(path) for path in sorted(files)}


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for top, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(top, name) for name in names)


def changed(checkout: Checkout, sources: Path = SOURCES) -> list[str]:
    """Return which sources differ from the last time that the natives were accepted; the first look accepts them."""
    known, now = _known(checkout), fingerprints(checkout, sources)
    if known is None:
        accept(checkout, sources)
        return []
    return sorted(name for name in known.keys() | now.keys() if known.get(name) != now.get(name))


def accept(checkout: Checkout, sources: Path = SOURCES) -> None:
    """Note the sources as they are: the native modules were made from them."""
    lines = [f"{sha256}  {name}\n" for name, sha256 in fingerprints(checkout, sources).items()]
    write_atomic(_record(checkout), "".join(lines))


def _record(checkout: Checkout) -> Path:
    return paths.state() / "dev" / f"{checkout.name}.sha256"


def _known(checkout: Checkout) -> dict[str, str] | None:
    if not _record(checkout).is_file():
        return None
    lines = _record(checkout).read_text(encoding="utf-8").splitlines()
    return {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}


def stale_modules(names: Sequence[str], sources: Path = SOURCES) -> list[str]:
    """Return FlashInfer's cached modules that no stack pins, or that are made from one of `names` in the checkout."""
    modules, table = cache.modules(cache.default_root()), pins.load()
    by_source = cache.made_from(modules, [sources / "flashinfer" / name for name in names])
    stale = {module.name for module in modules if cache.why_stale(module, table)}
    return sorted(stale | {module.name for module in by_source})


def missing_patches(checkout: Checkout, stack: str, sources: Path = SOURCES) -> list[str]:
    """Return the patches of `stack` that the checkout lacks: those that could still be applied to its files."""
    queues = [queue for _, queue in status.queues(pins.load(), stack) if queue.upstream == checkout.name]
    judgements = [judgement for queue in queues for judgement in status.judge_tree(queue, sources / checkout.name)]
    applicable = (status.Verdict.APPLIES, status.Verdict.OFFSET)
    return [judgement.patch.name for judgement in judgements if judgement.verdict in applicable]


def check_mounted(packages: Path, stack: str, sources: Path = SOURCES) -> None:
    """Say, for each checkout, what is used, which patches it lacks, and what must be compiled again."""
    present = [checkout for checkout in CHECKOUTS if mounted(checkout, sources)]
    use(present, packages, sources)
    for checkout in CHECKOUTS:
        name, folder = checkout.name, sources / checkout.name
        if checkout not in present:
            say(f"{name}: no checkout in {folder}; the installed one serves")
            continue
        linked, differing = link_natives(checkout, packages, sources), changed(checkout, sources)
        say(f"{name}: {folder} serves" + (f", {len(linked)} native modules linked" if linked else ""))
        if lacking := missing_patches(checkout, stack, sources):
            say(f"  without {', '.join(lacking)}: on the host, ./inv dev.patch CHECKOUT --stack {stack}")
        if differing:
            say(f"  {len(differing)} native sources changed, such as {differing[0]}: {checkout.rebuild}")
            say(f"  then: python -m sparkforge.image.dev accept {name}")
        if name == "flashinfer" and (stale := stale_modules(differing, sources)):
            say(f"  stale in the cache: {', '.join(stale)}: ./inv clean-cache --module {','.join(stale)}")


def main(arguments: Sequence[str]) -> int:
    """Check what is mounted, or accept a checkout's sources as those of its native modules; return the exit code."""
    stack = os.environ[compose.STACK]
    packages = rootfs.Tree(TREE, stack).packages
    try:
        if arguments[:1] == ["accept"]:
            for checkout in CHECKOUTS:
                if checkout.name in arguments[1:]:
                    accept(checkout)
        else:
            check_mounted(packages, stack)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
