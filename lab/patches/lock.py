"""Write `locks/patched.toml`: the hash of each patched wheel and source archive that a stack's queues make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparkforge import pins
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.files import atomic_file, require_space, write_atomic
from sparkforge.patching import wheels
from sparkforge.patching.series import PATCHES, Queue
from sparkforge.pins import Component, Pins, verify
from sparkforge.pins.verify import PatchedFile, load_patched
from sparkforge.sources import fetch

HEADER = "# Made by `.venv/bin/python -m lab.patches lock`; do not edit. What each upstream file becomes.\n"
LARGEST_RATIO = 8  # unpacked to packed size of a source archive; FlashInfer's ratio is 7.7


def lock_stack(stack: str, *, table: Pins | None = None, patches: Path = PATCHES) -> None:
    """Make every patched file of a stack's queues and write their hashes to `locks/patched.toml`.

    A queue's revision rises by one if one of its locked files changes, so that one version never names two files. All
    files of a queue have the same revision, in every stack.
    """
    table, former = table or pins.load(), load_patched()
    queues = {component.patches for component in table.stack(stack).components.values()}
    files = {name: component for component in table.components() if component.patches for name in component.files}
    entries = {name: lock for name, lock in former.items() if name in files}
    for folder in sorted(filter(None, queues)):
        queue = Queue.load(patches / folder)
        chosen = {name: component for name, component in files.items() if component.patches == folder}
        revision = max((lock.revision for lock in former.values() if lock.queue == folder), default=1)
        locks = {name: _make_cached(component, name, queue, revision) for name, component in chosen.items()}
        if any(former.get(name, lock) != lock for name, lock in locks.items()):
            locks = {name: _make_cached(component, name, queue, revision + 1) for name, component in chosen.items()}
        for lock in locks.values():
            say(f"{lock.file}: sha256 {lock.sha256}")
        entries |= locks
    if entries == dict(former):
        say("locks/patched.toml is unchanged")
    else:
        write_patched(entries)


def write_patched(files: Mapping[str, PatchedFile], path: Path | None = None) -> None:
    """Replace the lock, by default `verify.PATH`."""
    tables = []
    for name, file in sorted(files.items()):
        values = file.model_dump(exclude_none=True).items()
        lines = (f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in values)
        tables.append("\n".join([f'["{name}"]', *lines]))
    write_atomic(path or verify.PATH, "\n\n".join([HEADER.rstrip(), *tables]) + "\n")


def _make_cached(component: Component, filename: str, queue: Queue, revision: int) -> PatchedFile:
    """Make a patched file whose hash is not known yet, put it into the cache, and return its entry."""
    source, scratch = fetch.fetch_pinned(component, filename), paths.cache() / "patched" / filename
    require_space(scratch.parent, LARGEST_RATIO * source.stat().st_size, f"the patched {filename}")
    with fetch.locked_download(scratch):
        with atomic_file(scratch) as file:
            lock = wheels.make(source, component, queue, revision, file)
        target = fetch.cached(lock.file, lock.sha256)
        with fetch.locked_download(target):
            scratch.replace(target)
    return lock
