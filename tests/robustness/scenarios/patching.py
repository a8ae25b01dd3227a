"""Make a patched wheel from a locked queue, make it again where the cache holds a damaged one, and lock a queue."""

from __future__ import annotations

import hashlib
import json
import zipfile
from base64 import urlsafe_b64encode
from functools import cache
from pathlib import Path

from robustness.scenario import Scenario, pinned_file, write
from robustness.scenarios import archives
from sparkforge.patching import wheels
from sparkforge.pins import Pins, patched
from sparkforge.sources import fetch

HEADER = """\
Description: Change something
Origin: vendor, Sparkforge
Bug: https://example.org/1
Forwarded: no
Last-Update: 2026-11-21
Drop-when: contains pkg/a.py nothing of the kind
---
"""
BEFORE = {"pkg/a.py": "one\ntwo\nthree\n", "pkg/gone.py": "gone\n", "pkg/same.py": "same\n"}
CHANGES = """\
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,3 +1,3 @@
 one
-two
+{word}
 three
--- a/pkg/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-gone
--- /dev/null
+++ b/pkg/new/n.py
@@ -0,0 +1 @@
+new
"""


def queue(work: Path, name: str, word: str) -> Path:
    """Write a queue of one patch and return its folder."""
    write(work / name / "up-1/series", "0001-change.patch\n")
    write(work / name / "up-1/0001-change.patch", HEADER + CHANGES.format(word=word))
    return work / name / "up-1"


NAME = "up-1-py3-none-any.whl"


@cache
def wheel() -> bytes:
    """Return upstream's wheel: the files of BEFORE, and what a wheel has besides."""
    info = "up-1.dist-info"
    files = {name: text.encode() for name, text in BEFORE.items()} | {"pkg/big.bin": b"x" * 100_000}
    files |= {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: up\nVersion: 1\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\n",
    }
    rows = [f"{name},sha256={_encoded(data)},{len(data)}\n" for name, data in files.items()]
    return archives.zipped({**files, f"{info}/RECORD": "".join([*rows, f"{info}/RECORD,,\n"]).encode()})


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


@cache
def table() -> Pins:
    """Return the pins: one stack with one wheel that has a queue."""
    component = {"version": "1", "kind": "wheel", "package": "up", "licence": "MIT", "why": "test", "patches": "up-1",
                 "files": {NAME: pinned_file(wheel())}}  # fmt: skip
    value = {"schema": 1, "default": "s", "stacks": {"s": {"summary": "a stack", "components": {"up": component}}}}
    return Pins.model_validate(value)


def _prepare(work: Path) -> None:
    write(fetch.cached(NAME, hashlib.sha256(wheel()).hexdigest()), wheel())
    write(work / "mine.txt", "mine")
    queue(work, "patches", "TWO")
    patched.PATH = work / "patched.toml"  # this process is the scenario's own


def _prepare_locked(work: Path) -> None:
    _prepare(work)
    wheels.lock_stack("s", table=table(), patches=work / "patches")
    _cached(work).unlink()


def _prepare_damaged(work: Path) -> None:
    _prepare(work)
    wheels.lock_stack("s", table=table(), patches=work / "patches")
    _cached(work).write_bytes(_cached(work).read_bytes()[:-1])


def _cached(work: Path) -> Path:
    lock = patched.load_patched()[NAME]
    return fetch.cached(lock.file, lock.sha256)


def _make(work: Path) -> None:
    wheels.patched(table().component("s", "up"), NAME, patches=work / "patches")


def _lock(work: Path) -> None:
    wheels.lock_stack("s", table=table(), patches=work / "patches")


def _judge(work: Path) -> None:
    """A patched wheel in the cache is whole, or is not believed; the lock is whole, or is not there."""
    for name, lock in patched.load_patched().items():
        assert name == NAME
        file = fetch.cached(lock.file, lock.sha256)
        if file.exists() and read_stamp(file) == wheels.identity(file):
            assert hashlib.sha256(file.read_bytes()).hexdigest() == lock.sha256


def read_stamp(file: Path) -> object:
    """Return what the cache says of a file that was hashed."""
    try:
        return json.loads(file.with_name("verified.json").read_bytes())
    except (OSError, ValueError):
        return None


def _is_patched(work: Path) -> None:
    with zipfile.ZipFile(_cached(work)) as opened:
        assert opened.read("pkg/a.py") == b"one\nTWO\nthree\n"
        assert opened.read("pkg/new/n.py") == b"new\n"
        assert "pkg/gone.py" not in opened.namelist()


STAMP = ("*/verified.json",)
SCENARIOS = [
    Scenario("patch-wheel", _prepare_locked, _make, _judge, _is_patched, volatile=STAMP),
    Scenario("patch-damaged", _prepare_damaged, _make, _judge, _is_patched, volatile=STAMP),
    Scenario("patch-lock", _prepare, _lock, _judge, _is_patched, volatile=STAMP),
]
