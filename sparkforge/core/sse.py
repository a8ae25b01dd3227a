"""Streamed answers (server-sent events), with a limit on the bytes of an event and on the time of the stream.

`httpx-sse` parses the events. Like the specification, it cuts lines at CR and LF only; httpx's own `iter_lines` also
cuts at U+2028, U+0085 and others, which JSON may hold unescaped.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, cast

import httpx

from sparkforge.core.http import LimitError

# The images do not hold httpx-sse: there the benchmark leaves streams to vLLM's own client.
if TYPE_CHECKING:
    from httpx_sse import ServerSentEvent

EVENT_BYTES = 8 << 20  # of one event, or without one; a piece of an answer has some kilobytes


class _Limited(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A response's bytes, which end with LimitError after too many bytes without an event, or too late."""

    def __init__(self, response: httpx.Response, seconds: float) -> None:
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            raise LimitError(f"the stream is encoded as {encoding[:40]!r}")
        self._stream, self._seconds = response.stream, seconds
        self._deadline = time.monotonic() + seconds
        self.count = 0  # bytes since the last event
        response.stream = self

    def _checked(self, piece: bytes) -> bytes:
        self.count += len(piece)
        if self.count > EVENT_BYTES:
            raise LimitError(f"more than {EVENT_BYTES} bytes came without a whole event")
        if time.monotonic() > self._deadline:
            raise LimitError(f"the stream had not ended after {self._seconds:.0f} s")
        return piece

    def __iter__(self) -> Iterator[bytes]:
        for piece in cast("httpx.SyncByteStream", self._stream):
            yield self._checked(piece)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in cast("httpx.AsyncByteStream", self._stream):
            yield self._checked(piece)

    def close(self) -> None:
        """Close the response's own stream."""
        cast("httpx.SyncByteStream", self._stream).close()

    async def aclose(self) -> None:
        """Close the asynchronous response's own stream."""
        await cast("httpx.AsyncByteStream", self._stream).aclose()


def available() -> bool:
    """Tell whether streams can be read here: whether httpx-sse is installed."""
    return importlib.util.find_spec("httpx_sse") is not None


def events(response: httpx.Response, seconds: float = math.inf) -> Iterator[ServerSentEvent]:
    """Yield the events of a streamed response that has not been read. Raises LimitError and httpx's other errors."""
    from httpx_sse import EventSource  # noqa: PLC0415

    limited = _Limited(response, seconds)
    for event in EventSource(response).iter_sse():
        limited.count = 0
        yield event


async def aevents(response: httpx.Response, seconds: float = math.inf) -> AsyncIterator[ServerSentEvent]:
    """Do what `events` does for an asynchronous client's response."""
    from httpx_sse import EventSource  # noqa: PLC0415

    limited = _Limited(response, seconds)
    async for event in EventSource(response).aiter_sse():
        limited.count = 0
        yield event
