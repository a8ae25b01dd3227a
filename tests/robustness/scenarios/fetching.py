"""Fetch a pinned file from a package index on loopback; the cache has another version of the file."""

import hashlib
import os
from contextlib import contextmanager

import loopback
from loopback import Quiet

from robustness.scenario import Scenario, serving, sha256, write
from sparkforge.core.files import sha256_file
from sparkforge.pins import index
from sparkforge.sources import fetch

NAME = "thing-1-py3-none-any.whl"
DATA = hashlib.shake_256(b"thing").digest(300_000)
SHA256 = sha256(DATA)


class Index(Quiet):
    def get(self):
        if self.path == "/simple/thing/":
            page = f'<!DOCTYPE html><a href="../../files/{NAME}#sha256={SHA256}">{NAME}</a>'
            self.reply(200, page.encode(), {"Content-Type": "text/html"})
        else:
            self.reply(*((200, DATA) if self.path == f"/files/{NAME}" else (404,)))


@contextmanager
def _index(work):
    with serving(lambda: loopback.serving(Index)) as url:
        os.environ["PIP_INDEX_URL"] = f"{url}/simple"
        yield


def _prepare(work):
    write(fetch.cached("other-1.whl", "0" * 64).parent / "mine.whl", "mine")
    write(work / "cache/files/mine.txt", "mine")
    index.client().close()  # asks pip for its configuration, once


def _prepare_damaged(work):
    _prepare(work)
    write(fetch.cached(NAME, SHA256), DATA[:-1])


def _act(work):
    fetch.fetch("thing", NAME, SHA256)


def _judge(work):
    """A file of that name has the verified bytes, unless it was damaged before."""
    target = fetch.cached(NAME, SHA256)
    assert not target.exists() or sha256_file(target) == SHA256 or target.read_bytes() == DATA[:-1]


def _healed(work):
    assert fetch.cached(NAME, SHA256).read_bytes() == DATA


SCENARIOS = [
    Scenario("fetch", _prepare, _act, _judge, _healed, _index),
    Scenario("fetch-damaged", _prepare_damaged, _act, _judge, _healed, _index),
]
