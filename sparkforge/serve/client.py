"""The calls that we make to an OpenAI API: is it healthy, does it generate, chat with it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import httpx

from sparkforge.core import http, sse
from sparkforge.core.errors import ServerError

POLL_SECONDS = 0.25
NO_ANSWER = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)  # JSON of another shape
NO_TRANSPORT = (httpx.HTTPError, httpx.InvalidURL, *NO_ANSWER)
CANNOT = "the server cannot generate"
READ_SECONDS = 600.0  # for a piece of a stream: the first token of a long prompt on a CPU takes minutes
CHAT_SECONDS = 3600.0  # for a whole answer
LAST_EVENTS = {"response.completed", "response.incomplete", "response.failed"}  # of the Responses API, without [DONE]
REFUSAL_BYTES = 1 << 20  # of an error's JSON
REFUSAL_SECONDS = 10.0
HEALTH_SECONDS = 2.0


class StreamDelta(NamedTuple):
    """What one event of a streamed answer brings: text, or why the answer ends; `stop` and `length` are two reasons."""

    text: str
    reasoning: bool = False
    finish_reason: str = ""


def healthy(url: str) -> bool:
    """Tell whether GET /health answers 200."""
    try:
        with httpx.Client(timeout=HEALTH_SECONDS, trust_env=False) as client:
            response = http.request(client, "GET", f"{url}/health", seconds=HEALTH_SECONDS, limit=REFUSAL_BYTES)
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK


def accepts(url: str, key: str) -> bool:
    """Tell whether the server takes the API key; one that does not answer refuses none."""
    try:
        reply = httpx.get(f"{url}/v1/models", timeout=2.0, headers=headers(key), trust_env=False)
    except httpx.HTTPError:
        return True
    return reply.status_code != httpx.codes.UNAUTHORIZED


def first_token(url: str, model: str, timeout: float, key: str = "") -> str:
    """Generate one token and return its text; `key` is the server's API key, if it has one.

    Raises ServerError if it does not come within `timeout` seconds.
    """
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    response = request("a first token", url, "/v1/completions", body, timeout, key)
    try:
        usage, text = response["usage"], response["choices"][0]["text"]
        count = usage["completion_tokens"]
    except NO_ANSWER as error:
        raise unanswered("a first token", repr(error)) from error
    if count != 1:
        raise unanswered("a first token", f"it counted {usage}")
    return str(text)


def request(name: str, url: str, path: str, body: Mapping[str, Any], timeout: float, key: str) -> Any:
    """Send one request and return the response's JSON. Raises ServerError, which calls the request `name`."""
    try:
        with httpx.Client(timeout=timeout, headers=headers(key), trust_env=False) as client:
            response = http.request(client, "POST", f"{url}{path}", seconds=timeout, limit=REFUSAL_BYTES, json=body)
        response.raise_for_status()
        return response.json()
    except httpx.HTTPStatusError as error:
        refusal = _refused(error.response)
        raise unanswered(name, f"{refusal.what}: {refusal.why}") from error
    except (httpx.HTTPError, *NO_ANSWER) as error:
        raise unanswered(name, repr(error)) from error


def refusal(
    name: str, url: str, path: str, body: Mapping[str, Any], timeout: float, key: str, status: HTTPStatus
) -> str:
    """Send a request that the server is to refuse with `status`; return the error's message. Raises ServerError."""
    try:
        request(name, url, path, body, timeout, key)
    except ServerError as error:
        cause = error.__cause__
        if isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == status:
            return error.why
        raise
    raise unanswered(name, "it was answered, where the server must refuse it")


def unanswered(name: str, why: str) -> ServerError:
    """Return the error for a request, called `name`, that a server should answer and does not."""
    return ServerError(CANNOT, f"the request for {name}: {why}", "./inv logs", code="server.reply")


def wait_until_healthy(
    is_healthy: Callable[[], bool], deadline: float, still_alive: Callable[[], bool] = lambda: True
) -> bool:
    """Wait until `is_healthy()`; return False if the server ends or `deadline` (monotonic) passes before."""
    while time.monotonic() < deadline and still_alive():
        if is_healthy():
            return True
        time.sleep(POLL_SECONDS)
    return False


def wait_until_serving(url: str, model: str, deadline: float, still_alive: Callable[[], bool], key: str = "") -> bool:
    """Wait for health, then for one token; False as `wait_until_healthy`.

    Raises ServerError if it is healthy and cannot generate.
    """
    if not wait_until_healthy(lambda: healthy(url), deadline, still_alive):
        return False
    first_token(url, model, max(1.0, deadline - time.monotonic()), key)
    return True


def chat(url: str, model: str, message: str, max_tokens: int, key: str = "") -> Iterator[str]:
    """Stream the answer to `message` as pieces of text, reasoning included. Raises ServerError."""
    for piece in answer(url, model, [{"role": "user", "content": message}], max_tokens, key):
        if piece.text:
            yield piece.text


def answer(
    url: str, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int, key: str = ""
) -> Generator[StreamDelta, None, None]:
    """Stream the answer to the last of `messages`, each with its role and content. Raises ServerError."""
    body = {"model": model, "messages": list(messages), "max_tokens": max_tokens, "stream": True}
    try:
        for event in events(url, "/v1/chat/completions", body, CHAT_SECONDS, key):
            yield from _pieces(event)
    except NO_TRANSPORT as error:
        raise ServerError("the answer broke off", repr(error)[:300], "./inv logs", code="server.reply") from error


def events(url: str, path: str, body: Mapping[str, Any], seconds: float, key: str) -> Iterator[Any]:
    """Stream an answer, `seconds` at most, and yield the JSON of each event.

    Raises ServerError for a refusal and for a stream that ends without [DONE] or one of LAST_EVENTS, and else one of
    NO_TRANSPORT.
    """
    timeout = httpx.Timeout(10.0, read=min(READ_SECONDS, seconds))
    with (
        httpx.Client(timeout=timeout, headers=headers(key), trust_env=False) as client,
        client.stream("POST", f"{url}{path}", json=body) as response,
    ):
        if response.is_error:
            raise _refused(http.whole(response, seconds=REFUSAL_SECONDS, limit=REFUSAL_BYTES))
        for event in sse.events(response, seconds):
            if event.data == "[DONE]":
                return
            yield json.loads(event.data)
            if event.event in LAST_EVENTS:
                return
    raise ServerError("the answer broke off", "the stream ended without [DONE]", "./inv logs", code="server.reply")


def headers(key: str) -> dict[str, str]:
    """Return the headers with which a request has the API key, if there is one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _pieces(event: dict[str, Any]) -> Iterator[StreamDelta]:
    if "error" in event:
        raise ServerError(
            "the server stopped the answer", str(event["error"])[:2000], "./inv logs", code="server.reply"
        )
    for choice in event.get("choices", []):
        delta = choice.get("delta", {})
        for key in ("reasoning", "reasoning_content", "content"):
            if text := delta.get(key):
                yield StreamDelta(str(text), reasoning=key != "content")
        if reason := choice.get("finish_reason"):
            yield StreamDelta("", finish_reason=str(reason))


def _refused(response: httpx.Response) -> ServerError:
    try:
        why = response.json()["error"]["message"]
    except NO_ANSWER:
        why = response.text
    return ServerError(
        f"the server answered {response.status_code}", str(why)[:2000], "./inv logs", code="server.reply"
    )
