"""What a release, or a tree, does to a patch queue: patch by patch, each on the result of those before it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from forge import patch as patching
from forge import pins, upstream
from forge.fit import Fit, Misfit, fit, undone
from forge.pins import Component, Pins
from forge.series import DIRECTORY, Patch, Queue
from forge.tree import Content
from forge.upstream import Reader
from sparkforge.console import say
from sparkforge.errors import PatchConflictError, PinError
from sparkforge.paths import ROOT

PATCHES = ROOT / "patches"


class Verdict(Enum):
    """How one patch stands to an upstream tree."""

    APPLIES = "applies"
    OFFSET = "applies with offset"
    UPSTREAM = "already upstream"
    CONFLICTS = "conflicts"


@dataclass(frozen=True)
class Judgement:
    """The verdict on one patch, what shows it, and the hunks that do not fit."""

    patch: Patch
    verdict: Verdict
    evidence: str = ""
    misfits: tuple[Misfit, ...] = ()

    def __str__(self) -> str:
        mark = "✗" if self.verdict is Verdict.CONFLICTS else "✓"
        return f"{mark} {self.patch.name}: {self.verdict.value}" + (f" ({self.evidence})" if self.evidence else "")


def paths_of(queue: Queue) -> set[str]:
    """Return every file that judging `queue` reads: those it touches, and those its `Drop-when` asks about."""
    return {*queue.paths, *(condition.path for patch in queue.patches for condition in patch.drop_when)}


def judge(queue: Queue, read: Reader) -> list[Judgement]:
    """Judge each patch on the unpatched tree behind `read`, with the patches before it that apply."""
    contents: dict[str, Content] = {path: read(path) for path in paths_of(queue)}
    now, judgements = dict(contents), list[Judgement]()
    for patch in queue.patches:
        judgement, changed = judge_one(patch, contents, now)
        now |= changed
        judgements.append(judgement)
    return judgements


def judge_one(
    patch: Patch, pristine: Mapping[str, Content], now: Mapping[str, Content]
) -> tuple[Judgement, dict[str, Content]]:
    """Judge one patch; return the verdict and the files that it changes where it applies.

    `pristine` is upstream's tree, which `Drop-when` asks about; `now` is the same after the patches before.
    """
    for condition in patch.drop_when:
        if condition.holds_for(pristine[condition.path]):
            return Judgement(patch, Verdict.UPSTREAM, f"its Drop-when holds: {condition}"), {}
    fits = _fits(patch, now)
    misfits = tuple(misfit for one in fits.values() for misfit in one.misfits)
    if misfits:
        if not any(one.misfits for one in _fits(patch, now, back=True).values()):
            return Judgement(patch, Verdict.UPSTREAM, "its reverse applies"), {}
        return Judgement(patch, Verdict.CONFLICTS, f"{len(misfits)} of {_count(patch)} hunks", misfits), {}
    contents = {path: one.content for path, one in fits.items()}
    moved = [f"{path} {_lines(one.offsets)}" for path, one in fits.items() if any(one.offsets)]
    if moved:
        return Judgement(patch, Verdict.OFFSET, "; ".join(moved)), contents
    return Judgement(patch, Verdict.APPLIES), contents


def of_release(queue: Queue, one: upstream.Release) -> list[Judgement]:
    """Judge `queue` on a release's archive. Raises the errors of `upstream.reader`."""
    return judge(queue, upstream.reader(one, paths_of(queue)))


def of_tree(queue: Queue, tree: Path) -> list[Judgement]:
    """Judge `queue` on what the files of `tree` were before any patch. Raises TreeModifiedError for a hand edit."""
    return judge(queue.for_tree(tree), patching.originals(tree, queue.upstream))


def queues(table: Pins, stack: str, patches: Path = PATCHES) -> list[tuple[Component, Queue]]:
    """Return the queues that a stack's components name, each with its component, a source archive before a wheel.

    Raises PinError for an unknown stack, PatchFormatError for a malformed queue.
    """
    return [(component, Queue.load(patches / name)) for name, component in _named(table, stack).items()]


def _named(table: Pins, stack: str) -> dict[str, Component]:
    """Return the queues' folder names that a stack names, each with its component."""
    named: dict[str, Component] = {}
    for component in sorted(table.stack(stack).components.values(), key=lambda one: one.kind != "sdist"):
        if component.patches:
            named.setdefault(component.patches, component)
    return named


def target(text: str) -> tuple[str, str]:
    """Read `0.33.0` or `flashinfer-0.7.2.post1` as (upstream, version); a bare version is vLLM's."""
    named = DIRECTORY.fullmatch(text)
    return (named["upstream"], named["version"]) if named else ("vllm", text)


def chosen(table: Pins, stack: str, against: str, patches: Path = PATCHES) -> tuple[Component, Queue, str]:
    """Return the stack's component and queue that `against` speaks of, and the version. Raises PinError for none."""
    name, version = target(against)
    named = _named(table, stack)
    for folder, component in named.items():
        if target(folder)[0] == name:
            return component, Queue.load(patches / folder), version
    known = ", ".join(target(folder)[0] for folder in named) or "none"
    raise PinError(f"stack {stack} has no patches for {name}", f"it has queues for: {known}", "name one of them")


def show(stack: str = "spark", against: str = "", tree: str = "") -> None:
    """Print the status of a stack's queues to stdout: on the pinned releases, on the version `against`, or on `tree`.

    Raises PatchConflictError if a patch neither applies nor is upstream.
    """
    table = pins.load()
    pairs = queues(table, stack)
    version: str | None = None
    if against:
        component, queue, version = chosen(table, stack, against)
        pairs = [(component, queue)]
    judgements = list[Judgement]()
    for component, queue in pairs:
        if tree:
            one, found = Path(tree), of_tree(queue, Path(tree))
            print_all(f"{queue.upstream}-{queue.version} on {one}", found)
        else:
            archive = upstream.release(table, component, version)
            found = of_release(queue, archive)
            print_all(f"{queue.upstream}-{queue.version} on {archive}", found)
        judgements += found
    require_all(judgements, f"./inv patch.rebase --to {against}" if against else "docs/patches.md, Recovery")


def print_all(title: str, judgements: Iterable[Judgement]) -> None:
    """Print the verdicts to stdout, and for people the hunks that do not fit."""
    sys.stdout.write("\n".join([title, *(f"  {one}" for one in judgements)]) + "\n")
    sys.stdout.flush()
    for one in judgements:
        for misfit in one.misfits:
            say("\n    ".join([f"  {one.patch.name[:4]} {misfit}", *misfit.text.splitlines()]))


def require_all(judgements: Iterable[Judgement], fix: str) -> None:
    """Raise PatchConflictError naming the patches that conflict."""
    if wrong := [one.patch.name for one in judgements if one.verdict is Verdict.CONFLICTS]:
        raise PatchConflictError(f"{len(wrong)} patches do not apply", ", ".join(wrong), fix)


def _fits(patch: Patch, now: Mapping[str, Content], *, back: bool = False) -> dict[str, Fit]:
    """Fit every change of `patch`, or with `back` its reverse, onto `now`."""
    changes = [undone(change) if back else change for change in patch.changes]
    return {change.path: fit(change, now[change.path]) for change in changes}


def _count(patch: Patch) -> int:
    return sum(len(change.hunks) for change in patch.changes)


def _lines(offsets: Iterable[int]) -> str:
    """Say by how many lines hunks moved: `+12` or `+12, +15 lines`."""
    told = dict.fromkeys(f"{offset:+}" for offset in offsets if offset)
    return f"{', '.join(told)} lines"
