"""Propose newer versions of what pins.toml names, as a diff of pins.toml. Changes nothing.

A file of the new version answers to one of the old if their names differ in the version alone; a component whose files
have no such answers is told, not proposed.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from packaging.version import InvalidVersion, Version

from forge import pins, status, upstream
from forge.index import client, project_page
from forge.pins import Component, Pins
from forge.series import Queue
from sparkforge.console import say
from sparkforge.paths import ROOT

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage


@dataclass(frozen=True)
class Proposal:
    """A newer version of one component; `files` maps each pinned file name to its successor's name and sha256.

    `missing` are the pinned files without a successor; a proposal that has any is incomplete.
    """

    stack: str
    name: str
    pinned: Component
    version: str
    files: Mapping[str, tuple[str, str]]
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every pinned file has a successor."""
        return not self.missing


def proposals(table: Pins, only: str = "") -> list[Proposal]:
    """Ask the index for the newest release of every package, of the stack `only` if it is named. Raises FetchError."""
    with client() as http:
        found = [
            propose(stack, name, component, http)
            for stack, components in table.stacks.items()
            if only in ("", stack)
            for name, component in components.components.items()
            # A local version such as 2.13.0+cpu is not on the default index.
            if component.package and "+" not in component.version
        ]
    return [proposal for proposal in found if proposal]


def propose(stack: str, name: str, component: Component, http: httpx.Client) -> Proposal | None:
    """Return the newest release of one component if it is newer than the pinned one, else None."""
    listed = project_page(str(component.package), http).packages
    version = newest(entry.version for entry in listed)
    if version is None or Version(version) <= Version(component.version):
        return None
    return successor(stack, name, component, version, listed)


def successor(
    stack: str, name: str, component: Component, version: str, listed: Iterable[DistributionPackage]
) -> Proposal:
    """Pair the pinned files with those of `version` among the `listed` ones."""
    hashes = {entry.filename: entry.digests.get("sha256", "") for entry in listed}
    named = {old: old.replace(component.version, version) for old in component.files}
    files = {old: (new, hashes[new]) for old, new in named.items() if hashes.get(new)}
    return Proposal(stack, name, component, version, files, tuple(old for old in named if old not in files))


def newest(versions: Iterable[str | None]) -> str | None:
    """Return the highest final release among `versions`; names that are no versions count for nothing."""
    finals = {}
    for text in versions:
        try:
            version = Version(text or "")
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            finals[version] = text
    return finals[max(finals)] if finals else None


def diff(found: Iterable[Proposal], text: str | None = None) -> str:
    """Return the complete proposals as a unified diff of pins.toml; empty if there are none."""
    old = text if text is not None else (ROOT / "pins.toml").read_text(encoding="utf-8")
    new = old
    for proposal in found:
        if proposal.complete:
            new = _rewritten(new, proposal)
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), "a/pins.toml", "b/pins.toml"
    )
    return "".join(lines)


def show(stack: str = "") -> None:
    """Print the diff to stdout, and to people what it leaves out and what the new releases do to the patches."""
    table = pins.load()
    if stack:
        table.stack(stack)
    found = proposals(table, stack)
    for proposal in found:
        lacks = f" has no {', '.join(proposal.missing)}: not proposed" if proposal.missing else ""
        say(f"{proposal.stack}/{proposal.name} {proposal.pinned.version} → {proposal.version}{lacks}")
        for judgement in _patches(table, proposal):
            say(f"  {judgement}")
    if not found:
        say("everything is the newest release")
    sys.stdout.write(diff(found))


def _patches(table: Pins, proposal: Proposal) -> list[status.Judgement]:
    """Judge the component's queue on the proposed release; a wheel's is judged with its source archive."""
    if not proposal.pinned.patches or proposal.pinned.kind != "sdist":
        return []
    queue = Queue.load(ROOT / "patches" / proposal.pinned.patches)
    return status.of_release(queue, upstream.release(table, proposal.pinned, proposal.version))


def _rewritten(text: str, proposal: Proposal) -> str:
    """Return `text` with the proposal's version and files in its own table, and nowhere else."""
    stack = f'"{proposal.stack}"' if "." in proposal.stack else proposal.stack
    head, mark, rest = text.partition(f"[stacks.{stack}.components.{proposal.name}]\n")
    table, gap, tail = rest.partition("\n\n")
    table = table.replace(f'version = "{proposal.pinned.version}"', f'version = "{proposal.version}"', 1)
    for old, (new, sha256) in proposal.files.items():
        table = table.replace(old, new).replace(proposal.pinned.files[old], sha256)
    return head + mark + table + gap + tail
