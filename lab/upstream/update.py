"""Propose newer versions of the components in pins.toml, as a diff of pins.toml. Changes nothing.

A file of the new version is the successor of an old file if their names differ only in the version. A component with a
file that has no successor is reported, not proposed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from packaging.version import Version

from lab.upstream.releases import newest
from sparkforge import pins
from sparkforge.core.console import echo, say
from sparkforge.core.paths import ROOT
from sparkforge.pins import Component, Pins
from sparkforge.pins.index import client, project_page

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage


@dataclass(frozen=True)
class Proposal:
    """A newer version of one component; `files` maps each pinned file name to its successor's name, sha256 and size.

    `missing` are the pinned files without a successor; a proposal that has any is incomplete.
    """

    stack: str
    name: str
    pinned: Component
    version: str
    files: Mapping[str, tuple[str, str, int | None]]
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every pinned file has a successor."""
        return not self.missing


def proposals(table: Pins, only: str) -> list[Proposal]:
    """Ask the index for the newest release of every package, or of those in the stack `only`. Raises NetworkError."""
    with client() as http:
        candidates = [
            propose(stack, name, component, http)
            for stack, components in table.stacks.items()
            if only in ("", stack)
            for name, component in components.components.items()
            # A local version such as 2.13.0+cpu is not on the default index.
            if component.package and "+" not in component.version
        ]
    return [proposal for proposal in candidates if proposal]


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
    entries = {entry.filename: (entry.filename, entry.digests.get("sha256", ""), entry.size) for entry in listed}
    named = {old: old.replace(component.version, version) for old in component.files}
    files = {old: entries[new] for old, new in named.items() if new in entries and entries[new][1]}
    return Proposal(stack, name, component, version, files, tuple(old for old in named if old not in files))


def diff(proposed: Iterable[Proposal], text: str | None = None) -> str:
    """Return the complete proposals as a unified diff of pins.toml; empty if there are none."""
    old = text if text is not None else (ROOT / "pins.toml").read_text(encoding="utf-8")
    new = old
    for proposal in proposed:
        if proposal.complete:
            new = _rewritten(new, proposal)
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), "a/pins.toml", "b/pins.toml"
    )
    return "".join(lines)


def print_updates(stack: str = "") -> None:
    """Print the diff to stdout, and the components that it leaves out to stderr."""
    table = pins.load()
    if stack:
        table.stack(stack)
    proposed = proposals(table, stack)
    for proposal in proposed:
        lacks = f" has no {', '.join(proposal.missing)}: not proposed" if proposal.missing else ""
        say(f"{proposal.stack}/{proposal.name} {proposal.pinned.version} → {proposal.version}{lacks}")
    if proposed:
        say("for their effect on patches, kernels and profiles: .venv/bin/python -m lab.upstream check")
    else:
        say("everything is the newest release")
    echo(diff(proposed), end="")


def _rewritten(text: str, proposal: Proposal) -> str:
    """Return `text` with the proposal's version and files in its own table, and nowhere else."""
    stack = f'"{proposal.stack}"' if "." in proposal.stack else proposal.stack
    head, mark, rest = text.partition(f"[stacks.{stack}.components.{proposal.name}]\n")
    table, gap, tail = rest.partition("\n\n")
    table = table.replace(f'version = "{proposal.pinned.version}"', f'version = "{proposal.version}"', 1)
    for old, (new, sha256, size) in proposal.files.items():
        pinned = proposal.pinned.pinned_files[old]
        size_before, size_after = (str(number) if number not in (None, "unknown") else '"unknown"'
                                   for number in (pinned.size, size))  # fmt: skip
        table = table.replace(old, new).replace(
            f'sha256 = "{pinned.sha256}", size = {size_before}', f'sha256 = "{sha256}", size = {size_after}'
        )
    return head + mark + table + gap + tail
