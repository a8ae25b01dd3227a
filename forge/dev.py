"""What of the mounted checkouts must be compiled again: `python -m forge.dev`, at every start of the development image.

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

from forge import cache, pins, rootfs
from sparkforge import paths
from sparkforge.console import say, show_error
from sparkforge.errors import SparkforgeError, StorageError
from sparkforge.files import sha256_file, write_atomic

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
    place = sources / checkout.name
    try:
        return (place / checkout.package / "__init__.py").is_file()
    except PermissionError as error:
        why = f"{error.strerror} (running as uid {os.getuid()})"
        raise StorageError(f"cannot read the checkout in {place}", why, "chmod -R a+rX it on the host") from error


def use(chosen: Sequence[Checkout], packages: Path, sources: Path = SOURCES) -> None:
    """Let exactly these checkouts be imported instead of the installed packages."""
    lines = [f"{sources / each.name}" for each in chosen]
    # A .pth line is appended to sys.path, too late; an import line can put it in front (site.py).
    code = f"import sys; sys.path[:0] = {lines!r}\n" if lines else ""
    write_atomic(packages / "aaa-sparkforge-dev.pth", code)


def link_natives(checkout: Checkout, packages: Path, sources: Path = SOURCES) -> list[str]:
    """Link installed native modules into the checkout where it has none of its own; return the names."""
    installed, own = packages / checkout.package, sources / checkout.name / checkout.package
    made = []
    for library in sorted(installed.rglob(NATIVE)):
        place = own / library.relative_to(installed)
        if place.is_symlink() and not place.exists():
            place.unlink()  # of an image that is gone
        if not place.exists() and place.parent.is_dir():
            place.symlink_to(library)
            made.append(str(library.relative_to(installed)))
    return made


def fingerprints(checkout: Checkout, sources: Path = SOURCES) -> dict[str, str]:
    """Return path → sha256 of everything that the checkout's native modules are made of."""
    root = sources / checkout.name
    files = (path for name in checkout.sources for path in _files(root / name))
    return {str(path.relative_to(root)): sha256_file(path) for path in sorted(files)}


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    for top, folders, names in os.walk(place):
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
    found, table = cache.modules(cache.default_root()), pins.load()
    by_source = cache.made_from(found, [sources / "flashinfer" / name for name in names])
    return sorted({each.name for each in found if cache.why_stale(each, table)} | {each.name for each in by_source})


def look(packages: Path, sources: Path = SOURCES) -> None:
    """Say, for each checkout, what is used and what must be compiled again."""
    there = [each for each in CHECKOUTS if mounted(each, sources)]
    use(there, packages, sources)
    for each in CHECKOUTS:
        if each not in there:
            say(f"{each.name}: no checkout in {sources / each.name}; the installed one serves")
            continue
        linked, differing = link_natives(each, packages, sources), changed(each, sources)
        say(f"{each.name}: {sources / each.name} serves" + (f", {len(linked)} native modules linked" if linked else ""))
        if differing:
            say(f"  {len(differing)} native sources changed, such as {differing[0]}: {each.rebuild}")
            say(f"  then: python -m forge.dev accept {each.name}")
        if each.name == "flashinfer" and (stale := stale_modules(differing, sources)):
            say(f"  stale in the cache: {', '.join(stale)}: ./inv clean-cache --module {','.join(stale)}")


def main(words: Sequence[str]) -> int:
    """Look, or accept a checkout's sources as those of its native modules; return the exit code."""
    packages = rootfs.Tree(TREE, os.environ.get("SPARKFORGE_DEVICE", rootfs.CUDA)).packages
    try:
        if words[:1] == ["accept"]:
            for each in CHECKOUTS:
                if each.name in words[1:]:
                    accept(each)
        else:
            look(packages)
    except SparkforgeError as error:
        show_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
