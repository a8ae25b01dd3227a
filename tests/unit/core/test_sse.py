"""Streamed answers: events are cut where the specification says, and every stream has an end."""

from __future__ import annotations

import asyncio
import itertools
import json

import httpx
import pytest

from sparkforge.core import http

SEPARATORS = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e"
DATA = json.dumps({"text": SEPARATORS + " é 語"}, ensure_ascii=False)
STREAM = f"data: {DATA}\n\ndata: a\r\ndata:b\r\n\r\n: comment\r\ndata: [DONE]\r\n\r\ndata: cut off".encode()
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, pieces):
        self.pieces = pieces

    def __iter__(self):
        return iter(self.pieces)

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece


def response(pieces, **headers):
    return httpx.Response(200, headers={**HEADERS, **headers}, stream=Pieces(pieces))


async def collect(answer, **limits):
    return [event.data async for event in http.aevents(answer, **limits)]


def both(pieces, *, headers=None, **limits):
    """Return the events that the synchronous function yields, after the asynchronous one yielded the same."""
    pieces = list(pieces)
    first = [event.data for event in http.events(response(pieces, **(headers or {})), **limits)]
    assert asyncio.run(collect(response(pieces, **(headers or {})), **limits)) == first
    return first


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_unicode_separators_do_not_cut_an_event(size):
    assert both(STREAM[i : i + size] for i in range(0, len(STREAM), size)) == [DATA, "a\nb", "[DONE]"]


def test_a_stream_has_an_overall_deadline():
    with pytest.raises(http.LimitError, match="not ended after 0 s"):
        list(http.events(response(itertools.repeat(b"data: x\n\n")), 0.0))
    with pytest.raises(http.LimitError, match="not ended after 0 s"):
        asyncio.run(collect(response([b"data: x\n\n"]), seconds=0.0))


def test_an_answer_that_is_no_event_stream_is_refused():
    with pytest.raises(httpx.TransportError, match="event-stream"):
        both([b"data: x\n\n"], headers={"Content-Type": "text/html"})
    with pytest.raises(http.LimitError, match="encoded as 'gzip'"):
        both([b"data: x\n\n"], headers={"Content-Encoding": "gzip"})
