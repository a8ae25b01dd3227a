"""The few calls that we make to an OpenAI API: is it healthy, does it give a token, chat with it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from sparkforge import sse
from sparkforge.errors import ServerReplyError

POLL_SECONDS = 0.25
NO_ANSWER = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)  # JSON of another shape
CHAT_TIMEOUT = httpx.Timeout(10.0, read=600.0)  # the first token of a long prompt on a CPU takes minutes


def healthy(url: str) -> bool:
    """Tell whether GET /health answers 200."""
    try:
        return httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def first_token(url: str, model: str, timeout: float, key: str = "") -> str:
    """Generate one token and return its text. Raises ServerReplyError if none comes within `timeout` seconds.

    `key` is the server's API key, if it has one.

    A healthy server can still be unable to generate: kernels compile, and fail, at the first request.
    """
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    try:
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=timeout, headers=_headers(key), trust_env=False)
        reply.raise_for_status()
        told = reply.json()
        usage, text = told["usage"], told["choices"][0]["text"]
        count = usage["completion_tokens"]
    except httpx.HTTPStatusError as error:
        raise _refused(error.response) from error
    except (httpx.HTTPError, *NO_ANSWER) as error:
        raise ServerReplyError("the server gave no first token", repr(error), "./inv logs") from error
    if count != 1:
        raise ServerReplyError("the server gave no first token", f"it counted {usage}", "./inv logs")
    return str(text)


def wait_until_serving(url: str, model: str, deadline: float, still_alive: Callable[[], bool]) -> bool:
    """Wait for health and then for one token; return False if the process ends or `deadline` (monotonic) passes."""
    while time.monotonic() < deadline and still_alive():
        if healthy(url):
            first_token(url, model, max(1.0, deadline - time.monotonic()))
            return True
        time.sleep(POLL_SECONDS)
    return False


def chat(url: str, model: str, message: str, max_tokens: int, key: str = "") -> Iterator[str]:
    """Stream the answer to `message` as pieces of text, reasoning included. Raises ServerReplyError."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": message}],
        "max_tokens": max_tokens,
        "stream": True,
    }
    try:
        with httpx.stream(
            "POST",
            f"{url}/v1/chat/completions",
            json=body,
            timeout=CHAT_TIMEOUT,
            headers=_headers(key),
            trust_env=False,
        ) as reply:
            if reply.is_error:
                reply.read()
                raise _refused(reply)
            for event in _events(reply):
                yield from _pieces(event)
    except (httpx.HTTPError, *NO_ANSWER) as error:
        raise ServerReplyError("the answer broke off", repr(error), "./inv logs") from error


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event up to [DONE]."""
    for line in sse.lines(reply):
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if line.startswith("data:"):
            yield json.loads(data)
    raise ServerReplyError("the answer broke off", "the stream ended without [DONE]", "./inv logs")


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise ServerReplyError("the server stopped the answer", str(event["error"]), "./inv logs")
    for choice in event.get("choices", []):
        delta = choice.get("delta", {})
        yield from (str(text) for key in ("reasoning", "reasoning_content", "content") if (text := delta.get(key)))


def _refused(reply: httpx.Response) -> ServerReplyError:
    try:
        why = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        why = reply.text[:300]
    return ServerReplyError(f"the server answered {reply.status_code}", str(why), "./inv logs")
