"""Answers of a real server on loopback, and streams in pieces: limits on bytes and time, bad URLs, cuts of events."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import threading
from contextlib import contextmanager, suppress

import httpx
import pytest
from expected import refused
from loopback import Quiet, serving

from sparkforge.core import http
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.openai import Endpoint
from sparkforge.serve import proof

DEEP = b"[" * 200_000


@contextmanager
def server(body, *, status=200, **headers):
    """Yield the URL of a server that sends `body`, the bytes or an iterable of pieces, to every request."""

    class Handler(Quiet):
        def get(self):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            with suppress(OSError):
                for piece in [body] if isinstance(body, bytes) else body():
                    self.wfile.write(piece)

        def post(self):
            self.body()
            self.get()

    with serving(Handler) as listening:
        yield listening.url


def get(url, **options):
    with httpx.Client(trust_env=False) as session:
        return http.request(session, "GET", url, **{"seconds": 60.0, "limit": 1 << 20, **options})


def endless():
    while True:
        yield b"x" * 65536


def test_an_answer_without_end_stops_at_the_limit_of_bytes_or_of_time():
    with server(endless) as url:
        with pytest.raises(http.LimitError, match="more than 1048576 bytes"):
            get(url)
        with pytest.raises(http.LimitError, match="not ended after 0 s"):
            get(url, seconds=0.0)


@pytest.mark.slow
def test_an_answer_that_decompresses_to_too_much_is_refused():
    bomb = gzip.compress(bytes(200 << 20))
    with server(bomb, Content_Encoding="gzip") as url, pytest.raises(http.LimitError, match="more than"):
        get(url)
    twice = server(gzip.compress(bomb), Content_Encoding="gzip, gzip")
    with twice as url, pytest.raises(http.LimitError, match="gzip, gzip"):
        get(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:x", "http://127.0.0.1:99999", "127.0.0.1:8000", "ftp://127.0.0.1", "http://[::1",
            "http://", "http://\udcff/", "http://" + "a" * 300 + ".example", "http://x\x00y"]
)  # fmt: skip
def test_a_url_that_is_not_http_is_an_error_of_ours(url):
    with pytest.raises(httpx.HTTPError):
        get(url)
    with pytest.raises((UsageError, ServerError)):
        Endpoint(url, "m", read_seconds=5.0).served()


@pytest.mark.parametrize("body", [DEEP, b"{", b"[]", b'{"data": 1}', b'{"data": [{"id": "m", "max_model_len": 1e999}]}',
                                  b'{"data": [{"id": "m", "max_model_len": "many"}]}', b"\xff\xfe"])  # fmt: skip
def test_an_answer_of_another_shape_is_an_error_of_ours(body):
    with server(body, Content_Type="application/json") as url:
        with refused("server.reply"):
            Endpoint(url).served()
        with refused("server.reply"):
            Endpoint(url, "m", key="").first_token(5.0)
        for name in proof.CALLS:
            try:
                fault = proof.fault_of(name, Endpoint(url, "m", key=""), 5.0)
            except ServerError as error:
                fault = f"{error.code}: {error.why}"
            assert fault, name
        assert Endpoint(url).version() == ""


def test_a_chat_ends_although_the_server_does_not():
    def events():
        while True:
            yield b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'

    for body, status, seconds, why in (
        (events, 200, 0.5, "not ended after"),
        (endless, 200, 5, "without a whole event"),
        (endless, 500, 5, "more than"),
    ):
        with server(body, status=status, Content_Type="text/event-stream") as url, refused("server.reply", why):
            list(Endpoint(url, "m", key="").stream_chat([{"role": "user", "content": "hello"}], 1, seconds=seconds))


def test_a_stream_that_sends_nothing_more_ends_in_its_time():
    """Without patch 0014, vLLM's stream of a response that failed in the background is like this."""
    test_ends = threading.Event()

    def events():
        yield b'event: response.created\ndata: {"type": "response.created"}\n\n'
        test_ends.wait(60)

    with server(events, Content_Type="text/event-stream") as url:
        with refused("server.reply", "ReadTimeout"):
            proof.fault_of("a response that fails", Endpoint(url, "m", key=""), 0.2)
        test_ends.set()


@pytest.mark.parametrize("count", [b"1.2.3", b"1e999", b"+", b"."])
def test_a_counter_that_is_not_a_number_is_ignored(count):
    with server(b"vllm:generation_tokens_total " + count) as url:
        assert Endpoint(url).generated() is None


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
