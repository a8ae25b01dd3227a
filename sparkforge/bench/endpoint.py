"""The calls that a benchmark makes to an OpenAI API, with every bad answer turned into one error."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from sparkforge.core import http
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.serve import metrics

LOOPBACK = ("127.0.0.1", "localhost", "::1")
GET_SECONDS = 30.0  # nothing is computed for these
READ_SECONDS = 600.0  # the first token of a long prompt on a CPU takes minutes
ANSWER_SECONDS = 3600.0  # for a whole answer
NO_ANSWER = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # JSON of another shape
# vLLM's own count of what it generated, over all requests (vllm/v1/metrics/loggers.py, 0.32.0).
COUNTER = "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI API at `url` (without /v1). `OPENAI_API_KEY` is sent if set; `read_seconds` is the longest silence.

    Raises UsageError for a `url` that is none.
    """

    url: str
    model: str = ""
    read_seconds: float = READ_SECONDS
    key: str = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY", ""), repr=False)

    def __post_init__(self) -> None:
        """Refuse a URL before anything is sent."""
        require_url(self.url, "--url", "--url http://127.0.0.1:8000")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of an httpx client for it."""
        return {
            "base_url": self.url,
            "timeout": httpx.Timeout(10.0, read=self.read_seconds, pool=None),
            "headers": {"Authorization": f"Bearer {self.key}"} if self.key else {},
            "trust_env": uses_proxy(self.url),
        }

    def get(self, path: str) -> httpx.Response:
        """GET a path. Raises ServerError if nothing answers."""
        seconds = min(self.read_seconds, GET_SECONDS)
        return self._request("GET", path, seconds, timeout=seconds)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST JSON and return the answer's. Raises ServerError for every other answer."""
        response = self.send(path, body)
        try:
            value = response.json() if response.is_success else None
        except NO_ANSWER as error:
            raise ServerError(
                f"{path} gave no JSON", str(error)[:300], "look at the server's log", code="server.reply"
            ) from error
        if not isinstance(value, dict):
            why = response.text[:300]
            raise ServerError(
                f"{path} answered {response.status_code}", why, "look at the server's log", code="server.reply"
            )
        return value

    def send(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """POST JSON and return the answer, whatever its status. Raises ServerError if nothing answers."""
        return self._request("POST", path, ANSWER_SECONDS, json=body)

    def _request(self, method: str, path: str, seconds: float, **options: Any) -> httpx.Response:
        try:
            with httpx.Client(**self.options) as client:
                return http.request(client, method, path, seconds=seconds, **options)
        except httpx.HTTPError as error:
            raise ServerError(
                f"{self.url} does not answer", repr(error)[:300], "./inv up, or give --url", code="server.reply"
            ) from error

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """POST /v1/completions."""
        return self.post("/v1/completions", {"model": self.model, "prompt": prompt, **options})

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """POST /v1/chat/completions."""
        return self.post("/v1/chat/completions", {"model": self.model, "messages": messages, **options})

    def tokenize(self, text: str) -> list[int] | None:
        """Return the text's token ids without special tokens; None where the server has no /tokenize (vLLM's own)."""
        try:
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            tokens = self.post("/tokenize", body).get("tokens")
        except ServerError:
            return None
        valid = isinstance(tokens, list) and tokens and all(isinstance(token, int) for token in tokens)
        return tokens if valid else None

    def generated(self) -> float | None:
        """Return how many tokens the server says it has generated since it began; None if it keeps no such count."""
        try:
            response = self.get("/metrics")
            counts = metrics.values(response.text, (COUNTER,)).get(COUNTER) if response.is_success else None
        except (ServerError, *metrics.MALFORMED, *NO_ANSWER):
            return None
        return sum(counts) if counts and math.isfinite(sum(counts)) else None

    def generated_since(self, before: float | None) -> float | None:
        """Return how many tokens it has generated since `generated` returned `before`; None where either is unknown."""
        after = self.generated() if before is not None else None
        return after - before if before is not None and after is not None else None

    def version(self) -> str:
        """Return what the server calls its version; empty if it does not say."""
        try:
            response = self.get("/version")
            return str(response.json().get("version", ""))[:80] if response.is_success else ""
        except (ServerError, *NO_ANSWER):
            return ""


def uses_proxy(url: str) -> bool:
    """Tell whether a proxy of the environment may be used: for other machines only."""
    return urlsplit(url).hostname not in LOOPBACK


def require_url(url: str, option: str, example: str) -> None:
    """Raise UsageError unless `url` names a host by http or https; not with the URL, which may hold a password."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(httpx.URL(url).host) and parts.port != 0
        why = "" if valid else "it needs http:// or https:// and a host"
    except (ValueError, httpx.InvalidURL) as error:
        why = str(error)
    if why:
        raise UsageError(f"{option} is no URL of a server", why, example)


@dataclass(frozen=True)
class Served:
    """A model that an endpoint offers; `max_model_len` is 0 where it does not say."""

    name: str
    max_model_len: int


def last_part(model: str) -> str:
    """Return a model's name without its folder or organisation, in lower case."""
    return model.rstrip("/").rpartition("/")[2].lower()


def served(endpoint: Endpoint) -> Served:
    """Return the model to measure: the one asked for, or the only one. Raises ServerError, UsageError."""
    response = endpoint.get("/v1/models")
    try:
        offered = {str(m["id"]): int(m.get("max_model_len") or 0) for m in response.json()["data"]}
    except NO_ANSWER as error:
        why = f"/v1/models answered {response.status_code}: {response.text[:200]}"
        raise ServerError(
            f"{endpoint.url} is no OpenAI API", why, "check PORT, or give --url", code="server.reply"
        ) from error
    name = endpoint.model or next(iter(offered), "")
    if name not in offered:  # MODEL may be openai/gpt-oss-120b, or a folder, where the server says gpt-oss-120b
        matching = [known for known in offered if last_part(known) == last_part(name)]
        name = matching[0] if len(matching) == 1 else name
    if name not in offered:
        models = ", ".join(offered) or "none"
        raise UsageError(f"{endpoint.url} does not serve {name!r}", f"it serves {models}", "set MODEL, or give --model")
    return Served(name, offered[name])


def wait_until_ready(endpoint: Endpoint, seconds: float, alive: Callable[[], bool]) -> bool:
    """Wait until a model is offered; False if `alive()` ends or `seconds` pass."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and alive():
        try:
            if endpoint.get("/v1/models").is_success:
                return True
        except ServerError:
            pass
        time.sleep(0.5)
    return False
