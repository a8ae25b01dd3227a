"""The status of a patch queue on a release or a tree: each patch is checked on the result of the patches before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lab.patches import upstream
from lab.patches.fit import Fit, Misfit, fit, undone
from lab.patches.upstream import Reader
from sparkforge import pins
from sparkforge.core.console import echo, say
from sparkforge.core.errors import InputError, PatchError, UsageError
from sparkforge.patching.hunks import Content, read_files
from sparkforge.patching.series import DIRECTORY, PATCHES, Patch, Queue, queues
from sparkforge.pins import Component, Pins


class Verdict(Enum):
    """The outcome of one patch on an upstream tree."""

    APPLIES = "applies"
    OFFSET = "applies with offset"
    UPSTREAM = "already upstream"
    CONFLICTS = "conflicts"


@dataclass(frozen=True)
class Judgement:
    """The verdict on one patch, its evidence, and the hunks that do not fit."""

    patch: Patch
    verdict: Verdict
    evidence: str = ""
    misfits: tuple[Misfit, ...] = ()

    def __str__(self) -> str:
        mark = "✗" if self.verdict is Verdict.CONFLICTS else "✓"
        return f"{mark} {self.patch.name}: {self.verdict.value}" + (f" ({self.evidence})" if self.evidence else "")


def paths_of(queue: Queue) -> set[str]:
    """Return the files that `judge` reads for `queue`: those that patches or their `Drop-when` conditions name."""
    return {*queue.paths, *(condition.path for patch in queue.patches for condition in patch.drop_when)}


def judge(queue: Queue, read: Reader) -> list[Judgement]:
    """Judge each patch on the unpatched tree behind `read`, with the patches before it that apply."""
    return carry(queue, read)[0]


def carry(queue: Queue, read: Reader) -> tuple[list[Judgement], dict[str, Content]]:
    """Judge as `judge` does, and also return the files after the patches that apply."""
    contents: dict[str, Content] = {path: read(path) for path in paths_of(queue)}
    now, judgements = dict(contents), list[Judgement]()
    for patch in queue.patches:
        judgement, changed = judge_patch(patch, contents, now)
        now |= changed
        judgements.append(judgement)
    return judgements, now


def judge_patch(
    patch: Patch, pristine: Mapping[str, Content], now: Mapping[str, Content]
) -> tuple[Judgement, dict[str, Content]]:
    """Judge one patch; return the verdict and the files that it changes if it applies.

    `pristine` is upstream's tree, on which `Drop-when` is evaluated; `now` is the tree after the patches before.
    """
    for condition in patch.drop_when:
        if condition.holds_for(pristine[condition.path]):
            return Judgement(patch, Verdict.UPSTREAM, f"its Drop-when holds: {condition}"), {}
    fits = _fits(patch, now)
    misfits = tuple(misfit for result in fits.values() for misfit in result.misfits)
    if misfits:
        if not any(result.misfits for result in _fits(patch, now, back=True).values()):
            return Judgement(patch, Verdict.UPSTREAM, "its reverse applies"), {}
        hunks = sum(len(change.hunks) for change in patch.changes)
        return Judgement(patch, Verdict.CONFLICTS, f"{len(misfits)} of {hunks} hunks", misfits), {}
    contents = {path: result.content for path, result in fits.items()}
    moved = []  # such as `pkg/a.py +12, +15 lines`
    for path, result in fits.items():
        if offsets := dict.fromkeys(f"{offset:+}" for offset in result.offsets if offset):
            moved.append(f"{path} {', '.join(offsets)} lines")
    if moved:
        return Judgement(patch, Verdict.OFFSET, "; ".join(moved)), contents
    return Judgement(patch, Verdict.APPLIES), contents


def judge_release(queue: Queue, release: upstream.Release) -> list[Judgement]:
    """Judge `queue` on a release's archive. Raises the errors of `upstream.reader`."""
    return judge(queue, upstream.reader(release, paths_of(queue)))


def judge_tree(queue: Queue, tree: Path) -> list[Judgement]:
    """Judge `queue` on the files of `tree`, without a check of their hashes. Raises UsageError if it is no folder."""
    if not tree.is_dir():
        raise UsageError(f"cannot judge {tree}", "it is no folder", "name an unpacked source archive or a checkout")
    queue = queue.for_tree(tree)
    return judge(queue, read_files(tree, paths_of(queue)).__getitem__)


def target(text: str) -> tuple[str, str]:
    """Read `0.33.0` or `flashinfer-0.7.2.post1` as (upstream, version); a bare version is vLLM's."""
    match = DIRECTORY.fullmatch(text)
    return (match["upstream"], match["version"]) if match else ("vllm", text)


def chosen(table: Pins, stack: str, against: str, patches: Path = PATCHES) -> tuple[Component, Queue, str]:
    """Return the stack's component and queue that `against` names, and the version; raises InputError if none."""
    name, version = target(against)
    pairs = queues(table, stack, patches)
    for component, queue in pairs:
        if queue.upstream == name:
            return component, queue, version
    known = ", ".join(queue.upstream for _, queue in pairs) or "none"
    raise InputError(
        f"stack {stack} has no patches for {name}", f"it has queues for: {known}", "name one of them", code="input.pins"
    )


def print_status(stack: str, against: str = "", tree: str = "") -> None:
    """Print the status of a stack's queues to stdout: on the pinned releases, on the version `against`, or on `tree`.

    Raises PatchError if a patch neither applies nor is upstream.
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
            subject, verdicts = tree, judge_tree(queue, Path(tree))
        else:
            release = upstream.release(table, component, version)
            subject, verdicts = str(release), judge_release(queue, release)
        print_all(f"{queue.name} on {subject}", verdicts)
        judgements += verdicts
    if conflicts := [judgement.patch.name for judgement in judgements if judgement.verdict is Verdict.CONFLICTS]:
        rebase = f".venv/bin/python -m lab.patches rebase {against}"
        fix = rebase if against else "docs/guide/troubleshooting.md#patches"
        raise PatchError("not every patch applies", ", ".join(conflicts), fix, code="patch.conflict")


def print_all(title: str, judgements: Iterable[Judgement]) -> None:
    """Print the verdicts to stdout, and to stderr the hunks that do not fit."""
    echo("\n".join([title, *(f"  {judgement}" for judgement in judgements)]))
    for judgement in judgements:
        for misfit in judgement.misfits:
            say("\n    ".join([f"  {judgement.patch.name[:4]} {misfit}", *misfit.text.splitlines()]))


def _fits(patch: Patch, now: Mapping[str, Content], *, back: bool = False) -> dict[str, Fit]:
    """Apply every change of `patch`, or with `back` its reverse, to `now`."""
    changes = [undone(change) if back else change for change in patch.changes]
    return {change.path: fit(change, now[change.path]) for change in changes}
