"""The calls that a benchmark makes to an OpenAI API, with every bad answer turned into one error."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from sparkforge.errors import ServerReplyError, UsageError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
GET_SECONDS = 30.0  # nothing is computed for these
READ_SECONDS = 600.0  # the first token of a long prompt on a CPU takes minutes
# vLLM's own count of what it generated, over all requests (vllm/v1/metrics/loggers.py, 0.32.0).
COUNTER = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI API at `url` (without /v1). `OPENAI_API_KEY` is sent if set; `read_seconds` is the longest silence."""

    url: str
    model: str = ""
    read_seconds: float = READ_SECONDS
    key: str = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY", ""), repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of an httpx client for it; a proxy is used for other machines only."""
        return {
            "base_url": self.url,
            "timeout": httpx.Timeout(10.0, read=self.read_seconds, pool=None),
            "headers": {"Authorization": f"Bearer {self.key}"} if self.key else {},
            "trust_env": urlsplit(self.url).hostname not in LOOPBACK,
        }

    def get(self, path: str) -> httpx.Response:
        """GET a path. Raises ServerReplyError if nothing answers."""
        try:
            with httpx.Client(**self.options) as client:
                return client.get(path, timeout=min(self.read_seconds, GET_SECONDS))
        except httpx.HTTPError as error:
            raise silent(self.url, error) from error

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST JSON and return the answer's. Raises ServerReplyError for every other answer."""
        try:
            with httpx.Client(**self.options) as client:
                reply = client.post(path, json=body)
            value = reply.json() if reply.is_success else None
        except httpx.HTTPError as error:
            raise silent(self.url, error) from error
        except ValueError as error:
            raise ServerReplyError(f"{path} gave no JSON", str(error), "look at the server's log") from error
        if not isinstance(value, dict):
            raise ServerReplyError(f"{path} answered {reply.status_code}", reply.text[:300], "look at the server's log")
        return value

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """POST /v1/completions."""
        return self.post("/v1/completions", {"model": self.model, "prompt": prompt, **options})

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """POST /v1/chat/completions."""
        return self.post("/v1/chat/completions", {"model": self.model, "messages": messages, **options})

    def tokenize(self, text: str) -> list[int] | None:
        """Return the text's token ids without special tokens; None where the server has no /tokenize (vLLM's own)."""
        try:
            told = self.post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        except ServerReplyError:
            return None
        tokens = told.get("tokens")
        fine = isinstance(tokens, list) and tokens and all(isinstance(token, int) for token in tokens)
        return tokens if fine else None

    def generated(self) -> float | None:
        """Return how many tokens the server says it has generated since it began; None if it keeps no such count."""
        try:
            reply = self.get("/metrics")
        except ServerReplyError:
            return None
        counts = COUNTER.findall(reply.text) if reply.is_success else []
        return sum(map(float, counts)) if counts else None

    def version(self) -> str:
        """Return what the server calls its version; empty if it does not say."""
        try:
            reply = self.get("/version")
            return str(reply.json().get("version", ""))[:80] if reply.is_success else ""
        except (ServerReplyError, ValueError, AttributeError):
            return ""


@dataclass(frozen=True)
class Served:
    """A model that an endpoint offers; `max_model_len` is 0 where it does not say."""

    name: str
    max_model_len: int


def served(endpoint: Endpoint) -> Served:
    """Return the model to measure: the one asked for, or the only one. Raises ServerReplyError, UsageError."""
    reply = endpoint.get("/v1/models")
    try:
        offered = {str(m["id"]): int(m.get("max_model_len") or 0) for m in reply.json()["data"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"/v1/models answered {reply.status_code}: {reply.text[:200]}"
        raise ServerReplyError(f"{endpoint.url} is no OpenAI API", why, "check PORT, or give --url") from error
    name = endpoint.model or next(iter(offered), "")
    if name not in offered:
        told = ", ".join(offered) or "none"
        raise UsageError(f"{endpoint.url} does not serve {name!r}", f"it serves {told}", "set MODEL, or give --model")
    return Served(name, offered[name])


def wait_until_ready(endpoint: Endpoint, seconds: float, alive: Any) -> bool:
    """Wait until a model is offered; False if `alive()` ends or `seconds` pass."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and alive():
        try:
            if endpoint.get("/v1/models").is_success:
                return True
        except ServerReplyError:
            pass
        time.sleep(0.5)
    return False


def silent(url: str, error: Exception) -> ServerReplyError:
    """Build the error for a server that does not answer."""
    return ServerReplyError(f"{url} does not answer", repr(error)[:300], "./inv up, or give --url")
