"""Fetch a pinned file from a package index on loopback; the cache has another version of the file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from robustness.scenario import Scenario, write
from robustness.scenarios.loopback import Quiet, serving
from sparkforge.core.files import sha256_file
from sparkforge.pins import index
from sparkforge.sources import fetch

NAME = "thing-1-py3-none-any.whl"
DATA = hashlib.shake_256(b"thing").digest(300_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


class Index(Quiet):
    def do_GET(self) -> None:  # noqa: N802 - the library's name
        if self.path == "/simple/thing/":
            page = f'<!DOCTYPE html><a href="../../files/{NAME}#sha256={SHA256}">{NAME}</a>'
            self.answer(200, page.encode(), "text/html")
        elif self.path == f"/files/{NAME}":
            self.answer(200, DATA, "application/octet-stream")
        else:
            self.answer(404, b"", "text/plain")


@contextmanager
def _index(work: Path) -> Iterator[None]:
    with serving(Index) as url:
        os.environ["PIP_INDEX_URL"] = f"{url}/simple"
        yield


def _prepare(work: Path) -> None:
    write(fetch.cached("other-1.whl", "0" * 64).parent / "mine.whl", "mine")
    write(work / "cache/files/mine.txt", "mine")
    index.client().close()  # asks pip for its configuration, once


def _prepare_damaged(work: Path) -> None:
    _prepare(work)
    write(fetch.cached(NAME, SHA256), DATA[:-1])


def _act(work: Path) -> None:
    fetch.fetch("thing", NAME, SHA256)


def _judge(work: Path) -> None:
    """A file of that name has the verified bytes, unless it was damaged before."""
    target = fetch.cached(NAME, SHA256)
    assert not target.exists() or sha256_file(target) == SHA256 or target.read_bytes() == DATA[:-1]


def _healed(work: Path) -> None:
    assert fetch.cached(NAME, SHA256).read_bytes() == DATA


SCENARIOS = [
    Scenario("fetch", _prepare, _act, _judge, _healed, _index),
    Scenario("fetch-damaged", _prepare_damaged, _act, _judge, _healed, _index),
]
