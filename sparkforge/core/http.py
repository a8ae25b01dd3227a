"""HTTP requests whose whole response is read, with a limit on its bytes and on its time."""

from __future__ import annotations

import time
from typing import Any

import httpx

ANSWER_BYTES = 64 << 20  # the prompt logprobs of 131,072 tokens are the largest answer that we ask for
ENCODINGS = ("", "identity", "gzip", "deflate")  # no lists such as "gzip, gzip": each level can expand a thousandfold


class LimitError(httpx.TransportError):
    """A response exceeded its limit of bytes or time, or has an unsupported content encoding."""


def request(
    client: httpx.Client,
    method: str,
    url: str,
    *,
    seconds: float,
    limit: int = ANSWER_BYTES,
    **options: Any,
) -> httpx.Response:
    """Send a request and return the whole response: at most `limit` bytes, unpacked, within `seconds`.

    The time is checked when bytes arrive; the client's read timeout limits the wait for them. Raises LimitError and
    httpx's other errors.
    """
    try:
        with client.stream(method, url, **options) as response:
            return whole(response, seconds=seconds, limit=limit)
    except (httpx.InvalidURL, ValueError, OverflowError) as error:  # a host name that IDNA refuses; a port above 65535
        raise httpx.UnsupportedProtocol(f"{url[:200]!r} is not a URL: {error}") from error


def whole(response: httpx.Response, *, seconds: float, limit: int = ANSWER_BYTES) -> httpx.Response:
    """Read the rest of a streamed response and return it whole. Raises the same errors as `request`."""
    deadline, body = time.monotonic() + seconds, bytearray()
    if (encoding := response.headers.get("content-encoding", "").lower()) not in ENCODINGS:
        raise LimitError(f"the answer is encoded as {encoding[:40]!r}")
    for piece in response.iter_bytes():
        body += piece
        if len(body) > limit:
            raise LimitError(f"the answer has more than {limit} bytes")
        if time.monotonic() > deadline:
            raise LimitError(f"the answer had not ended after {seconds:.0f} s")
    headers = {name: value for name in ("content-type", "retry-after") if (value := response.headers.get(name))}
    return httpx.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)
