"""HTTP responses with limits on bytes and time, read completely or as streamed events.

By the specification of server-sent events, lines end at CR and LF only; httpx's own `iter_lines` also cuts at
U+2028, U+0085 and others, which JSON may hold unescaped.
"""

import math
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx

ANSWER_BYTES = 64 << 20  # the prompt logprobs of 131,072 tokens are the largest answer that we ask for
EVENT_BYTES = 8 << 20  # of one event; an event usually has a few kilobytes
_LINE_END = re.compile(rb"\r\n|\n|\r")
KEPT = ("content-type", "location", "retry-after", "www-authenticate")  # headers of a whole response
ENCODINGS = ("", "identity", "gzip", "deflate")  # no lists such as "gzip, gzip": each level can expand a thousandfold


class LimitError(httpx.TransportError):
    """A response exceeded its limit of bytes or time, or has an unsupported content encoding."""


def request(
    client: httpx.Client, method: str, url: str, *, seconds: float, limit: int = ANSWER_BYTES, **options: Any
) -> httpx.Response:
    """Send a request and return the whole response: at most `limit` decompressed bytes, within `seconds`.

    The time is checked when bytes arrive; the client's read timeout limits the wait for them. Raises LimitError and
    httpx's other errors.
    """
    try:
        with client.stream(method, url, **options) as response:
            return whole(response, seconds=seconds, limit=limit)
    except (httpx.InvalidURL, ValueError, OverflowError) as error:  # a host name that IDNA refuses; a port above 65535
        raise httpx.UnsupportedProtocol(f"{url[:200]!r} is not a URL: {error}") from error


def whole(response: httpx.Response, *, seconds: float, limit: int = ANSWER_BYTES) -> httpx.Response:
    """Read the rest of a streamed response and return a complete one. Raises the same errors as `request`."""
    deadline, body = time.monotonic() + seconds, bytearray()
    if (encoding := response.headers.get("content-encoding", "").lower()) not in ENCODINGS:
        raise LimitError(f"the answer is encoded as {encoding[:40]!r}")
    for piece in response.iter_bytes():
        body += piece
        if len(body) > limit:
            raise LimitError(f"the answer has more than {limit} bytes")
        if time.monotonic() > deadline:
            raise LimitError(f"the answer had not ended after {seconds:.0f} s")
    headers = {name: value for name in KEPT if (value := response.headers.get(name))}
    return httpx.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


class ServerSentEvent(NamedTuple):
    """An event of a stream; `event` is its name, `message` if it has none."""

    event: str
    data: str


class _Reader:
    """The events in a response's bytes. Raises LimitError after too many bytes without an event, or after too long."""

    def __init__(self, response: httpx.Response, seconds: float) -> None:
        content_type = response.headers.get("content-type", "").partition(";")[0].strip()
        if content_type != "text/event-stream":
            raise httpx.TransportError(f"the answer is {content_type[:40]!r} in place of text/event-stream")
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            raise LimitError(f"the stream is encoded as {encoding[:40]!r}")
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._count = 0  # bytes since the last event
        self._line = bytearray()  # the beginning of a line
        self._ended_in_cr = False
        self._event, self._data = "", list[str]()

    def read(self, piece: bytes) -> Iterator[ServerSentEvent]:
        self._count += len(piece)
        if self._count > EVENT_BYTES:
            raise LimitError(f"more than {EVENT_BYTES} bytes came without a whole event")
        if time.monotonic() > self._deadline:
            raise LimitError(f"the stream had not ended after {self._seconds:.0f} s")
        if self._ended_in_cr:
            piece = piece.removeprefix(b"\n")
        self._ended_in_cr = piece.endswith(b"\r")
        rest, *begun = _LINE_END.split(piece)
        self._line += rest
        for begin in begun:
            line = self._line.decode("utf-8", "replace")
            self._line = bytearray(begin)
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            elif name == "event":
                self._event = value.removeprefix(" ")
            elif not line and (self._data or self._event):
                yield ServerSentEvent(self._event or "message", "\n".join(self._data))
                self._event, self._data, self._count = "", [], 0


def events(response: httpx.Response, seconds: float = math.inf) -> Iterator[ServerSentEvent]:
    """Yield the events of a streamed response that has not been read. Raises LimitError and httpx's other errors."""
    reader = _Reader(response, seconds)
    for piece in response.iter_raw():
        yield from reader.read(piece)


async def aevents(response: httpx.Response, seconds: float = math.inf) -> AsyncIterator[ServerSentEvent]:
    """Yield the events of an asynchronous client's response. Raises the errors of `events`."""
    reader = _Reader(response, seconds)
    async for piece in response.aiter_raw():
        for event in reader.read(piece):
            yield event
