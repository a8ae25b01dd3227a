"""The client of an OpenAI API: health, models, completions, chats and streams, each bounded in size and time."""

import ipaddress
import json
import math
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sparkforge.core import http
from sparkforge.core.errors import ServerError, UsageError

HEALTH_SECONDS = 2.0
GET_SECONDS = 30.0  # for requests for which the server computes nothing
READ_SECONDS = 600.0  # between two pieces of a stream: the first token of a long prompt on a CPU takes minutes
ANSWER_SECONDS = 3600.0  # for a whole answer
ERROR_BYTES, ERROR_SECONDS = 1 << 20, 10.0  # limits for reading an error's JSON
POLL_SECONDS = 0.25
# Exceptions for JSON with unexpected content, and for lines without metrics.
WRONG_SHAPE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL, *WRONG_SHAPE)
LAST_EVENTS = {"response.completed", "response.incomplete", "response.failed"}  # the Responses API sends no [DONE]
LONGEST = 4096  # characters of a line of /metrics that is parsed; vLLM's have 100
# vLLM's count of generated tokens over all requests (vllm/v1/metrics/loggers.py, 0.32.0).
COUNTER = "vllm:generation_tokens_total"


class StreamDelta(NamedTuple):
    """One event of a streamed answer: text, or the reason why the answer ends, such as `stop` or `length`."""

    text: str
    reasoning: bool = False
    finish_reason: str = ""


@dataclass(frozen=True)
class Served:
    """A model that an endpoint offers; `max_model_len` is 0 if unknown."""

    name: str
    max_model_len: int


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI API at `url` (without /v1) and the model to request.

    `key` is the API key, by default `OPENAI_API_KEY`; `read_seconds` is the longest wait for more bytes. Raises
    UsageError if `url` is not an HTTP URL.
    """

    url: str
    model: str = ""
    read_seconds: float = READ_SECONDS
    key: str = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY", ""), repr=False)

    def __post_init__(self) -> None:
        require_url(self.url, "--url", "--url http://127.0.0.1:8000")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of an httpx client for the endpoint."""
        return {
            "base_url": self.url,
            "timeout": httpx.Timeout(10.0, read=self.read_seconds, pool=None),
            "headers": headers(self.key),
            "trust_env": uses_proxy(self.url),
        }

    def healthy(self) -> bool:
        """Tell whether GET /health answers 200."""
        try:
            return self.get("/health", seconds=HEALTH_SECONDS).status_code == HTTPStatus.OK
        except ServerError:
            return False

    def accepts_key(self) -> bool:
        """Tell whether the server accepts the API key; true if it does not answer."""
        try:
            return self.get("/v1/models", seconds=HEALTH_SECONDS).status_code != HTTPStatus.UNAUTHORIZED
        except ServerError:
            return True

    def get(self, path: str, seconds: float = GET_SECONDS) -> httpx.Response:
        """GET a path. Raises ServerError if nothing answers within `seconds`."""
        seconds = min(self.read_seconds, seconds)
        return self._request("GET", path, seconds, timeout=seconds)

    def send(self, path: str, body: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> httpx.Response:
        """POST JSON and return the response, whatever its status. Raises ServerError if nothing answers."""
        return self._request("POST", path, seconds, json=body)

    def post(self, path: str, body: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """POST JSON and return the JSON object of a successful response. Raises ServerError for other responses."""
        response = self.send(path, body, seconds)
        if response.is_error:
            raise response_error(response, path)
        try:
            value = response.json()
        except WRONG_SHAPE as error:
            raise _reply_error(f"{path} gave no JSON", str(error)) from error
        if not isinstance(value, dict):
            raise _reply_error(f"{path} answered {response.status_code}", response.text)
        return value

    def _request(self, method: str, path: str, seconds: float, **options: Any) -> httpx.Response:
        try:
            with httpx.Client(**self.options) as client:
                return http.request(client, method, path, seconds=seconds, **options)
        except httpx.HTTPError as error:
            fix = "./inv up   # or give --url"
            raise ServerError(f"{self.url} does not answer", repr(error)[:300], fix, code="server.reply") from error

    def events(self, path: str, body: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> Iterator[Any]:
        """Stream an answer, `seconds` at most, and yield the JSON of each event.

        Raises ServerError for an error response, for an error in the stream, for a stream that ends without [DONE] or
        one of LAST_EVENTS, and for the exceptions of NO_ANSWER.
        """
        options = self.options | {"timeout": httpx.Timeout(10.0, read=min(self.read_seconds, seconds))}
        with httpx.Client(**options) as client, client.stream("POST", path, json=body) as response:
            if response.is_error:
                raise response_error(http.whole(response, seconds=ERROR_SECONDS, limit=ERROR_BYTES), path)
            for event in http.events(response, seconds):
                if event.data == "[DONE]":
                    return
                answer = json.loads(event.data)
                if "error" in answer:
                    raise _reply_error("the server stopped the answer", str(answer["error"]), length=2000)
                yield answer
                if event.event in LAST_EVENTS:
                    return
        raise _reply_error("the answer broke off", "the stream ended without [DONE]")

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """POST /v1/completions and return the response's JSON object. Raises ServerError."""
        return self.post("/v1/completions", {"model": self.model, "prompt": prompt, **options})

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """POST /v1/chat/completions and return the response's JSON object. Raises ServerError."""
        return self.post("/v1/chat/completions", {"model": self.model, "messages": messages, **options})

    def stream_chat(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int, seconds: float = ANSWER_SECONDS
    ) -> Generator[StreamDelta, None, None]:
        """Stream the answer to the last of `messages`, each with its role and content. Raises ServerError."""
        body = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, "stream": True}
        try:
            for event in self.events("/v1/chat/completions", body, seconds):
                for choice in event.get("choices", []):
                    delta = choice.get("delta", {})
                    for key in ("reasoning", "reasoning_content", "content"):
                        if text := delta.get(key):
                            yield StreamDelta(str(text), reasoning=key != "content")
                    if reason := choice.get("finish_reason"):
                        yield StreamDelta("", finish_reason=str(reason))
        except NO_ANSWER as error:
            raise _reply_error("the answer broke off", repr(error)) from error

    def first_token(self, seconds: float) -> str:
        """Generate one token and return its text. Raises ServerError if it does not come within `seconds`."""
        body = {"model": self.model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        try:
            response = self.post("/v1/completions", body, seconds)
            usage, text = response["usage"], response["choices"][0]["text"]
            count = usage["completion_tokens"]
        except ServerError as error:
            raise _reply_error("the server cannot generate", f"{error.what}: {error.why}", length=2000) from error
        except WRONG_SHAPE as error:
            raise _reply_error("the server cannot generate", f"the answer has no token: {error!r}") from error
        if count != 1:
            raise _reply_error("the server cannot generate", f"one token was requested, but the usage reports {usage}")
        return str(text)

    def tokenize(self, text: str) -> list[int] | None:
        """Return the text's token ids without special tokens; None if the server has no /tokenize, as vLLM has."""
        try:
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            tokens = self.post("/tokenize", body).get("tokens")
        except ServerError:
            return None
        valid = isinstance(tokens, list) and tokens and all(isinstance(token, int) for token in tokens)
        return tokens if valid else None

    def generated(self) -> float | None:
        """Return how many tokens the server has generated since its start; None if it does not count them."""
        try:
            response = self.get("/metrics")
            counts = metric_values(response.text, (COUNTER,)).get(COUNTER) if response.is_success else None
        except (ServerError, *WRONG_SHAPE):
            return None
        return sum(counts) if counts and math.isfinite(sum(counts)) else None

    def generated_since(self, before: float | None) -> float | None:
        """Return how many tokens were generated since `generated` returned `before`; None if either is unknown."""
        after = self.generated() if before is not None else None
        return after - before if before is not None and after is not None else None

    def version(self) -> str:
        """Return the version that the server reports; empty if it reports none."""
        try:
            response = self.get("/version")
            return str(response.json().get("version", ""))[:80] if response.is_success else ""
        except (ServerError, *WRONG_SHAPE):
            return ""

    def served(self) -> Served:
        """Return the model to measure: the requested one, or the first one. Raises ServerError, UsageError."""
        response = self.get("/v1/models")
        try:
            offered = {str(m["id"]): int(m.get("max_model_len") or 0) for m in response.json()["data"]}
        except WRONG_SHAPE as error:
            why = f"/v1/models answered {response.status_code}: {response.text[:200]}"
            fix = "--help   # check PORT, or give --url"
            raise ServerError(f"{self.url} is not an OpenAI API", why, fix, code="server.reply") from error
        name = self.model or next(iter(offered), "")
        if name not in offered:  # MODEL may be openai/gpt-oss-120b, or a folder, while the served name is gpt-oss-120b
            matching = [known for known in offered if last_part(known) == last_part(name)]
            name = matching[0] if matching else name  # several: the server accepts both names
        if name not in offered:
            models = ", ".join(offered) or "none"
            fix = "--help   # set MODEL, or give --model"
            raise UsageError(f"{self.url} does not serve {name!r}", f"it serves {models}", fix)
        return Served(name, offered[name])

    def wait_until_serving(
        self, deadline: float, alive: Callable[[], bool], listens: Callable[[], bool] = lambda: True
    ) -> bool:
        """Wait for health, then one token; return False if `alive()` is false or `deadline` passes. Raises ServerError.

        `listens` tells whether the expected server has the port: while it starts, another program can take the port.
        """
        if not wait_until(lambda: self.healthy() and listens(), deadline, alive):
            return False
        self.first_token(max(1.0, deadline - time.monotonic()))
        return True


def wait_until(condition: Callable[[], bool], deadline: float, alive: Callable[[], bool] = lambda: True) -> bool:
    """Wait until `condition()`; return False if `alive()` is false or `deadline` (monotonic) passes first."""
    while time.monotonic() < deadline and alive():
        if condition():
            return True
        time.sleep(POLL_SECONDS)
    return False


def headers(key: str) -> dict[str, str]:
    """Return the headers with the API key, empty without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def uses_proxy(url: str) -> bool:
    """Tell whether a proxy of the environment may be used: not for this machine or a private address."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return not (address.is_private or address.is_unspecified)


def require_url(url: str, option: str, example: str) -> None:
    """Raise UsageError unless `url` names a host by http or https; the URL, which may hold a password, is not shown."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(httpx.URL(url).host) and parts.port != 0
        why = "" if valid else "it needs http:// or https:// and a host"
    except (ValueError, httpx.InvalidURL) as error:
        why = str(error)
    if why:
        raise UsageError(f"{option} is not the URL of a server", why, example)


def last_part(model: str) -> str:
    """Return a model's name without its folder or organisation, in lower case."""
    return model.rstrip("/").rpartition("/")[2].lower()


def response_error(response: httpx.Response, path: str = "the server") -> ServerError:
    """Return the error for an error response of `path`: its status and the server's own message."""
    try:
        message = response.json()["error"]["message"]
    except WRONG_SHAPE:
        message = response.text
    return _reply_error(f"{path} answered {response.status_code}", str(message), length=2000)


def _reply_error(problem: str, why: str, length: int = 300) -> ServerError:
    return ServerError(problem, why[:length], "./inv logs   # or the log of the server at --url", code="server.reply")


def metric_values(text: str, names: Collection[str]) -> dict[str, list[float]]:
    """Return the finite values of each metric in `names`, one for each set of labels. Raises one of WRONG_SHAPE."""
    lines = [line for line in text.splitlines() if line.startswith(tuple(names)) and len(line) < LONGEST]
    values_by_name: dict[str, list[float]] = {}
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            if sample.name in names and math.isfinite(sample.value):
                values_by_name.setdefault(sample.name, []).append(sample.value)
    return values_by_name
