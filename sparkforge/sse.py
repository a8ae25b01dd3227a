"""Lines of a streamed answer (server-sent events), cut at line feeds only.

httpx's own `iter_lines` cuts like `str.splitlines`, also at U+2028, U+0085 and others. JSON may hold those unescaped,
and a model that writes one would seem to send half an event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx


class _Cutter:
    """Bytes in, whole lines out; `rest` is the line that has not ended yet."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, piece: bytes) -> list[str]:
        """Return the lines that `piece` ends, without their ends."""
        *whole, self.rest = (self.rest + piece).split(b"\n")
        return [_text(line) for line in whole]


def lines(reply: httpx.Response) -> Iterator[str]:
    """Yield the lines of a streamed `reply`, the last one even without an end. Raises httpx.HTTPError."""
    cutter = _Cutter()
    for piece in reply.iter_bytes():
        yield from cutter.feed(piece)
    if cutter.rest:
        yield _text(cutter.rest)


async def alines(reply: httpx.Response) -> AsyncIterator[str]:
    """Do what `lines` does for an asynchronous client's reply."""
    cutter = _Cutter()
    async for piece in reply.aiter_bytes():
        for line in cutter.feed(piece):
            yield line
    if cutter.rest:
        yield _text(cutter.rest)


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode(errors="replace")
