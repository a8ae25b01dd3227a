"""The dependencies that an upstream's build downloads by itself, compared with `pins.toml`.

Two kinds of files name them: CMake files, and `Cargo.lock` for crates that come from git instead of the crate registry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from lab.upstream import cmake
from lab.upstream.cmake import Declared
from sparkforge.core.errors import InputError
from sparkforge.core.files import read_toml
from sparkforge.pins import GitSource


class Crate(BaseModel):
    """One package of a `Cargo.lock`; without a source it is part of the tree."""

    name: str
    source: str = ""


class Lock(BaseModel):
    """The part of a `Cargo.lock` that we read."""

    package: list[Crate] = []


def declared(tree: Path) -> list[Declared]:
    """Return every dependency that the source tree at `tree` would fetch by git or URL while it is built."""
    return [*cmake.declared(tree), *cargo(tree)]


def cargo(tree: Path) -> list[Declared]:
    """Return the crates of each `Cargo.lock` under `tree` that come from git, at the commit that the lock names.

    Raises InputError for a lock that cannot be read, because it may name such a crate.
    """
    crates_from_git = []
    for file in sorted(tree.rglob("Cargo.lock")):
        name = str(file.relative_to(tree))
        try:
            crates = Lock.model_validate(read_toml(file)).package
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())[:300]
            fix = "unpack the source again: ./inv build --only sources"
            raise InputError(f"{name} cannot be read as a Cargo.lock", why, fix, code="input.pins") from error
        for crate in crates:
            if crate.source.startswith("git+"):
                repository, _, commit = crate.source.removeprefix("git+").partition("#")
                crates_from_git.append(Declared(crate.name, repository.partition("?")[0], commit, name, 0, None))
    return crates_from_git


def check(declared: Sequence[Declared], upstream: str, pinned: Mapping[str, GitSource]) -> None:
    """Compare the dependencies that `upstream` declares with its pins.

    Raises InputError that names each dependency without a pin or unlike its pin, and each pin that nothing declares.
    """
    problems = [problem for dependency in declared if (problem := _problem(dependency, pinned))]
    requested = {(dependency.file, dependency.name, dependency.tag) for dependency in declared}
    for name, pin in pinned.items():
        if (pin.asked_in, pin.dependency, pin.tag) not in requested:
            problems.append(f"pins.toml has {name} at {pin.tag}, which {pin.asked_in} does not ask for")
    if problems:
        raise InputError(
            f"the hidden dependencies of {upstream} are not those in pins.toml",
            "; ".join(problems),
            "read upstream's change, then correct the stack's git table in pins.toml",
            code="input.pins",
        )


def _problem(dependency: Declared, pinned: Mapping[str, GitSource]) -> str | None:
    """Return how a dependency differs from its pin, or None."""
    request = (dependency.file, dependency.name)
    pins = {name: pin for name, pin in pinned.items() if (pin.asked_in, pin.dependency) == request}
    if not pins:
        return f"{dependency} is not in pins.toml"
    name, pin = next(((name, pin) for name, pin in pins.items() if pin.tag == dependency.tag), ("", None))
    if pin is None:
        return f"{dependency} is pinned as {', '.join(f'{name} at {pin.tag}' for name, pin in pins.items())}"
    if pin.repository != dependency.repository:
        return f"{name} is pinned with the repository {pin.repository}, and upstream has {dependency.repository}"
    if pin.src_dir != dependency.override:
        return f"{name} is pinned with the override variable {pin.src_dir}, and upstream has {dependency.override}"
    return None
