"""Streamed answers are cut at line feeds and nowhere else."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from sparkforge import sse

SEPARATORS = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e"
EVENT = "data: " + json.dumps({"text": SEPARATORS + " é 語"}, ensure_ascii=False)
STREAM = f"{EVENT}\n\n: comment\r\ndata: [DONE]\n\ncut off".encode()
WANTED = [EVENT, "", ": comment", "data: [DONE]", "", "cut off"]


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, size):
        self.pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]

    def __iter__(self):
        return iter(self.pieces)

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_unicode_separators_do_not_cut_an_event(size):
    assert list(sse.lines(httpx.Response(200, stream=Pieces(size)))) == WANTED

    async def collect():
        return [line async for line in sse.alines(httpx.Response(200, stream=Pieces(size)))]

    assert asyncio.run(collect()) == WANTED
