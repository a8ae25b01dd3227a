"""What an upstream's build would bring by itself, held against `pins.toml`.

Two places say so: its CMake files, and `Cargo.lock` for crates that come from git instead of the crate registry.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge import cmake
from forge.cmake import Declared
from forge.pins import GitSource
from sparkforge.errors import PinError


def declared(tree: Path) -> list[Declared]:
    """Return every dependency that the source tree at `tree` would fetch by git or URL while it is built."""
    return [*cmake.declared(tree), *cargo(tree)]


def cargo(tree: Path) -> list[Declared]:
    """Return the crates of each `Cargo.lock` under `tree` that come from git, at the commit that the lock names."""
    found = []
    for file in sorted(tree.rglob("Cargo.lock")):
        for crate in tomllib.loads(file.read_text(encoding="utf-8")).get("package", []):
            source = str(crate.get("source", ""))
            if source.startswith("git+"):
                repository, _, commit = source.removeprefix("git+").partition("#")
                url = repository.partition("?")[0]
                found.append(Declared(crate["name"], url, commit, str(file.relative_to(tree)), 0, None))
    return found


def check(found: Sequence[Declared], upstream: str, pinned: Mapping[str, GitSource]) -> None:
    """Hold what `upstream` declares against its pins.

    Raises PinError that names each dependency that is not pinned, is pinned otherwise, or is pinned and not asked for.
    """
    wrong = [complaint for one in found if (complaint := _complaint(one, pinned))]
    asked = {(one.file, one.name, one.tag) for one in found}
    for name, pin in pinned.items():
        if (pin.asked_in, pin.dependency, pin.tag) not in asked:
            wrong.append(f"pins.toml has {name} at {pin.tag}, which {pin.asked_in} does not ask for")
    if wrong:
        raise PinError(f"the hidden dependencies of {upstream} are not those in pins.toml", "; ".join(wrong),
                       "read upstream's change, then correct the stack's git table in pins.toml")  # fmt: skip


def _complaint(one: Declared, pinned: Mapping[str, GitSource]) -> str | None:
    """Return what is wrong between one dependency and its pin, or None."""
    pins = {name: pin for name, pin in pinned.items() if (pin.asked_in, pin.dependency) == (one.file, one.name)}
    same = {name: pin for name, pin in pins.items() if pin.tag == one.tag}
    if not pins:
        return f"{one} is not in pins.toml"
    if not same:
        return f"{one} is pinned as {', '.join(f'{name} at {pin.tag}' for name, pin in pins.items())}"
    name, pin = next(iter(same.items()))
    for ours, theirs, what in (
        (pin.repository, one.repository, "repository"),
        (pin.src_dir, one.override, "override variable"),
    ):
        if ours != theirs:
            return f"{name} is pinned with the {what} {ours}, and upstream has {theirs}"
    return None
