"""Compares the git dependencies of a release's build with the pins of the stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.upstream import hidden
from lab.upstream.cmake import Declared
from lab.upstream.effect import Column, Effect, Observation, undetermined
from sparkforge.core.errors import InputError
from sparkforge.pins import GitSource
from sparkforge.pins.table import COMMIT


def check(root: Path, pinned: Mapping[str, GitSource]) -> Column:
    """Compare the dependencies in the build files under `root` with `pinned`."""
    try:
        declared = hidden.declared(root)
    except InputError as error:
        return undetermined(f"{error.what}: {error.why}")
    observations = tuple(_differences(declared, pinned))
    changed = sum(entry.effect is Effect.CHANGED for entry in observations)
    broken = sum(entry.effect is Effect.BREAKS for entry in observations)
    parts = [f"{len({(entry.file, entry.name) for entry in declared})} asked for" if declared else "none"]
    parts += [f"{changed} changed"] if changed else []
    parts += [f"{broken} to decide"] if broken else []
    return Column(", ".join(parts), observations)


def _differences(declared: list[Declared], pinned: Mapping[str, GitSource]) -> Iterator[Observation]:
    """Yield added, removed and changed dependencies; one can have several tags, one for each branch of a build file."""
    requested: dict[str, list[Declared]] = {}
    for entry in declared:
        requested.setdefault(entry.name, []).append(entry)
    pins: dict[str, list[GitSource]] = {}
    for pin in pinned.values():
        pins.setdefault(pin.dependency, []).append(pin)
    for name in sorted(requested.keys() | pins.keys()):
        if name not in pins:
            text = (
                f"{'; '.join(map(str, requested[name]))} is new: decide whether it is needed, read its licence, pin it"
            )
            yield Observation(Effect.BREAKS, text)
        elif name not in requested:
            yield Observation(Effect.CHANGED, f"{name} is no longer fetched: remove its pin")
        else:
            yield from _changes(name, requested[name], pins[name])


def _changes(name: str, requested: list[Declared], pins: list[GitSource]) -> Iterator[Observation]:
    """Yield the differences of a dependency. Another repository, or no variable for a copy, needs a decision."""
    for effect, word, now, before in (
        (Effect.BREAKS, "repository", {entry.repository for entry in requested}, {pin.repository for pin in pins}),
        (Effect.BREAKS, "override", {entry.override or "none" for entry in requested},
         {pin.src_dir or "none" for pin in pins}),
        (Effect.CHANGED, "file", {entry.file for entry in requested}, {pin.asked_in for pin in pins}),
        (Effect.CHANGED, "tag", {entry.tag for entry in requested}, {pin.tag for pin in pins}),
    ):  # fmt: skip
        if now != before:
            yield Observation(effect, f"{name}: {word} {_listed(before - now)} → {_listed(now - before)}")


def _listed(names: set[str]) -> str:
    """Return the names as a sorted list in text; commits are shortened to 12 digits."""
    return ", ".join(sorted(name[:12] if COMMIT.fullmatch(name) else name for name in names)) or "(none)"
