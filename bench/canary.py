"""Questions whose answers show a broken gpt-oss before any figure does: each is one request and one check.

A wrong kernel that still serves shows first in the first token of an answer (vLLM issue 37030: it must be
`<|channel|>`), then as null content, then as tool calls that are no JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bench.endpoint import Endpoint
from bench.schema import Check
from sparkforge.errors import ServerReplyError

TOKENS = 512  # enough for a short answer behind low-effort reasoning
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
ASK_TOOL: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris now? Use the tool."}]
HARMONY = "<|start|>user<|message|>What is the capital of France?<|end|><|start|>assistant"  # openai/harmony's format
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def run(endpoint: Endpoint, names: list[str]) -> list[Check]:
    """Ask every canary of `names` and return a check for each."""
    return [_one(endpoint, name) for name in names]


def _one(endpoint: Endpoint, name: str) -> Check:
    try:
        fault = CANARIES[name](endpoint)
    except ServerReplyError as error:
        fault = f"{error.what}: {error.why}"
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        fault = f"the answer has not the API's form ({error!r})"
    return Check(name=f"canary: {name}", ok=not fault, told=fault or "as it should be")


def answers(endpoint: Endpoint) -> str:
    """Chat answers in the API's form, and counts at least one token."""
    reply = endpoint.chat(ASK, max_tokens=16, temperature=0)
    counted = reply["usage"]["completion_tokens"]
    role = reply["choices"][0]["message"]["role"]
    return "" if role == "assistant" and 1 <= counted <= 16 else f"role {role!r}, {counted} of 16 tokens"


def first_token(endpoint: Endpoint) -> str:
    """The first token behind a Harmony prompt opens a channel."""
    reply = endpoint.complete(HARMONY, max_tokens=1, temperature=0, skip_special_tokens=False)
    text = reply["choices"][0]["text"]
    return "" if text == "<|channel|>" else f"the first token is {text!r}, not '<|channel|>'"


def content(endpoint: Endpoint) -> str:
    """Chat gives content that says something."""
    choice = endpoint.chat(ASK, max_tokens=TOKENS, temperature=0)["choices"][0]
    text = choice["message"]["content"]
    if text is None or not text.strip():
        return f"content is {text!r} (finish_reason {choice.get('finish_reason')!r})"
    return "" if any(letter.isalpha() for letter in text) else f"content is {text[:60]!r}: no word in it"


def tool_call(endpoint: Endpoint) -> str:
    """Chat calls the offered tool with arguments that are a JSON object with a city."""
    message = endpoint.chat(ASK_TOOL, tools=[TOOL], max_tokens=TOKENS, temperature=0)["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    if not calls:
        return f"no tool was called; content is {str(message.get('content'))[:60]!r}"
    called = calls[0]["function"]
    if called["name"] != TOOL["function"]["name"]:
        return f"it called {called['name']!r}, which was not offered"
    try:
        arguments = json.loads(called["arguments"])
    except ValueError:
        return f"the arguments are no JSON: {called['arguments'][:80]!r}"
    return "" if isinstance(arguments, dict) and arguments.get("city") else f"the arguments name no city: {arguments!r}"


CANARIES: dict[str, Callable[[Endpoint], str]] = {
    "answers": answers,
    "first_token": first_token,
    "content": content,
    "tool_call": tool_call,
}
